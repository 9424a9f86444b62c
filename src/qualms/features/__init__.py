"""Representations of atomic environments. A new one is entered here, in both lists."""

from typing import TypeAlias

from qualms.features.learned import Backbone, LearnedDocument
from qualms.features.soap import Soap, SoapDocument

#: Hyper-parameters, and what a model file has of a representation beside these and tensors.
AnyRepresentation: TypeAlias = Soap | Backbone
AnyDocument: TypeAlias = SoapDocument | LearnedDocument
