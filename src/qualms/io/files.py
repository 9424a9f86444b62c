"""Writing files: complete or not at all, and never over an existing file unless asked to.

Content goes to a hidden temporary file ``.NAME-….part`` in the directory of the destination, which
is renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from qualms.errors import InputError

AnyPath = str | os.PathLike[str]


def check_output(path: AnyPath, *, force: bool = False) -> Path:
    """Check that a file can be written, before the work starts whose result it will hold."""
    _create_temporary(path, _destination(path, force=force)).unlink()
    return Path(path)


def check_not_input(output: AnyPath, *inputs: AnyPath | None) -> None:
    """Check that an output file is none of the input files."""
    for given in inputs:
        if given is not None and os.path.realpath(given) == os.path.realpath(output):
            raise InputError("output", f"'{output}'", "a file other than the input files")


@contextlib.contextmanager
def atomic_path(path: AnyPath, *, force: bool = False) -> Iterator[Path]:
    """Yield the name of a temporary file that replaces ``path`` if the block succeeds.

    It is empty and has the suffix of the destination. If ``path`` is a symbolic link, the file that
    it leads to is replaced. `force` allows to replace an existing file.
    """
    target = _destination(path, force=force)
    temporary = _create_temporary(path, target)
    permissions = temporary.stat().st_mode & 0o777
    try:
        yield temporary
        temporary.chmod(permissions)  # some libraries make files that are private to the user
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.path.lexists(target) and not force:  # created in the meantime: keep both files
        remedy = f"The new one is {temporary}."
        raise InputError("path", path, "a file that does not exist yet", remedy)
    temporary.replace(target)


@contextlib.contextmanager
def atomic_output(
    path: AnyPath, *, force: bool = False, mode: Literal["wb", "w"] = "wb"
) -> Iterator[IO[Any]]:
    """Yield an open temporary file that replaces ``path`` if the block succeeds: `atomic_path`.

    Text (mode "w") is written in UTF-8, with line ends as they are.
    """
    text = {} if mode == "wb" else {"encoding": "utf-8", "newline": ""}
    with atomic_path(path, force=force) as temporary, temporary.open(mode, **text) as file:  # type: ignore[call-overload]
        yield file


def _destination(path: AnyPath, *, force: bool) -> Path:
    """Return the file that a path leads to, if it may be written."""
    target = Path(os.path.realpath(path))
    # Methods of `Path` raise where a directory may not be searched; those of `os.path` do not.
    if os.path.lexists(target) and not os.path.isfile(target):
        raise InputError("path", path, "a new file or a regular one, no directory or device")
    if os.path.lexists(target) and not force:
        remedy = "Choose another name, or replace the file with --force (force=True in Python)."
        raise InputError("path", path, "a file that does not exist yet", remedy)
    if not os.path.isdir(target.parent):
        remedy = f"Create {target.parent} first."
        raise InputError("path", path, "a file in an existing directory", remedy)
    return target


def _create_temporary(path: AnyPath, target: Path) -> Path:
    """Create an empty file next to the target; only an attempt shows whether that is possible."""
    name = f".{target.name[:40]}-{secrets.token_hex(4)}.part{target.suffix}"
    temporary = target.with_name(name)
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        expected = "a file in a directory with write permission"
        raise InputError("path", path, expected, f"({error.strerror}.)") from error
    return temporary
