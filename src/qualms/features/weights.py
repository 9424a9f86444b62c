"""Weights of pretrained networks: which file is opened, and whether it may be.

Opening the weights of most packages runs code in them. They are opened if they come with an
installed package and have a digest that is listed here, or if a user gives the file. A model file
names weights, but never a place where they are searched.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from qualms.errors import InputError, did_you_mean

#: Package of each backbone, as it is installed.
PACKAGES = {"sevennet": "sevenn", "mace": "mace-torch", "metatomic": "metatomic-torch"}

#: Names of folders that packages are installed into.
_SITES = ("site-packages", "dist-packages")


class Weights(NamedTuple):
    """A file of weights, with an absolute path, and its SHA-256."""

    path: Path
    sha256: str


#: Weights in the wheels of packages, by backbone and name: the file inside the package and its
#: SHA-256, the same in sevenn 0.11 to 0.13. The first are the default.
SHIPPED: dict[str, dict[str, tuple[str, str]]] = {
    "sevennet": {
        "7net-0": (
            "sevenn/pretrained_potentials/SevenNet_0__11Jul2024/checkpoint_sevennet_0.pth",
            "7052cb42b7b3be42b40b97fa0d21077a48c54b5548948fc4dcf346629f813c36",
        ),
        "7net-0_22may2024": (
            "sevenn/pretrained_potentials/SevenNet_0__22May2024/checkpoint_sevennet_0.pth",
            "5d389fafd512e6ae2830d74d0b66ffc49a55d3832653ff8e7bf7f1343013c1d1",
        ),
        "7net-l3i5": (
            "sevenn/pretrained_potentials/SevenNet_l3i5/checkpoint_l3i5.pth",
            "a7ff190d41efe5b8317a03d20a468e4036a1a3e64e0b14fdbab64ac3f4bfc09d",
        ),
    }
}


def installed_folder(package: str) -> Path | None:
    """Return the folder that a package is installed in; None if Python imports it from elsewhere.

    Elsewhere is anything but site-packages: above all the working directory, where a folder or a
    file with the name of the package may have come with a model.
    """
    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.origin).absolute().parents[1]
    return folder if folder.name in _SITES and folder != Path.cwd() else None


def shipped_weights(backbone: str, name: str | None = None) -> Weights:
    """Return weights that come with the package of a network; the default ones if None."""
    shipped = SHIPPED[backbone]
    name = name or next(iter(shipped))
    file, known = shipped[name]
    package = file.partition("/")[0]
    folder = installed_folder(package)
    path = None if folder is None else folder / file
    if path is None or not path.is_file():
        raise InputError(
            f"The weights {name!r} come with the package {package}, but there is no {file} in "
            f"site-packages. Install the package again, pip install 'qualms[{backbone}]', or give "
            "the file of the weights.",
            parameter="model",
        )
    weights = Weights(path, _sha256(path))
    if weights.sha256 != known:
        raise InputError(
            f"{path} is not the file that comes with {package}: its SHA-256 is "
            f"{weights.sha256[:16]}…, and that of {name!r} is {known[:16]}…. It was not opened, "
            "because that may run code. Install the package again.",
            parameter="model",
        )
    return weights


def find_weights(
    backbone: str, model: str | None, *, sha256: str | None = None, trusted: bool
) -> Weights:
    """Return the weights of a network, unless opening them is not allowed.

    Parameters
    ----------
    backbone : str
    model : str, optional
        Name of weights that come with the package, or a file; a file of that name is not looked
        for. The default weights of the package if None.
    sha256 : str, optional
        Digest of the weights that a model was trained with.
    trusted : bool
        Whether a user gave the file, rather than a model file: otherwise only weights that come
        with the package are returned.
    """
    shipped = SHIPPED.get(backbone, {})
    if model in shipped or (model is None and shipped):
        weights = shipped_weights(backbone, model)
    elif not trusted:
        file = "a file" if model is None else repr(Path(model).name)
        raise InputError(
            f"The model was trained with the weights in {file}, which may run code when they are "
            "opened. Give the file, if you trust it, as `representation`.",
            parameter="representation",
        )
    elif model is None:
        raise InputError(
            f"No weights come with {backbone}. Give the file of a model, such as "
            f"`representation='{backbone}:my.model'`.",
            parameter="model",
        )
    else:
        path = Path(model).absolute()
        if not path.is_file():
            names = f", or one of {', '.join(shipped)}" if shipped else ""
            raise InputError(
                f"{model!r} is no file of weights of a {backbone} model. Give the path of a "
                f"file{names}.{did_you_mean(model, shipped)}",
                parameter="model",
            )
        weights = Weights(path, _sha256(path))
    if sha256 is not None and weights.sha256 != sha256:
        raise InputError(
            f"{weights.path} has the SHA-256 {weights.sha256[:16]}…, but the model was trained "
            f"with weights whose SHA-256 is {sha256[:16]}…. Give those as `representation`.",
            parameter="model",
        )
    return weights


def _sha256(path: Path) -> str:
    """Return the digest of a file, computed once as long as the file does not change."""
    try:
        status = path.stat()
        return _digest_of(path, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise InputError(
            f"The weights {path} cannot be read ({error.strerror}).", parameter="model"
        ) from error


@lru_cache(maxsize=16)
def _digest_of(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
