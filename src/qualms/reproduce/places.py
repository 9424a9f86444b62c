"""Where a reproduction writes, and what is there already."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qualms.atomistic.memory import format_bytes
from qualms.errors import InputError
from qualms.reproduce.complete import NAMES, complete_part
from qualms.reproduce.results import Results, read_results
from qualms.reproduce.texts import TITLES

#: How systems say that a disk, a quota or a file is full.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Workplace:
    """Where a run writes.

    Attributes
    ----------
    directory : Path
        Results, and below it what is kept for a resumed run and for figures.
    keep_kernels : bool
        Whether kernel rows, gigabytes of them, stay once all sizes are judged.
    """

    directory: Path
    keep_kernels: bool = True

    def results(self, name: str) -> Path:
        """File of the results of a problem."""
        return self.directory / f"{name}.json"

    def kernels(self, name: str, seed: int) -> Path:
        """Directory of the kernel rows of a problem."""
        return self.directory / "kernels" / f"{name}-{seed}"

    def checkpoint(self, name: str) -> Path:
        """Directory for what an interrupted training far from home goes on with."""
        return self.directory / "kernels" / f"{name}-shift"

    def predictions(self, name: str, seed: int, label: str) -> Path:
        """File of the predictions that figures are made of."""
        return self.directory / "predictions" / f"{name}-{seed}-{label}.npz"

    def figure(self, name: str, ending: str) -> Path:
        """File of a figure of a problem."""
        return self.directory / f"{name}-{ending}.png"

    @property
    def page(self) -> Path:
        """The page of all results of the directory."""
        return self.directory / "reproduction.md"


def make_directory(directory: Path) -> None:
    """Make the directory of a run; what is in the way is an error that says so."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "nothing can be written there", str(directory))
    except OSError as error:
        raise InputError(
            "output", f"'{directory}'", "a directory, or a name for a new one", f"({error})"
        ) from error


def is_out_of_room(error: OSError) -> bool:
    """Whether a disk is full: NumPy says so by how much of an array is written, with no number."""
    return error.errno in _FULL or (error.errno is None and "written" in str(error))


@contextmanager
def naming(directory: Path) -> Iterator[None]:
    """Name the directory and what it has free, if a block ends because its disk is full."""
    try:
        yield
    except OSError as error:
        if not is_out_of_room(error):
            raise
        raise InputError(
            "output",
            f"'{directory}'",
            f"a directory with room for results: it has "
            f"{format_bytes(shutil.disk_usage(directory).free)} free ({error})",
            "Free some; the same command, without --force, goes on where it was.",
        ) from error


def check_page(page: Path, *, force: bool) -> None:
    """Refuse to replace a page that was not made by a reproduction."""
    if force or not page.exists():
        return
    try:
        made = page.read_text(encoding="utf-8").startswith(tuple(TITLES.values()))
    except (OSError, ValueError):
        made = False
    if not made:
        raise InputError(
            "output",
            f"'{page}'",
            "a page made by this command, or none",
            "Move it, use another directory, or replace it with --force.",
        )


def other_results(
    directory: Path, found: Mapping[str, Results], say: Callable[[str], None]
) -> list[Results]:
    """Return what was found, and complete results of its scale that were there before, in order.

    Parameters
    ----------
    directory : Path
    found : mapping of str to Results
        By name.
    say : callable
        Told what is left out.
    """
    everything = []
    scales = {results.scale for results in found.values()}
    for name in NAMES:
        path = directory / f"{name}.json"
        if name in found:
            everything.append(found[name])
        elif path.exists():
            try:
                before = complete_part(read_results(path), path, say)
            except InputError as error:
                say(f"Not on the page: {error}")
                continue
            if before.scale in scales:
                everything.append(before)
            else:
                say(f"Not on the page: {path}, which is of scale {before.scale}.")
    return everything
