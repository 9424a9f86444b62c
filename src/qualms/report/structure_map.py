"""Interactive map of structures, or of atoms, for chemiscope.

chemiscope is an extra: ``pip install 'qualms[report]'``. It provides the viewer, one file of
JavaScript, and the data format; without it there is no map.
"""

from __future__ import annotations

import gzip
import html
import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ase.data import atomic_numbers
from ase.data.colors import jmol_colors

from qualms.arrays import Float64Array, IntArray, check_integer
from qualms.evaluation import Evaluation, energy_factor

if TYPE_CHECKING:
    from ase import Atoms

    from qualms.atomistic.model import AtomisticModel

#: With more atoms than these, the map shows structures instead.
MAX_ENVIRONMENTS = 30_000
#: Name of the property of atoms that is 1 where extrapolation begins.
NOVELTY = "novelty (relative)"
NOT_INSTALLED = (
    "The map of structures needs chemiscope, which is not installed: pip install 'qualms[report]'."
)

#: Values of properties and their units, which may be empty, by name.
Properties = dict[str, tuple[Float64Array, str]]
#: Returns two coordinates of each of the structures with the given indices, (1, 2), or of all their
#: atoms, (n_atoms, 2), NaN for those that are not predicted.
Coordinates = Callable[[Sequence[int]], Sequence[Float64Array]]
#: Returns properties of all atoms of the structures with the given indices; the map colours atoms
#: by the first.
AtomValues = Callable[[Sequence[int]], Mapping[str, tuple[Float64Array, str]]]


class Viewer(NamedTuple):
    """The program that shows a map in a browser: version, JavaScript and licences."""

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
        Description for the page.
    places : mapping of int to int
        Index in the map of each structure that is shown.
    of_atoms : bool
        Whether a point is an atom rather than a structure.
    element_colors : sequence of (float, str)
        Scale of the usual colours of elements, if points are atoms: the viewer has none.
    """

    data: Mapping[str, Any]
    note: str
    places: Mapping[int, int]
    of_atoms: bool
    element_colors: Sequence[tuple[float, str]] = ()

    def link(self, evaluation: Evaluation, point: int) -> tuple[int, int | None] | None:
        """Return the place of the structure of a point, and its atom if points are atoms."""
        place = self.places.get(int(evaluation.structure[point]))
        atom = evaluation.atom if self.of_atoms else None
        return None if place is None else (place, None if atom is None else int(atom[point]))

    def compressed(self) -> bytes:
        """Return the data as compressed JSON; the same map gives the same bytes."""
        text = json.dumps(self.data, allow_nan=False, separators=(",", ":"))
        return gzip.compress(text.encode("utf-8"), 9, mtime=0)


def load_viewer() -> Viewer | None:
    """Read the viewer from the package chemiscope; None if that is not installed."""
    try:
        package = _chemiscope()
    except ImportError:
        return None
    root = Path(package.__file__).parent
    licences = [
        file.read_text(encoding="utf-8").strip()
        for file in distribution("chemiscope").files or ()
        if file.name.upper().startswith("LICENSE")
    ]
    # Of the libraries that the viewer contains.
    text = (root / "static/chemiscope-widget.mjs.LICENSE.txt").read_text(encoding="utf-8")
    words = ("licen", "copyright", "author")
    licences += [
        notice.strip()
        for notice in text.split("\n\n")
        if any(word in notice.lower() for word in words)
    ]
    # A script ends at the first closing tag, even one within a string.
    script = (root / "sphinx/static/chemiscope.min.js").read_text(encoding="utf-8")
    script = script.replace("</script", "<\\/script").replace("<!--", "\\x3c!--")
    return Viewer(str(package.__version__), script, "\n\n".join(licences))


def make_map(
    evaluation: Evaluation,
    first: Sequence[int],
    *,
    title: str = "",
    atom_values: AtomValues | None = None,
    coordinates: Coordinates | None = None,
    max_structures: int = 1000,
    seed: int = 0,
) -> StructureMap:
    """Show predictions, uncertainties and errors of structures on a map; chemiscope is needed.

    Parameters
    ----------
    evaluation : Evaluation
        With structures, and all σ > 0.
    first : sequence of int
        Points whose structures are on the map in any case: the worst.
    title : str
    atom_values, coordinates : callables, optional
        See `AtomValues` and `Coordinates`.
    max_structures : int
        If there are more structures, a random sample is added to the first.
    seed : int
        Random seed for that sample.
    """
    check_integer("max_structures", max_structures, 1)
    assert evaluation.frames is not None
    package = _chemiscope()
    every: IntArray = np.unique(evaluation.structure)
    shown = _chosen(every, evaluation.structure[np.asarray(first, np.intp)], max_structures, seed)
    frames = [evaluation.frames[i] for i in shown.tolist()]
    # The points of these structures, sorted by structure and atom, and their places on the map.
    points: IntArray = np.flatnonzero(np.isin(evaluation.structure, shown))
    atom = np.zeros(points.size, np.intp) if evaluation.atom is None else evaluation.atom[points]
    order = np.lexsort((atom, evaluation.structure[points]))
    points, atom = points[order], atom[order]
    index: IntArray = np.searchsorted(shown, evaluation.structure[points])
    places = [*zip(index.tolist(), atom.tolist(), strict=True)]
    # Points of the map are atoms if there is one value per atom, and not too many.
    of_atoms = evaluation.atom is not None and points.size <= MAX_ENVIRONMENTS
    of_atoms = of_atoms and len({*places}) == points.size
    kind, single = "atom" if of_atoms else "structure", of_atoms or points.size == shown.size
    on_map = evaluation.some(points)
    properties = _of_points(on_map) if single else _of_structures(on_map, index)
    inside: Properties = {}
    if not of_atoms and atom_values is not None and sum(map(len, frames)) <= MAX_ENVIRONMENTS:
        inside = dict(atom_values(shown.tolist()))
    centers = places if of_atoms else []
    if inside:
        centers = [(i, j) for i, atoms in enumerate(frames) for j in range(len(atoms))]
    note = [
        f"Each point is one {kind}; the colour is {'σ' if single else 'its largest |error|/σ'}."
    ]
    x, y, color = [*properties][:3]
    if coordinates is not None:
        rows = coordinates(shown.tolist())
        values = [rows[i][j] for i, j in places] if of_atoms else [np.nanmean(r, 0) for r in rows]
        x, y = (f"kernel principal component {k}" for k in (1, 2))
        properties |= {n: (v, "") for n, v in zip((x, y), np.transpose(values), strict=True)}
        similar = "environments" if of_atoms else "structures"
        note.append(
            f"Points that are close have similar {similar}: the axes are kernel principal "
            "components."
        )
    elif not single:
        note.append("The axes are the root mean squares of its errors and of σ.")
    labels = _categories(frames, places if of_atoms else None)
    symbol = "config_type" if "config_type" in labels else None
    if symbol is not None:
        note.append(f"The symbol is the {symbol}.")
    if of_atoms:
        note.append("Coloured by element, atoms have their usual colours.")
    note.append("A click shows the structure.")
    if shown.size < every.size:
        note.append(
            f"The map contains {shown.size} of {every.size} structures: those of the worst "
            "predictions and a random sample. Their number in the data is one of the properties."
        )
    colors = None
    if inside:
        colors, text = _atom_colors(inside)
        note.append(text)
    log_axes = not single and coordinates is None
    settings = package.quick_settings(
        x=x,
        y=y,
        map_color=color,
        symbol=symbol,
        structure_settings=colors,
        periodic=any(atoms.pbc.any() for atoms in frames),
        target=kind,
        map_settings=_map_settings(properties, x, y, color, logarithmic=log_axes),
    )
    worst = int(np.flatnonzero(points == first[0])[0])
    settings["pinned"] = [worst if of_atoms else int(index[worst])]
    data = package.create_input(
        structures=[_structure(atoms) for atoms in frames],
        properties=_written(properties, kind)
        | _written(inside, "atom")
        | {name: {"target": kind, "values": values} for name, values in labels.items()},
        # With the radius of the environment that is shown around an atom, in Å.
        environments=[(*center, 4.0) for center in centers] or None,
        # The viewer interprets the name of a data set as HTML.
        metadata={"name": html.escape(title or evaluation.target)},
        settings=settings,
    )
    numbers = {structure: i for i, structure in enumerate(shown.tolist())}
    scale = _element_scale(labels["element"]) if of_atoms else ()
    return StructureMap(data, " ".join(note), numbers, of_atoms, scale)


def views_of_model(
    model: AtomisticModel, frames: Sequence[Atoms], in_units: str | None = None
) -> dict[str, Any]:
    """Return what the map of a model shows beside its evaluation, as arguments of `make_map`.

    The axes are kernel principal components. Atoms have their novelty and, unless they are what is
    predicted, the uncertainties of their contributions and forces.

    Parameters
    ----------
    model : AtomisticModel
    frames : sequence of Atoms
        Those of the evaluation.
    in_units : str, optional
        Units of energy, see `qualms.atomistic.evaluation.evaluate`.
    """

    def coordinates(indices: Sequence[int]) -> Sequence[Float64Array]:
        from qualms.atomistic.evaluation import kernel_components

        return kernel_components(model, [frames[i] for i in indices])

    def atom_values(indices: Sequence[int]) -> Properties:
        names = (NOVELTY, "σ of the contribution", "σ of the force")
        energies = (model.settings.units, model.settings.units_of("forces"))
        units = [(1.0, ""), *(energy_factor(name, in_units) for name in energies)]
        has_forces = model.fitted.settings.has_forces
        prediction = model.predict([frames[i] for i in indices], forces=has_forces, atoms=True)
        columns = [prediction.atom_novelty, [part.std for part in prediction.atoms]]
        columns += [prediction.force_std] if has_forces else []
        return {
            name: (np.concatenate(values) * factor, unit)
            for name, (factor, unit), values in zip(names, units, columns, strict=False)
        }

    of_atoms = None if model.fitted.per_atom else atom_values
    return {"coordinates": coordinates, "atom_values": of_atoms}


def _chemiscope() -> Any:
    """Import chemiscope."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the notebook widgets that it imports
        return importlib.import_module("chemiscope")


def _chosen(every: IntArray, first: IntArray, most: int, seed: int) -> IntArray:
    """Return the structures to show, sorted: all, or the first and a random sample."""
    if every.size <= most:
        return every
    worst = np.array(list(dict.fromkeys(first.tolist()))[:most], dtype=np.intp)
    rest = np.setdiff1d(every, worst)
    sample = np.random.default_rng(seed).choice(rest, most - worst.size, replace=False)
    return np.sort(np.concatenate([worst, sample]))


def _of_points(e: Evaluation) -> Properties:
    units = e.units
    return {
        "predicted": (e.prediction.mean, units),
        "error": (e.residuals, units),
        "σ": (e.prediction.std, units),
        "|error|/σ": (np.abs(e.residuals) / e.prediction.std, ""),
        "reference": (e.y, units),
        "number of the structure": (e.structure.astype(np.float64), ""),
    }


def _of_structures(e: Evaluation, index: IntArray) -> Properties:
    """Average over the points of each structure; `index` is the structure of each."""
    z, std, units, count = e.residuals, e.prediction.std, e.units, np.bincount(index)
    worst = np.zeros(count.size)
    np.maximum.at(worst, index, np.abs(z) / std)
    properties = {
        "RMS σ": (np.sqrt(np.bincount(index, std * std) / count), units),
        "RMS error": (np.sqrt(np.bincount(index, z * z) / count), units),
        "largest |error|/σ": (worst, ""),
    }
    if e.component is None:  # the mean force on a structure is zero
        properties["mean predicted"] = (np.bincount(index, e.prediction.mean) / count, units)
        properties["mean reference"] = (np.bincount(index, e.y) / count, units)
    numbers = np.unique(e.structure).astype(np.float64)
    return properties | {"number of the structure": (numbers, "")}


def _categories(
    frames: Sequence[Any], places: Sequence[tuple[int, int]] | None
) -> dict[str, list[str]]:
    """Return the config_type of points, if there are 2 to 20 of them, and the element of atoms.

    Points are structures, or atoms at these places: structure and number.
    """
    # The viewer interprets labels as a kind of HTML.
    types = [str(atoms.info.get("config_type", "")) for atoms in frames]
    types = ["".join(c for c in t if c.isprintable() and c not in "<>&")[:40] or "–" for t in types]
    labels = {"config_type": types} if 1 < len({*types}) <= 20 else {}
    if places is None:
        return labels
    labels = {name: [values[i] for i, _ in places] for name, values in labels.items()}
    return labels | {"element": [str(frames[i].symbols[j]) for i, j in places]}


def _element_scale(elements: Sequence[str]) -> list[tuple[float, str]]:
    """Return the usual colours of elements, which the viewer numbers as they occur."""
    colors = []
    for element in dict.fromkeys(elements):
        red, green, blue = (round(255 * c) for c in jmol_colors[atomic_numbers[element]])
        colors.append(f"rgb({red},{green},{blue})")
    last = max(len(colors) - 1, 1)
    return [(i / last, color) for i, color in enumerate([*colors, *colors[:1]][: last + 1])]


def _map_settings(
    properties: Properties, x: str, y: str, color: str, *, logarithmic: bool
) -> dict[str, Any]:
    """Return settings with a logarithmic colour scale, if values allow it.

    Parameters
    ----------
    properties : mapping of str to pairs of arrays and str
    x, y, color : str
        Names of the properties on the axes and of the colour.
    logarithmic : bool
        Whether the axes are logarithmic as well.
    """
    positive = {name: bool(np.all(properties[name][0] > 0)) for name in (x, y, color)}
    settings: dict[str, Any] = {"palette": "viridis", "color": {"property": color}}
    if positive[color]:  # σ varies by orders of magnitude
        settings["color"]["mode"] = "log"
    if logarithmic and positive[x] and positive[y]:
        settings |= {axis: {"property": p, "scale": "log"} for axis, p in (("x", x), ("y", y))}
    return settings


def _written(properties: Properties, target: str) -> dict[str, dict[str, Any]]:
    """Convert properties to the format of chemiscope, with eight digits."""
    written: dict[str, dict[str, Any]] = {}
    for name, (values, units) in properties.items():
        written[name] = {"target": target, "values": [float(f"{v:.8g}") for v in values.tolist()]}
        # The viewer interprets labels of axes as a kind of HTML.
        if plain := "".join(c for c in units if c not in "<>&"):
            written[name]["units"] = plain
    return written


def _structure(atoms: Any) -> dict[str, Any]:
    """Convert one structure: elements, positions and, if it is periodic, the cell, in Å."""
    x, y, z = np.round(atoms.positions, 3).T.tolist()
    structure = {"size": len(atoms), "names": list(atoms.symbols), "x": x, "y": y, "z": z}
    # The viewer rejects a cell without a volume.
    if atoms.pbc.any() and atoms.cell.rank == 3:
        structure["cell"] = np.round(atoms.cell.array, 6).ravel().tolist()
    return structure


def _atom_colors(inside: Properties) -> tuple[dict[str, Any], str]:
    """Return settings for the colours of atoms, the same in all structures, and a note.

    The range of the colours contains 99 % of the atoms.
    """
    name, (values, _) = next(iter(inside.items()))
    bright = float(f"{np.quantile(values, 0.99):.2g}")
    bright = bright if bright > 0 else 1.0
    note = f"Its atoms are coloured by {name}, from 0 (dark) to {bright:g} (bright)."
    if name == NOVELTY:
        n_beyond = int(np.count_nonzero(values > 1))
        note += f" Values above 1 indicate extrapolation: {n_beyond} of {values.size} atoms."
    if len(inside) > 1:
        note += f" Other colours: {', '.join([*inside][1:])}."
    color = {"property": name, "palette": "viridis", "min": 0.0, "max": bright}
    return {"color": color}, note
