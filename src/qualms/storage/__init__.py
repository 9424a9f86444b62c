"""Files: models, predictions, and how to write either without losing anything."""

from qualms.storage.container import (
    Container,
    Document,
    StorageError,
    TensorSpec,
    check_tensors,
    read_container,
    read_document,
    write_container,
)
from qualms.storage.files import atomic_output, atomic_path, check_output
from qualms.storage.predictions import PredictionWriter, open_writer

__all__ = [
    "Container",
    "Document",
    "PredictionWriter",
    "StorageError",
    "TensorSpec",
    "atomic_output",
    "atomic_path",
    "check_output",
    "check_tensors",
    "open_writer",
    "read_container",
    "read_document",
    "write_container",
]
