"""One file for a model: named tensors and a document that says what they mean.

A container is a safetensors file, so that other programs can look into it, and never holds code.
What is read is checked before anything is made of it: whoever wrote the file, the outcome is the
arrays that were stored or a `StorageError` that says in one line what is wrong.

Files are read here rather than by the safetensors package: that maps them into memory, and a mapped
file that is truncated under its reader ends the process. One pass over the open file reads, hashes
and checks each block while it is in the cache, and copies it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.numpy import save_file

from qualms.errors import InputError, QualmsError
from qualms.io.files import AnyPath, atomic_path

# ruff: noqa: A002 — a file has a format, whatever Python calls so


AnyArray = NDArray[Any]

#: Largest header that is parsed, in bytes: a thousand tensors need 0.1 MB.
MAX_HEADER = 16 * 2**20
#: Bytes that are read, hashed and checked at a time.
_BLOCK = 2**20
_METADATA = {"format", "version", "document", "checksum"}
_NUMBERS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
#: What a container may hold: types as safetensors and as NumPy call them.
_DTYPES = {f"{t[0].upper()}{8 * int(t[1])}": np.dtype(f"<{t}") for t in _NUMBERS}
_DTYPES["BOOL"] = np.dtype(np.bool_)
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class StorageError(QualmsError, ValueError):
    """A file cannot be used: the message names it and says in one line what is wrong with it."""

    def __init__(self, path: AnyPath, problem: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}.")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.path, self.problem)


class Document(BaseModel):
    """Base class of documents and of models inside them: unknown fields and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


DocumentT = TypeVar("DocumentT", bound=BaseModel)


@dataclass(frozen=True)
class Container(Generic[DocumentT]):
    """What a file holds; ``version`` is that of its format, at most what the reader asked for."""

    tensors: dict[str, AnyArray]
    document: DocumentT
    version: int


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must look like.

    Parameters
    ----------
    kinds : str
        Allowed kinds of numbers, as in ``dtype.kind``: "f", "iu", "b".
    shape : tuple of int or str
        Sizes. A name stands for a size that is the same wherever the name occurs.
    """

    kinds: str
    shape: tuple[int | str, ...]


def write_container(
    path: AnyPath,
    tensors: Mapping[str, AnyArray],
    document: BaseModel,
    *,
    format: str,
    version: int,
    force: bool = False,
) -> None:
    """Write tensors and a document to one file, completely or not at all.

    Parameters
    ----------
    path : path
    tensors : mapping of arrays
        Booleans, integers, float32 or float64, all finite; in any memory order.
    document : pydantic model
        Must be the same after a round trip through JSON.
    format : str
        What kind of file this is, such as "qualms model".
    version : int
        Of the format, ≥ 1.
    force : bool
        Whether an existing file may be replaced.
    """
    arrays = {name: _storable(name, array) for name, array in tensors.items()}
    text = document.model_dump_json()
    _check_document_survives(document, text)
    metadata = {"format": format, "version": str(version), "document": text}
    digest = _digest(metadata, arrays)
    for name in sorted(arrays):
        digest.update(arrays[name])
    metadata["checksum"] = digest.hexdigest()
    with atomic_path(path, force=force) as temporary:
        save_file(arrays, temporary, metadata=metadata)
        with _opened(temporary) as file:
            _read_header(file, format, version)  # never leave a file that cannot be read


def read_container(
    path: AnyPath, document_type: type[DocumentT], *, format: str, version: int
) -> Container[DocumentT]:
    """Read what `write_container` wrote; raise a `StorageError` if it is anything else.

    Parameters
    ----------
    path : path
    document_type : type of pydantic model
        What the document must be.
    format : str
        What kind of file this must be.
    version : int
        The highest version of the format that the caller understands.

    Returns
    -------
    Container
    """
    with _opened(path) as file:
        metadata, entries = _read_header(file, format, version)
        digest = _digest(metadata, entries)
        tensors = {
            name: _read_tensor(file, name, entries[name], digest) for name in sorted(entries)
        }
        if digest.hexdigest() != metadata["checksum"]:
            raise ValueError("the checksum does not match: the file is damaged")
        document = _parse_document(metadata["document"], document_type)
    return Container(tensors, document, int(metadata["version"]))


def read_document(
    path: AnyPath, document_type: type[DocumentT], *, format: str, version: int
) -> DocumentT:
    """Read only the document, in no time, without verifying the checksum: see `read_container`."""
    with _opened(path) as file:
        metadata, _ = _read_header(file, format, version)
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
        Sizes that are known beforehand, by the names that ``expected`` uses for them.

    Returns
    -------
    dict of int
        All named sizes.
    """
    if odd := expected.keys() ^ tensors.keys():
        what = "missing" if min(odd) in expected else "unknown"
        raise StorageError(path, f"tensor {_shown(min(odd))} is {what}")
    known = dict(sizes or {})
    for name, spec in expected.items():
        _check_tensor(path, name, tensors[name], spec, known)
    return known


def _check_tensor(
    path: AnyPath, name: str, tensor: AnyArray, spec: TensorSpec, sizes: dict[str, int]
) -> None:
    """Check one tensor, and add the sizes that it is the first to show."""
    if tensor.dtype.kind not in spec.kinds:
        raise StorageError(path, f"tensor {name!r} is {tensor.dtype}, expected kind {spec.kinds!r}")
    known = dict(sizes)
    matches = tensor.ndim == len(spec.shape) and all(
        size == (known.setdefault(dim, size) if isinstance(dim, str) else dim)
        for dim, size in zip(spec.shape, tensor.shape, strict=True)
    )
    if not matches:
        wanted = ", ".join(f"{d} = {sizes[d]}" if d in sizes else str(d) for d in spec.shape)
        raise StorageError(path, f"tensor {name!r} has shape {tensor.shape}, expected ({wanted})")
    sizes.update(known)


def _storable(name: str, array: AnyArray) -> AnyArray:
    """Return an array as it will lie in the file, if it can be stored."""
    # safetensors writes the memory behind an array without regard to its strides.
    stored = np.asarray(array, order="C")
    stored = stored.astype(stored.dtype.newbyteorder("<"), copy=False)
    parameter = f"tensors[{name!r}]"
    if stored.dtype not in _CODES:
        raise InputError(parameter, array.dtype, "bool, integers, float32 or float64")
    flat, step = stored.reshape(-1), _BLOCK // stored.itemsize
    if not all(_is_sound(flat[i : i + step]) for i in range(0, flat.size, step)):
        raise InputError(parameter, "NaN or infinite values", "finite values")
    return stored


def _check_document_survives(document: BaseModel, text: str) -> None:
    """Refuse a document that JSON would change: pydantic writes NaN as null, for example."""
    try:
        survives = type(document).model_validate_json(text) == document
    except ValidationError:
        survives = False
    if not survives:
        raise InputError(
            "document", type(document).__name__, "a model that JSON represents without loss"
        )


def _is_sound(block: AnyArray) -> bool:
    """Tell whether floats are finite and booleans are 0 or 1; anything is a sound integer."""
    if block.dtype.kind == "f":
        return bool(np.isfinite(block).all())
    return block.dtype.kind != "b" or bool((block.view(np.uint8) <= 1).all())


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, AnyArray | _Entry]) -> Any:
    """Return a SHA-256 that has seen all but the tensors, which follow in the order of names."""
    table = [[name, _CODES[t.dtype], list(t.shape)] for name, t in sorted(tensors.items())]
    head = [metadata["format"], metadata["version"], metadata["document"], table]
    return hashlib.sha256(json.dumps(head, separators=(",", ":")).encode())


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies in the file: ``start`` and ``stop`` count from its beginning."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


@contextlib.contextmanager
def _opened(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file to read; whatever is wrong with it, now or later, is a `StorageError`."""
    try:
        if not Path(path).is_file():
            raise ValueError("there is no file of this name")
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise StorageError(path, f"the file cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StorageError(path, " ".join(str(error).split())) from error


def _read_header(
    file: BinaryIO, format: str, version: int
) -> tuple[dict[str, str], dict[str, _Entry]]:
    """Return metadata and places of the tensors: 8 bytes tell the length of the JSON to read."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise ValueError("the file is empty")
    start = 8 + int.from_bytes(file.read(8), "little")
    if size < start:
        raise ValueError("this is not a safetensors file, or a truncated one")
    if start > MAX_HEADER:
        raise ValueError(f"a header of {start} bytes is more than the {MAX_HEADER} allowed")
    raw = file.read(start - 8)
    # The format pads with spaces; JSON would let other white space pass.
    if not (raw.startswith(b"{") and raw.rstrip(b" ").endswith(b"}")):
        raise ValueError("this is not a safetensors file")
    header = _parse_json(raw)
    metadata = _check_metadata(header.pop("__metadata__", None), format, version)
    entries = {name: _entry(name, item, start) for name, item in header.items()}
    _check_layout(list(entries.values()), start, size)
    return metadata, entries


def _parse_json(text: str | bytes) -> Any:
    """Parse JSON, refusing what a careless reader would accept: repeated keys and NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        decoded = text if isinstance(text, str) else text.decode()  # json would guess encodings
        return json.loads(decoded, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"damaged or invalid JSON ({error})") from error


def _entry(name: str, item: Any, start: int) -> _Entry:
    """Check the description of one tensor by itself."""
    where = f"tensor {_shown(name)}"
    match item:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            dtype = _DTYPES.get(code)
        case _:
            raise ValueError(f"{where} is not described by dtype, shape and data_offsets")
    if dtype is None:
        raise ValueError(f"{where} is of type {_shown(code)}, which is not supported")
    if len(shape) > 32 or not all(isinstance(n, int) and 0 <= n < 2**31 for n in shape):
        raise ValueError(f"{where} has an impossible shape")
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"shape and offsets of {where} contradict each other")
    return _Entry(dtype, tuple(shape), start + begin, start + end)


def _check_layout(entries: list[_Entry], start: int, size: int) -> None:
    """Check that the tensors fill the file without gaps or overlaps."""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != start:
            raise ValueError("tensors overlap, or there are gaps between them")
        start = entry.stop
    if size != start:
        raise ValueError(f"the file has {size} bytes instead of {start}: truncated or damaged")


def _check_metadata(metadata: Any, format: str, version: int) -> dict[str, str]:
    """Check that this is the right kind of file, in a version that can be read."""
    if not isinstance(metadata, dict) or metadata.get("format") != format:
        raise ValueError(f"this is a safetensors file but not a {format}")
    found = metadata.get("version")
    if not isinstance(found, str) or not re.fullmatch(r"[1-9][0-9]{0,5}", found):
        raise ValueError(f"{_shown(found)} is not the version of a {format}")
    if int(found) > version:
        known = f"protocol {found}; this one reads up to {version}"
        raise ValueError(f"written by a newer qualms ({known}): upgrade")
    if metadata.keys() != _METADATA or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"the metadata are not {', '.join(sorted(_METADATA))}")
    return metadata


def _read_tensor(file: BinaryIO, name: str, entry: _Entry, digest: Any) -> AnyArray:
    """Read a tensor block by block, adding it to the digest."""
    tensor = np.empty(entry.shape, entry.dtype)
    flat, step = tensor.reshape(-1), _BLOCK // tensor.itemsize
    file.seek(entry.start)
    for start in range(0, flat.size, step):
        block = flat[start : start + step]
        if file.readinto(block) != block.nbytes:  # type: ignore[attr-defined]
            raise ValueError("the file was truncated while it was read")
        if not _is_sound(block):
            raise ValueError(f"tensor {_shown(name)} holds NaN, infinite or invalid values")
        digest.update(block)
    return tensor


def _parse_document(text: str, document_type: type[DocumentT]) -> DocumentT:
    """Check the document against its schema."""
    _parse_json(text)  # pydantic lets repeated keys pass
    try:
        return document_type.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = _shown(".".join(map(str, first["loc"])))
        raise ValueError(f"the document is not valid at {where}: {first['msg']}") from error


def _shown(value: object) -> str:
    """Show what a file says: without control characters, and not at any length."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
