"""Data to learn with: QM9, a subset of which comes with the package, and molecular crystals."""

from qualms.data.csd import csd
from qualms.data.qm9 import HARTREE_TO_EV, qm9

__all__ = ["HARTREE_TO_EV", "csd", "qm9"]
