"""Data to learn with: QM9, a subset of which comes with the package."""

from qualms.data.qm9 import HARTREE_TO_EV, qm9

__all__ = ["HARTREE_TO_EV", "qm9"]
