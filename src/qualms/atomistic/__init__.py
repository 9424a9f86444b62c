"""Atomistic models: structures in, properties with calibrated error bars out."""

from qualms.atomistic.hypers import Compression, RadialScaling, Scale, Soap, make_soap
from qualms.atomistic.model import AtomisticModel

__all__ = ["AtomisticModel", "Compression", "RadialScaling", "Scale", "Soap", "make_soap"]
