"""Atomistic models: structures in, properties with calibrated uncertainties out."""

from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import StructurePrediction
from qualms.atomistic.structures import FrameFiles
from qualms.features.soap import Compression, RadialScaling, Scale, Soap, make_soap

__all__ = [
    "AtomisticModel",
    "Compression",
    "FrameFiles",
    "RadialScaling",
    "Scale",
    "Soap",
    "StructurePrediction",
    "make_soap",
]
