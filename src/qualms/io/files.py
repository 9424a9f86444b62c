"""Files: written completely or not at all, and never over an existing one unless asked to.

Content goes to a hidden temporary file ``.NAME-….part`` in the directory of the destination, which
is renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from qualms.errors import InputError

AnyPath = str | os.PathLike[str]


# --- reading ---


def check_input(path: AnyPath, parameter: str = "path") -> Path:
    """Check that a path is that of a regular file that can be read."""
    if reason := why_unreadable(path):
        raise InputError(f"{_shown(path)} {reason}.", parameter=parameter)
    return Path(path)


def why_unreadable(path: AnyPath) -> str:
    """Return why a file cannot be read, "" if it can.

    Only regular files can: opening a pipe would wait for its writer, and a device may have no end.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "pipe, socket or device"
            return f"is a {kind}, not a regular file"
        open(path, "rb").close()
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return ""


def digest_of(path: AnyPath, parameter: str = "path") -> str:
    """Return the SHA-256 of the content of a file."""
    with check_input(path, parameter).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: AnyPath, digest: str, parameter: str = "model") -> None:
    """Check that a file still has the SHA-256 that it had."""
    if digest_of(path, parameter) != digest:
        raise InputError(
            f"{_shown(path)} has another content than when it was exported. Export it again.",
            parameter=parameter,
        )


def _shown(path: AnyPath) -> str:
    """Return a path as it stands in messages."""
    return repr(os.fspath(path))


# --- writing ---


class _Temporary(NamedTuple):
    """A temporary file, its destination, and whether it may replace a file there."""

    temporary: Path
    target: Path
    path: AnyPath
    force: bool


#: Complete files of a block of `written_together`.
_TOGETHER: ContextVar[list[_Temporary] | None] = ContextVar("_TOGETHER", default=None)


def check_output(path: AnyPath, *, force: bool = False) -> Path:
    """Check that a file can be written, before the work starts whose result it will hold."""
    temporary = _temporary(target := _destination(path, force=force))
    _create(temporary, path, target)
    temporary.unlink()
    return Path(path)


def check_not_input(output: AnyPath, *inputs: AnyPath | None) -> None:
    """Check that an output file is none of the input files."""
    for path in inputs:
        if path is not None and os.path.realpath(path) == os.path.realpath(output):
            raise InputError(
                f"{_shown(output)} is an input file. Choose another name for the output.",
                parameter="output",
            )


@contextlib.contextmanager
def written_together() -> Iterator[None]:
    """Let files that belong together appear together.

    What `atomic_path` and `atomic_output` write within the block stays under temporary names until
    its end. The first of them, to which the others belong, is renamed last. If the block fails,
    none appears. Within another such block, this one does nothing.
    """
    if _TOGETHER.get() is not None:
        yield
        return
    files: list[_Temporary] = []
    token = _TOGETHER.set(files)
    try:
        yield
        _rename(files)
    finally:
        _TOGETHER.reset(token)
        _remove(files)


def _remove(files: list[_Temporary]) -> None:
    for file in files:
        file.temporary.unlink(missing_ok=True)


def _rename(files: list[_Temporary]) -> None:
    """Give complete files their names, from the last to the first, and empty the list."""
    appeared = [f.path for f in files if os.path.lexists(f.target) and not f.force]
    if appeared:  # in the meantime: keep both
        names = ", ".join(str(file.temporary) for file in files)
        files.clear()
        raise InputError(
            f"{_shown(appeared[0])} has appeared in the meantime. It was not replaced; the new "
            f"content is in {names}.",
            parameter="path",
        )
    while files:
        files[-1].temporary.replace(files[-1].target)
        files.pop()


@contextlib.contextmanager
def atomic_path(path: AnyPath, *, force: bool = False) -> Iterator[Path]:
    """Yield the name of a temporary file that replaces ``path`` if the block succeeds.

    It is empty and has the suffix of the destination. If ``path`` is a symbolic link, the file that
    it leads to is replaced. `force` allows to replace an existing file. See `written_together` for
    several files.
    """
    target = _destination(path, force=force)
    temporary, together = _temporary(target), _TOGETHER.get()
    files = [_Temporary(temporary, target, path, force)]
    try:
        _create(temporary, path, target)
        permissions = temporary.stat().st_mode & 0o777
        yield temporary
        temporary.chmod(permissions)  # some libraries make files that are private to the user
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if together is None:
            _rename(files)
        else:
            together.append(files.pop())
    finally:
        _remove(files)


@contextlib.contextmanager
def atomic_output(
    path: AnyPath, *, force: bool = False, mode: Literal["wb", "w"] = "wb"
) -> Iterator[IO[Any]]:
    """Yield an open temporary file that replaces ``path`` if the block succeeds: `atomic_path`.

    Parameters
    ----------
    path : path
    force : bool
        Whether an existing file may be replaced.
    mode : {"wb", "w"}
        Bytes, or text in UTF-8 with line ends as they are.
    """
    text = {} if mode == "wb" else {"encoding": "utf-8", "newline": ""}
    with atomic_path(path, force=force) as temporary, temporary.open(mode, **text) as file:  # type: ignore[call-overload]
        yield file


def append(path: AnyPath, content: bytes, *, new: bool = False) -> None:
    """Add content to the end of a file, completely or, where the disk is full, not at all.

    Parameters
    ----------
    path : path
    content : bytes
        Added at once, so that a process that is killed leaves no part of it.
    new : bool
        Whether the file must not exist yet.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL * new, 0o666)
    size = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        if new:
            os.unlink(path)
        raise
    finally:
        os.close(file)


def _destination(path: AnyPath, *, force: bool) -> Path:
    """Return the file that a path leads to, if it may be written."""
    target = Path(os.path.realpath(path))
    # Methods of `Path` raise where a directory may not be searched; those of `os.path` do not.
    if os.path.lexists(target) and not os.path.isfile(target):
        raise InputError(
            f"{_shown(path)} is a directory or a device. Output must be a regular file.",
            parameter="path",
        )
    if os.path.lexists(target) and not force:
        raise InputError(
            f"{_shown(path)} exists. Choose another name, or replace it with `force=True`.",
            parameter="path",
        )
    if not os.path.isdir(target.parent):
        raise InputError(
            f"{_shown(path)} cannot be written: there is no directory {_shown(target.parent)}. "
            "Create it first.",
            parameter="path",
        )
    return target


def _temporary(target: Path) -> Path:
    """Return the name of a temporary file next to the target."""
    return target.with_name(f".{target.name[:40]}-{secrets.token_hex(8)}.part{target.suffix}")


def _create(temporary: Path, path: AnyPath, target: Path) -> None:
    """Create an empty file; only an attempt shows whether that is possible."""
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise InputError(
            f"{_shown(path)} cannot be written: {error.strerror} in {_shown(target.parent)}.",
            parameter="path",
        ) from error
