"""An interactive map of structures, or of atoms, for chemiscope.

chemiscope is an extra: ``pip install 'qualms[report]'``. It brings the viewer, one file of
JavaScript, and writes its data format; without it there is no map.
"""

from __future__ import annotations

import gzip
import html
import importlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qualms.arrays import Float64Array, IntArray, check_integer
from qualms.report.judged import Judged

#: More atoms than these, and the map shows structures instead.
MAX_ENVIRONMENTS = 30_000
#: How far around an atom its surroundings are shown, in Å.
_CUTOFF = 4.0
#: Digits of positions in Å after the point: more would not be seen.
_DECIMALS = 3
#: What the colour of atoms within a structure is called, and other colours that one can choose.
_INSIDE = "novelty (relative)"
_OF_ATOM, _AROUND_ATOM = "σ of what the atom contributes", "σ shared with neighbours"
_OF_FORCE = "σ of the force on the atom"
#: Share of the atoms that are not beyond the bright end of the colours: the few strangest of all
#: would leave all others dark.
_WITHIN = 0.99
#: Where the viewer is in the package, and the notices of the libraries in it.
_SCRIPT, _NOTICES = "sphinx/static/chemiscope.min.js", "static/chemiscope-widget.mjs.LICENSE.txt"
HOW_TO_INSTALL = (
    "There is no map of structures, because chemiscope is not installed: "
    "pip install 'qualms[report]'."
)


@dataclass(frozen=True)
class Viewer:
    """The program that shows a map in a browser.

    Attributes
    ----------
    version : str
    script : str
        JavaScript, to stand in a page.
    licence : str
        Its copyright notice and licence, and those of the libraries in it.
    """

    version: str
    script: str
    licence: str


@dataclass(frozen=True)
class StructureMap:
    """Structures, or atoms, as points in the plane.

    Attributes
    ----------
    data : mapping
        In the format of chemiscope.
    note : str
        What is shown, in a sentence.
    places : mapping from int to int
        The index in the map of each structure that is shown.
    of_atoms : bool
        Whether a point is an atom rather than a structure.
    """

    data: Mapping[str, Any]
    note: str
    places: Mapping[int, int]
    of_atoms: bool

    def compressed(self) -> bytes:
        """Return the data as compressed JSON, the same bytes for the same map."""
        text = json.dumps(self.data, allow_nan=False, separators=(",", ":"))
        return gzip.compress(text.encode("utf-8"), 9, mtime=0)


def load_viewer() -> Viewer | None:
    """Read the viewer from the package chemiscope; None if that is not installed."""
    package = _chemiscope()
    if package is None:
        return None
    root = Path(package.__file__).parent
    script, notices = root / _SCRIPT, root / _NOTICES
    if not script.is_file():
        return None
    licence = [_licence()]
    if notices.is_file():
        licence.append(_relevant(notices.read_text(encoding="utf-8")))
    return Viewer(
        version=str(package.__version__),
        script=script.read_text(encoding="utf-8"),
        licence="\n\n".join(part for part in licence if part),
    )


def make_map(
    judged: Judged, first: Sequence[int], *, max_structures: int = 1000, seed: int = 0
) -> StructureMap | None:
    """Put predictions, error bars and errors of structures on a map.

    Parameters
    ----------
    judged : Judged
        With all σ > 0.
    first : sequence of int
        Points whose structures are to be on the map in any case: the worst.
    max_structures : int
        How many structures it may hold. If there are more, a random sample joins the first.
    seed : int
        Of that sample.

    Returns
    -------
    StructureMap or None
        None if there are no structures, or chemiscope is not installed.
    """
    check_integer("max_structures", max_structures, 1)
    package = _chemiscope()
    if judged.frames is None or package is None:
        return None
    every: IntArray = np.unique(judged.structure)
    shown = _chosen(every, judged.structure[np.asarray(first, dtype=np.intp)], max_structures, seed)
    points = _points_of(judged, shown)
    index = np.searchsorted(shown, judged.structure[points])
    of_atoms = _shows_atoms(judged, points)
    frames = [judged.frames[i] for i in shown.tolist()]
    # One point for each structure needs no average.
    single = of_atoms or points.size == shown.size
    properties = _of_points(judged, points) if single else _of_structures(judged, points, index)
    environments, inside = None, _of_atoms_inside(judged, shown, of_atoms)
    if of_atoms and judged.atom is not None:
        environments = _environments(index, judged.atom[points])
    elif inside is not None:
        environments = _environments(*inside.places)
    written = _with_targets(properties, "atom" if of_atoms else "structure")
    if inside is not None:
        written |= _with_targets(inside.properties, "atom")
    data = package.create_input(
        structures=[_structure(atoms) for atoms in frames],
        properties=written,
        environments=environments,
        # The viewer takes the name of a data set for HTML.
        metadata={"name": html.escape(judged.title or judged.target)},
        settings=_settings(
            package,
            tuple(properties),
            of_atoms,
            any(atoms.pbc.any() for atoms in frames),
            inside,
        )
        | {"pinned": [_first_shown(judged, points, index, first, of_atoms)]},
    )
    note = _note(shown.size, every.size, of_atoms, averaged=not single, inside=inside)
    places = {structure: i for i, structure in enumerate(shown.tolist())}
    return StructureMap(data, note, places, of_atoms)


def _chemiscope() -> Any:
    """Import chemiscope; None if that cannot be done."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the notebook widgets that it imports
            return importlib.import_module("chemiscope")
    except ImportError:
        return None


def _licence() -> str:
    """Return the licence of chemiscope as it was installed."""
    for file in distribution("chemiscope").files or ():
        if file.name.upper().startswith("LICENSE"):
            return file.read_text(encoding="utf-8").strip()
    return "chemiscope: BSD 3-clause licence."


def _relevant(notices: str) -> str:
    """Keep the comments that name an author or a licence."""
    comments = [comment.strip() for comment in notices.split("\n\n")]
    words = ("licen", "copyright", "author")
    return "\n\n".join(c for c in comments if any(word in c.lower() for word in words))


def _chosen(every: IntArray, first: IntArray, most: int, seed: int) -> IntArray:
    """Return the structures to show, in their order: all, or the first and a random sample."""
    if every.size <= most:
        return every
    # In the order of the worst, so that the very worst stay if even they are too many.
    kept = np.array(list(dict.fromkeys(first.tolist()))[:most], dtype=np.intp)
    rest = np.setdiff1d(every, kept)
    sample = np.random.default_rng(seed).choice(rest, most - kept.size, replace=False)
    return np.sort(np.concatenate([kept, sample]))


def _points_of(judged: Judged, shown: IntArray) -> IntArray:
    """Return the points of structures, in the order of structures and atoms."""
    points: IntArray = np.flatnonzero(np.isin(judged.structure, shown))
    atom = np.zeros(points.size) if judged.atom is None else judged.atom[points]
    return points[np.lexsort((atom, judged.structure[points]))]


def _first_shown(
    judged: Judged, points: IntArray, index: IntArray, first: Sequence[int], of_atoms: bool
) -> int:
    """Return the number in the map of the worst point: of its atom, or of its structure."""
    if not len(first):
        return 0
    place = int(np.flatnonzero(points == first[0])[0])
    return place if of_atoms else int(index[place])


def _shows_atoms(judged: Judged, points: IntArray) -> bool:
    """Whether each point of the map can be an atom: they are not too many, and no atom has two."""
    if judged.atom is None or points.size > MAX_ENVIRONMENTS:
        return False
    pairs = np.stack([judged.structure[points], judged.atom[points]])
    return bool(np.all(np.any(np.diff(pairs, axis=1) != 0, axis=0)))


#: Values of a property by its name, and their units, which may be empty.
_Properties = dict[str, tuple[Float64Array, str]]


class _Inside(NamedTuple):
    """What is known of each atom of some structures."""

    properties: _Properties
    places: tuple[IntArray, IntArray]  # structure in the map, and atom

    @property
    def bright(self) -> float:
        """Novelty of the bright end of the colours, the same in all structures; the dark is 0."""
        end = float(f"{np.quantile(self.properties[_INSIDE][0], _WITHIN):.2g}")
        return end if end > 0 else 1.0

    def note(self) -> str:
        """Say what colours mean, and where extrapolation begins, which may be beyond them."""
        novelty = self.properties[_INSIDE][0]
        n_beyond = int(np.count_nonzero(novelty > 1))
        strange = f"{n_beyond} of {novelty.size} atoms are" if n_beyond else "no atom is"
        of_forces = ", and of the forces on them" if _OF_FORCE in self.properties else ""
        others = (
            " The menu of the picture has other colours: error bars of what atoms contribute"
            f"{of_forces}."
        )
        return (
            ", atoms coloured by novelty: how unlike the environments that the model knows theirs "
            f"are, from 0 (dark) to {self.bright:g} (bright) in all structures, which one atom in "
            f"a hundred exceeds. At 1 extrapolation begins: {strange} beyond."
            f"{others if len(self.properties) > 1 else ''}"
        )


def _of_atoms_inside(judged: Judged, shown: IntArray, of_atoms: bool) -> _Inside | None:
    """Return values of atoms within structures, if they are known and not too many."""
    if of_atoms or judged.atom_values is None or judged.frames is None:
        return None
    sizes = np.array([len(judged.frames[i]) for i in shown.tolist()])
    if sizes.sum() > MAX_ENVIRONMENTS:
        return None
    novelty, *stds = zip(*judged.atom_values(shown.tolist()), strict=True)
    properties: _Properties = {_INSIDE: (np.concatenate(novelty), "")}
    units = {
        _OF_ATOM: judged.atom_units,
        _AROUND_ATOM: judged.atom_units,
        _OF_FORCE: judged.force_units,
    }
    for name, values in zip(units, stds, strict=True):
        if all(one is not None for one in values):
            properties[name] = (np.concatenate(values), units[name])
    atom = np.concatenate([np.arange(n) for n in sizes.tolist()])
    return _Inside(properties, (np.repeat(np.arange(shown.size), sizes), atom))


def _environments(structure: IntArray, atom: IntArray) -> list[tuple[int, int, float]]:
    pairs = zip(structure.tolist(), atom.tolist(), strict=True)
    return [(i, j, _CUTOFF) for i, j in pairs]


def _of_points(judged: Judged, points: IntArray) -> _Properties:
    z, std = judged.residuals[points], judged.prediction.std[points]
    return {
        "predicted": (judged.prediction.mean[points], judged.units),
        "error": (z, judged.units),
        "σ": (std, judged.units),
        "|error|/σ": (np.abs(z) / std, ""),
        "reference": (judged.y[points], judged.units),
        "number of the structure": (judged.structure[points].astype(np.float64), ""),
    }


def _of_structures(judged: Judged, points: IntArray, index: IntArray) -> _Properties:
    """Average over the points of each structure; ``index`` says which it is."""
    z, std, units = judged.residuals[points], judged.prediction.std[points], judged.units
    count = np.bincount(index)
    worst = np.zeros(count.size)
    np.maximum.at(worst, index, np.abs(z) / std)
    return {
        "mean predicted": (np.bincount(index, judged.prediction.mean[points]) / count, units),
        "RMS error": (np.sqrt(np.bincount(index, z * z) / count), units),
        "RMS σ": (np.sqrt(np.bincount(index, std * std) / count), units),
        "largest |error|/σ": (worst, ""),
        "mean reference": (np.bincount(index, judged.y[points]) / count, units),
        "number of the structure": (np.unique(judged.structure[points]).astype(np.float64), ""),
    }


def _with_targets(properties: _Properties, target: str) -> dict[str, dict[str, Any]]:
    """Write properties as chemiscope wants them, to eight digits."""
    written: dict[str, dict[str, Any]] = {}
    for name, (values, units) in properties.items():
        digits = [float(f"{v:.8g}") for v in values.tolist()]
        written[name] = {"target": target, "values": digits}
        # The viewer takes labels of axes for a kind of HTML.
        if plain := "".join(c for c in units if c not in "<>&"):
            written[name]["units"] = plain
    return written


def _structure(atoms: Any) -> dict[str, Any]:
    """Write one structure: elements, positions and, if it is periodic, the cell, in Å."""
    x, y, z = np.round(atoms.positions, _DECIMALS).T.tolist()
    structure = {"size": len(atoms), "names": list(atoms.symbols), "x": x, "y": y, "z": z}
    # A cell without a volume is none, and the viewer refuses it.
    if atoms.pbc.any() and atoms.cell.rank == 3:
        structure["cell"] = np.round(atoms.cell.array, 6).ravel().tolist()
    return structure


def _settings(
    package: Any, names: Sequence[str], of_atoms: bool, periodic: bool, inside: _Inside | None
) -> dict[str, Any]:
    """Set axes and colours: errors over predictions, coloured by σ; and atoms by novelty."""
    x, y, color = names[:3]
    of_structure = None
    if inside is not None:
        novelty = {"property": _INSIDE, "palette": "viridis", "min": 0.0, "max": inside.bright}
        of_structure = {"color": novelty}
    settings: dict[str, Any] = package.quick_settings(
        x=x,
        y=y,
        map_color=color,
        structure_settings=of_structure,
        periodic=periodic,
        target="atom" if of_atoms else "structure",
        # Error bars differ by orders of magnitude.
        map_settings={"palette": "viridis", "color": {"property": color, "mode": "log"}},
    )
    return settings


def _note(
    n_shown: int, n_all: int, of_atoms: bool, *, averaged: bool, inside: _Inside | None
) -> str:
    what = "Each point is an atom" if of_atoms else "Each point is a structure"
    over = ", averaged over what was predicted for it" if averaged else ""
    note = f"{what}{over}; its colour is the error bar σ. A click on it shows the structure"
    note += "." if inside is None else inside.note()
    if n_shown == n_all:
        return note
    return (
        f"{note} {n_shown} of {n_all} structures are on the map: "
        "those of the worst predictions and a random sample. They are counted anew below the "
        "picture; their own number is among the properties."
    )
