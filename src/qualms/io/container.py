"""Old names of `qualms.io.tensors`, until all of its users have moved."""

from __future__ import annotations

from typing import Any, NamedTuple

from qualms.io.tensors import (
    Document,
    StorageError,
    TensorSpec,
    check_tensors,
    read_document,
    read_tensors,
    write_tensors,
)

__all__ = [
    "Document",
    "StorageError",
    "TensorSpec",
    "check_tensors",
    "read_container",
    "read_document",
    "write_container",
]
write_container = write_tensors


class _Container(NamedTuple):
    tensors: dict[str, Any]
    document: Any


def read_container(*arguments: Any, **options: Any) -> _Container:
    """Read a file by `read_tensors`."""
    return _Container(*read_tensors(*arguments, **options))
