"""Writing files so that nothing is lost: not what was there before, not what took hours to compute.

What is written goes to a temporary file next to its destination and takes the destination's name
only when it is complete and on the disk. Whatever happens before that, the old file stays as it
was. A killed process can leave behind a hidden temporary file, named ``.NAME-….part`` plus suffix.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TextIO, overload

from qualms.errors import InputError

AnyPath = str | os.PathLike[str]


def check_output(path: AnyPath, *, force: bool = False) -> Path:
    """Refuse a file that could not be written, before the work starts whose result it will hold.

    Parameters
    ----------
    path : path
        The file to write.
    force : bool
        Whether an existing file may be replaced.

    Returns
    -------
    Path
        The same path. Nothing is left behind in its directory.
    """
    # Only an attempt tells: permission bits know nothing of quotas or of who is who on a server.
    temporary, _ = _create_temporary(path, _destination(path, force=force))
    temporary.unlink()
    return Path(path)


def refuse_input(output: AnyPath, *inputs: AnyPath | None) -> None:
    """Refuse to replace what is read, whatever else is allowed."""
    target = Path(output)
    for given in inputs:
        if given is None:
            continue
        source = Path(given)
        same = target.exists() and source.exists() and target.samefile(source)
        if same or os.path.realpath(target) == os.path.realpath(source):
            raise InputError("output", f"'{target}'", "another file than those that are read")


@contextlib.contextmanager
def atomic_path(path: AnyPath, *, force: bool = False) -> Iterator[Path]:
    """Yield the name of a temporary file that replaces ``path`` if the block succeeds.

    It is for libraries that want a file name. The temporary file exists, is empty, lies in the
    directory of the destination and has its suffix. If the block raises anything, an interrupt from
    the keyboard included, the temporary file is removed and ``path`` is as it was before.

    Parameters
    ----------
    path : path
        The file to write; where it is a symbolic link, what the link leads to.
    force : bool
        Whether an existing file may be replaced.

    Yields
    ------
    Path
    """
    target = _destination(path, force=force)
    temporary, permissions = _create_temporary(path, target)
    try:
        yield temporary
        _flush_to_disk(temporary)
        # Some libraries replace the file by one of their own that is private to the user.
        temporary.chmod(permissions)
        _publish(temporary, target, force=force)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_directory(target.parent)


@overload
def atomic_output(
    path: AnyPath, *, force: bool = False, mode: Literal["wb"] = "wb"
) -> contextlib.AbstractContextManager[BinaryIO]: ...


@overload
def atomic_output(
    path: AnyPath, *, force: bool = False, mode: Literal["w"]
) -> contextlib.AbstractContextManager[TextIO]: ...


@contextlib.contextmanager  # type: ignore[misc]
def atomic_output(
    path: AnyPath, *, force: bool = False, mode: Literal["wb", "w"] = "wb"
) -> Iterator[BinaryIO | TextIO]:
    """Yield an open temporary file that replaces ``path`` if the block succeeds: see `atomic_path`.

    Parameters
    ----------
    path : path
        The file to write.
    force : bool
        Whether an existing file may be replaced.
    mode : {"wb", "w"}
        Bytes, or text, which is written in UTF-8 and with line ends as they are.

    Yields
    ------
    file object
    """
    with atomic_path(path, force=force) as temporary:
        if mode == "wb":
            with temporary.open("wb") as binary:
                yield binary
        else:
            with temporary.open("w", encoding="utf-8", newline="") as text:
                yield text


def _destination(path: AnyPath, *, force: bool) -> Path:
    """Return the file that a path leads to, if it may be written."""
    # Replacing the link itself would leave what it leads to as it was.
    target = Path(os.path.realpath(path))
    # `os.path` rather than methods of `target`: those raise where a directory may not be searched.
    exists = os.path.lexists(target)
    if os.path.isdir(target):
        raise InputError("path", path, "a file", "It is a directory: add a file name.")
    if exists and not os.path.isfile(target):
        # A device must not be replaced by a file, least of all by the superuser.
        raise InputError("path", path, "a regular file, or a new one")
    if exists and not force:
        raise _already_exists(path)
    if not os.path.isdir(target.parent):
        raise InputError(
            "path", path, "a file in an existing directory", f"Create {target.parent} first."
        )
    return target


def _already_exists(path: AnyPath, remedy: str = "") -> InputError:
    return InputError(
        "path",
        path,
        "a file that does not exist yet",
        remedy or "Choose another name, or replace the file with --force (force=True in Python).",
    )


def _create_temporary(path: AnyPath, target: Path) -> tuple[Path, int]:
    """Create an empty file next to the target; return it and the permissions of a new file."""
    suffix = "".join(target.suffixes[-2:]) if target.suffix == ".gz" else target.suffix
    # Short enough to be a valid name wherever the name of the target is one.
    name = f".{target.name[:40]}-{secrets.token_hex(4)}.part{suffix}"
    temporary = target.with_name(name)
    try:
        # Created here rather than by `tempfile`, which ignores the user's umask.
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    except OSError as error:
        raise InputError(
            "path", path, "a file in a directory where you may write", f"({error.strerror}.)"
        ) from error
    try:
        return temporary, stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _publish(temporary: Path, target: Path, *, force: bool) -> None:
    """Give a complete file its name, unless another file got that name in the meantime."""
    if force:
        temporary.replace(target)
        return
    try:
        # A hard link, other than a renaming, never replaces what is there.
        os.link(temporary, target)
    except FileExistsError:
        # Neither file may be lost: what was there keeps its name, the new one gets another.
        kept = temporary.rename(target.with_name(temporary.name.lstrip(".")))
        raise _already_exists(
            target, f"It was created while this one was written, which is now {kept}."
        ) from None
    except OSError:
        temporary.replace(target)  # a file system without hard links


def _flush_to_disk(file: Path) -> None:
    """Wait until the content is on the disk: a name must not get there before it."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def _flush_directory(directory: Path) -> None:
    """Wait until the new name is on the disk, where the system can do that (Windows cannot)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
