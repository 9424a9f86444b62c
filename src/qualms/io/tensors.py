"""Tensor files: named arrays and a document that describes them, in one safetensors file.

Such a file holds no code and is never unpickled. All of it is validated before anything is
returned: a file from anybody yields the arrays that were stored, or a `StorageError`. Files are
read as bytes and not mapped into memory: truncating a mapped file ends the process that reads it.
"""

# ruff: noqa: A002 — files have a format

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from qualms.errors import InputError, QualmsError
from qualms.io.files import AnyPath, atomic_path, why_unreadable

AnyArray = NDArray[Any]
DocumentT = TypeVar("DocumentT", bound=BaseModel)

#: Accepted types and their names in safetensors.
DTYPES = {np.dtype(f"<{t}"): f"{t[0].upper()}{8 * int(t[1])}" for t in
           ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")}  # fmt: skip
#: Largest number of a tensor: squares and products with others are still finite.
LARGEST = 1e100


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


class TensorSpec(NamedTuple):
    """Expected kinds of numbers of a tensor, as in ``dtype.kind``: "f", "iu"; and its shape.

    A name in the shape stands for a size that is the same wherever the name occurs.
    """

    kinds: str
    shape: tuple[int | str, ...]


def write_tensors(
    path: AnyPath,
    arrays: Mapping[str, AnyArray],
    document: Document,
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
        Integers, float32 or float64, at most `LARGEST`, in any memory order.
    document : Document
    format, version : str, int
        Kind of file, such as "qualms model", and its version, ≥ 1.
    force : bool
        Whether an existing file may be replaced.
    """
    stored = {}
    for name, array in arrays.items():
        # safetensors ignores strides and byte order.
        values = np.asarray(array, order="C")
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        if values.dtype not in DTYPES or not _is_bounded(values):
            raise InputError(
                f"The array {name!r} of type {values.dtype} cannot be stored. Arrays are integers, "
                f"float32 or float64, finite and at most {LARGEST:g}.",
                parameter=f"arrays[{name!r}]",
            )
        stored[name] = values
    text = document.model_dump_json()
    metadata = {"format": format, "version": str(version), "document": text}
    metadata["checksum"] = checksum(metadata, stored)
    with atomic_path(path, force=force) as temporary:
        try:
            save_file(stored, temporary, metadata=metadata)
        except SafetensorError as error:  # that of a full disk, too, is no OSError
            raise StorageError(path, f"the file cannot be written ({error})") from error


def read_tensors(
    path: AnyPath, document_type: type[DocumentT], *, format: str, version: int
) -> tuple[dict[str, AnyArray], DocumentT]:
    """Read the arrays and the document of a file, or raise a `StorageError`.

    Parameters
    ----------
    path : path
    document_type : type
        Pydantic model that the document must fit.
    format, version : str, int
        Expected kind of file and version of it; other versions are rejected.
    """
    if reason := why_unreadable(path):
        raise StorageError(path, f"the file {reason}")
    try:
        content = Path(path).read_bytes()
        metadata = _read_metadata(content, format, version)
        arrays: dict[str, AnyArray] = load(content)
        for name, array in arrays.items():
            if array.dtype not in DTYPES:
                raise ValueError(f"tensor {ascii(name)[:60]} is {array.dtype}")
            if not _is_bounded(array):
                problem = f"has NaN, infinity or numbers above {LARGEST:g}"
                raise ValueError(f"tensor {ascii(name)[:60]} {problem}")
        if checksum(metadata, arrays) != metadata["checksum"]:
            raise ValueError("the checksum does not match: the file is damaged")
        return arrays, document_type.model_validate_json(metadata["document"])
    except OSError as error:
        raise StorageError(path, f"the file cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ascii(".".join(map(str, first["loc"])))[:60]
        raise StorageError(path, f"invalid document at {where}: {first['msg']}") from error
    except (ValueError, KeyError, SafetensorError, RecursionError) as error:
        raise StorageError(path, " ".join(str(error).split())) from error


def check_tensors(
    tensors: Mapping[str, AnyArray],
    expected: Mapping[str, TensorSpec],
    *,
    path: AnyPath,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Check names, types and shapes of the tensors of a file; return all named sizes.

    Parameters
    ----------
    tensors : mapping of arrays
    expected : mapping of TensorSpec
        Exactly the tensors that must be there.
    path : path
        The file, for the error message.
    sizes : mapping of int, optional
        Known sizes, by the names that ``expected`` uses for them.
    """
    if odd := expected.keys() ^ tensors.keys():
        problem = "missing" if min(odd) in expected else "unknown"
        raise StorageError(path, f"tensor {ascii(min(odd))[:60]} is {problem}")
    dimensions = dict(sizes or {})
    for name, spec in expected.items():
        tensor = tensors[name]
        if tensor.dtype.kind not in spec.kinds:
            problem = f"tensor {name!r} is {tensor.dtype}, expected kind {spec.kinds!r}"
            raise StorageError(path, problem)
        named = zip(spec.shape, tensor.shape, strict=False)
        dimensions |= {d: n for d, n in named if isinstance(d, str) and d not in dimensions}
        if [dimensions.get(str(d), d) for d in spec.shape] != list(tensor.shape):
            shape = ", ".join(
                f"{d} = {dimensions[d]}" if d in dimensions else str(d) for d in spec.shape
            )
            problem = f"tensor {name!r} has shape {tensor.shape}, expected ({shape})"
            raise StorageError(path, problem)
    return dimensions


def _is_bounded(array: AnyArray) -> bool:
    return array.size == 0 or -LARGEST <= float(array.min()) <= float(array.max()) <= LARGEST


def checksum(metadata: Mapping[str, str], arrays: Mapping[str, AnyArray]) -> str:
    """Return the SHA-256 of metadata, names, types, shapes and tensors, in the order of names."""
    table = [[name, DTYPES[a.dtype], list(a.shape)] for name, a in sorted(arrays.items())]
    head = [metadata["format"], metadata["version"], metadata["document"], table]
    digest = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode())
    for name in sorted(arrays):
        digest.update(arrays[name].data)
    return digest.hexdigest()


def _read_metadata(content: bytes, format: str, version: int) -> dict[str, str]:
    """Return the metadata of the header, which follows 8 bytes with its length."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length].decode())
    except ValueError as error:
        raise ValueError(f"this is not a safetensors file ({error})") from error
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != format:
        raise ValueError(f"this is not a {format}")
    expected = {"format", "version", "document", "checksum"}
    if metadata.keys() != expected or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"the metadata are not {', '.join(sorted(expected))}")
    stated: str = metadata["version"]
    if not re.fullmatch(r"[1-9][0-9]{0,5}", stated):
        raise ValueError(f"{ascii(stated)[:60]} is not the version of a {format}")
    if int(stated) != version:
        newer = int(stated) > version
        other, remedy = ("a newer", "update qualms") if newer else ("an older", "train again")
        versions = f"version {stated} of the format; this qualms reads version {version}"
        raise ValueError(f"the file was written by {other} qualms ({versions}): {remedy}")
    return metadata
