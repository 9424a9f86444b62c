"""Hyper-parameters, for modules that still import them from here."""

from qualms.features.soap import PRESETS, Compression, RadialScaling, Scale, Soap, make_soap

__all__ = ["PRESETS", "Compression", "RadialScaling", "Scale", "Soap", "make_soap"]
