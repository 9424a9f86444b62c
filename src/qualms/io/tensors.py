"""Tensor files: named arrays and a document that describes them, in one safetensors file.

Such a file holds no code and is never unpickled. All of it is validated before anything is
returned: a file from anybody yields the arrays that were stored, or a `StorageError`. Files are
read as bytes and not mapped into memory: truncating a mapped file ends the process that reads it.
"""

# ruff: noqa: A002 — files have a format

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from qualms.errors import InputError, QualmsError
from qualms.io.files import AnyPath, atomic_path

AnyArray = NDArray[Any]
DocumentT = TypeVar("DocumentT", bound=BaseModel)

#: Size of the largest accepted header in bytes; a thousand tensors need 0.1 MB.
MAX_HEADER = 16 * 2**20
_METADATA = {"format", "version", "document", "checksum"}
#: Accepted types and their names in safetensors.
_DTYPES = {np.dtype(f"<{t}"): f"{t[0].upper()}{8 * int(t[1])}" for t in
           ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")}  # fmt: skip
_DTYPES[np.dtype(np.bool_)] = "BOOL"


class StorageError(QualmsError, ValueError):
    """A file cannot be used; the message names the file and the problem."""

    def __init__(self, path: AnyPath, problem: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}.")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.path, self.problem)


class Document(BaseModel):
    """Base class of documents and of models inside them: unknown fields and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


@dataclass(frozen=True)
class TensorSpec:
    """Expected type and shape of a tensor.

    Parameters
    ----------
    kinds : str
        Allowed kinds of numbers, as in ``dtype.kind``: "f", "iu", "b".
    shape : tuple of int or str
        Sizes. A name stands for a size that is the same wherever the name occurs.
    """

    kinds: str
    shape: tuple[int | str, ...]


def write_tensors(
    path: AnyPath,
    arrays: Mapping[str, AnyArray],
    document: BaseModel,
    *,
    format: str,
    version: int,
    force: bool = False,
) -> None:
    """Write arrays and a document to one file, completely or not at all.

    Parameters
    ----------
    path : path
    arrays : mapping of arrays
        Booleans, integers, float32 or float64, all finite, in any memory order.
    document : pydantic model
        Must be the same after a round trip through JSON.
    format : str
        Kind of file, such as "qualms model".
    version : int
        Version of the format, ≥ 1.
    force : bool
        Whether an existing file may be replaced.
    """
    stored = {name: _storable(name, array) for name, array in arrays.items()}
    text = document.model_dump_json()
    if len(text) > MAX_HEADER // 2 or not _survives(document, text):
        given = type(document).__name__
        raise InputError("document", given, "a short model that JSON represents without loss")
    metadata = {"format": format, "version": str(version), "document": text}
    metadata["checksum"] = _checksum(metadata, stored)
    with atomic_path(path, force=force) as temporary:
        save_file(stored, temporary, metadata=metadata)


def read_tensors(
    path: AnyPath, document_type: type[DocumentT], *, format: str, version: int
) -> tuple[dict[str, AnyArray], DocumentT]:
    """Read the arrays and the document that `write_tensors` wrote.

    Parameters
    ----------
    path : path
    document_type : type of pydantic model
        Schema of the document.
    format : str
        Expected kind of file.
    version : int
        Highest version of the format that the caller understands.

    Raises
    ------
    StorageError
        The file is anything else, is damaged, or holds NaN or infinite values.
    """
    with _opened(path) as file:
        metadata = _read_metadata(file, format, version)
        file.seek(0)
        arrays: dict[str, AnyArray] = load(file.read())
        for name, array in arrays.items():
            if array.dtype not in _DTYPES:
                raise ValueError(f"tensor {_shown(name)} is {array.dtype}")
            if not _is_valid(array):
                raise ValueError(f"tensor {_shown(name)} holds NaN, infinite or invalid values")
        if _checksum(metadata, arrays) != metadata["checksum"]:
            raise ValueError("the checksum does not match: the file is damaged")
        return arrays, _parse_document(metadata["document"], document_type)


def read_document(
    path: AnyPath, document_type: type[DocumentT], *, format: str, version: int
) -> DocumentT:
    """Read only the document, without the tensors and the checksum: see `read_tensors`."""
    with _opened(path) as file:
        metadata = _read_metadata(file, format, version)
        return _parse_document(metadata["document"], document_type)


def check_tensors(
    tensors: Mapping[str, AnyArray],
    expected: Mapping[str, TensorSpec],
    *,
    path: AnyPath,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Check names, types and shapes of the tensors of a file.

    Parameters
    ----------
    tensors : mapping of arrays
    expected : mapping of TensorSpec
        Exactly the tensors that must be there.
    path : path
        The file, for the error message.
    sizes : mapping of int, optional
        Known sizes, by the names that ``expected`` uses for them.

    Returns
    -------
    dict of int
        All named sizes.
    """
    if odd := expected.keys() ^ tensors.keys():
        problem = "missing" if min(odd) in expected else "unknown"
        raise StorageError(path, f"tensor {_shown(min(odd))} is {problem}")
    known = dict(sizes or {})
    for name, spec in expected.items():
        tensor = tensors[name]
        if tensor.dtype.kind not in spec.kinds:
            problem = f"is {tensor.dtype}, expected kind {spec.kinds!r}"
            raise StorageError(path, f"tensor {name!r} {problem}")
        named = zip(spec.shape, tensor.shape, strict=False)
        known |= {d: n for d, n in named if isinstance(d, str) and d not in known}
        wanted = [known.get(d) if isinstance(d, str) else d for d in spec.shape]
        if wanted != list(tensor.shape):
            shape = ", ".join(f"{d} = {known[d]}" if d in known else str(d) for d in spec.shape)
            raise StorageError(
                path, f"tensor {name!r} has shape {tensor.shape}, expected ({shape})"
            )
    return known


def _storable(name: str, array: AnyArray) -> AnyArray:
    """Return an array as it will lie in the file: safetensors ignores strides and byte order."""
    stored = np.asarray(array, order="C")
    stored = stored.astype(stored.dtype.newbyteorder("<"), copy=False)
    parameter = f"arrays[{name!r}]"
    if stored.dtype not in _DTYPES:
        raise InputError(parameter, array.dtype, "bool, integers, float32 or float64")
    if not _is_valid(stored):
        raise InputError(parameter, "NaN or infinite values", "finite values")
    return stored


def _is_valid(array: AnyArray) -> bool:
    """Return whether floats are finite and booleans are 0 or 1."""
    if array.dtype.kind == "b":
        return bool((array.view(np.uint8) <= 1).all())
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _survives(document: BaseModel, text: str) -> bool:
    """Return whether a document is the same after JSON: pydantic writes NaN as null."""
    try:
        return type(document).model_validate_json(text) == document
    except ValidationError:
        return False


def _checksum(metadata: Mapping[str, str], arrays: Mapping[str, AnyArray]) -> str:
    """Return the SHA-256 of metadata, names, types, shapes and tensors, in the order of names."""
    table = [[name, _DTYPES[a.dtype], list(a.shape)] for name, a in sorted(arrays.items())]
    head = [metadata["format"], metadata["version"], metadata["document"], table]
    digest = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode())
    for name in sorted(arrays):
        digest.update(arrays[name].data)
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file to read; every problem with it, now or later, becomes a `StorageError`."""
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise StorageError(path, f"the file cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, SafetensorError, RecursionError) as error:
        raise StorageError(path, " ".join(str(error).split())) from error


def _read_metadata(file: BinaryIO, format: str, version: int) -> dict[str, str]:
    """Return the metadata of the header, which follows 8 bytes with its length."""
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER or length > os.fstat(file.fileno()).st_size - 8:
        raise ValueError("this is not a safetensors file, or it is truncated")
    try:
        header = json.loads(file.read(length).decode())
    except ValueError as error:
        raise ValueError(f"this is not a safetensors file ({error})") from error
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != format:
        raise ValueError(f"this is not a {format}")
    found = metadata.get("version")
    if not isinstance(found, str) or not re.fullmatch(r"[1-9][0-9]{0,5}", found):
        raise ValueError(f"{_shown(found)} is not the version of a {format}")
    if int(found) > version:
        known = f"version {found} of the format; this one reads up to {version}"
        raise ValueError(f"written by a newer qualms ({known}): upgrade")
    if metadata.keys() != _METADATA or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"the metadata are not {', '.join(sorted(_METADATA))}")
    return metadata


def _parse_document(text: str, document_type: type[DocumentT]) -> DocumentT:
    """Validate the document against its schema."""
    try:
        return document_type.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = _shown(".".join(map(str, first["loc"])))
        raise ValueError(f"the document is not valid at {where}: {first['msg']}") from error


def _shown(value: object) -> str:
    """Return text from a file without control characters, and not at any length."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
