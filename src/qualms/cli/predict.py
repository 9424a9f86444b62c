"""``qualms predict``: properties of new structures, with error bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from qualms.arrays import BoolArray, Float64Array
from qualms.atomistic.forces import Mechanics, check_model, has_forces
from qualms.atomistic.model import AtomisticModel, Chunk, atom_contributions
from qualms.atomistic.novelty import force_norm, local_contributions
from qualms.atomistic.structures import iter_frames
from qualms.cli._common import Force, Json, Model, Quiet, Terminal, Threads
from qualms.errors import InputError, counted
from qualms.io.files import check_output
from qualms.io.predictions import Kind, PredictionWriter, open_writer
from qualms.prediction import Prediction
from qualms.progress import Stages

#: Key of the flag of structures that look like extrapolation.
FLAG = "qualms_extrapolates"


def predict(
    model: Model,
    structures: Annotated[
        Path, typer.Argument(metavar="STRUCTURES", help="New structures: extended XYZ.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .xyz, .csv or .npz.")
    ],
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Write what every member says, too.")
    ] = False,
    forces: Annotated[
        bool, typer.Option("--forces", help="Predict forces, too; to .xyz or .npz.")
    ] = False,
    stress: Annotated[
        bool,
        typer.Option(
            "--stress", help="Predict stresses, too, of cells with a volume; to .xyz or .npz."
        ),
    ] = False,
    atoms: Annotated[
        bool,
        typer.Option(
            "--atoms",
            help="Write how strange each atom is, what it contributes, and the error bar of its "
            "force; to .xyz or .npz.",
        ),
    ] = False,
    ignore_unknown: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown-species",
            help="Predict as if atoms of elements the model does not know were not there.",
        ),
    ] = False,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict new structures. They are read as a stream and may be larger than memory."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_output(output, force=force)
    loaded = AtomisticModel.load(model, threads=threads)
    kind: Kind = "atomic" if loaded.fitted.per_atom else "structure"
    wanted = _Wanted(forces=forces, stress=stress, atoms=atoms, ensemble=ensemble)
    tally = _Tally()
    if forces or stress:
        option = "--forces" if forces else "--stress"
        _check_forces(loaded, output, ignore_unknown, option)
    if atoms:
        _check_atoms(loaded, output)
    unknown = "ignore" if ignore_unknown else "error"
    target, units = loaded.settings.target, loaded.settings.units
    with (
        open_writer(output, target, kind=kind, ensemble=ensemble, force=force) as writer,
        Stages(terminal.progress()).stage("Structures") as advance,
    ):
        for chunk in loaded.stream(iter_frames(structures), unknown_species=unknown):
            tally.add(chunk, _write(writer, chunk, target, units, wanted.of(loaded, chunk, tally)))
            advance(tally.n_structures)
        if stress and tally.n_without_volume == tally.n_structures:
            raise InputError("--stress", "no structure whose cell has a volume", "at least one")
    for warning in tally.warnings():
        terminal.warn(warning)
    terminal.result(
        f"{counted(tally.n_structures, 'structure')} → {output}",
        document={"output": str(output), "target": target, "units": units, **asdict(tally)},
    )


@dataclass(frozen=True)
class _Further:
    """Further arrays of atoms and of structures, and perhaps a better prediction."""

    better: Prediction | None = None
    arrays: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Tally:
    """How many structures there were, and how many to be careful about."""

    n_structures: int = 0
    n_extrapolating: int = 0
    n_unknown_species: int = 0
    n_without_volume: int = 0

    def add(self, chunk: Chunk, extrapolates: BoolArray) -> None:
        """Count the structures of a chunk."""
        self.n_structures += len(chunk.frames)
        self.n_extrapolating += int(extrapolates.sum())
        self.n_unknown_species += int(chunk.has_unknown.sum())

    def warnings(self) -> Iterator[str]:
        """Yield what the user must know."""
        if self.n_unknown_species:
            some = f"{self.n_unknown_species} of {self.n_structures}"
            yield f"{some} structures have elements that are ignored."
        if self.n_without_volume:
            some = f"{self.n_without_volume} of {self.n_structures}"
            yield f"{some} structures have no cell with a volume, and no stress."
        if self.n_extrapolating:
            yield (
                f"{self.n_extrapolating} of {self.n_structures} structures look like extrapolation "
                f"({FLAG}): trust their error bars less."
            )


def _write(
    writer: PredictionWriter, chunk: Chunk, target: str, units: str, more: _Further
) -> BoolArray:
    """Predict and write a chunk; return which of its structures look like extrapolation."""
    novelty = np.empty((len(chunk.frames), 2))
    prediction = chunk.predict(chunk.rows(novelty))
    if more.better is not None:
        prediction = more.better
    flags = chunk.extrapolates(prediction, novelty)
    extra: dict[str, list[Any]] = {FLAG: flags.tolist()}
    if units:
        extra[f"{target}_units"] = [units] * len(chunk.frames)
    rows = chunk.centers if chunk.fitted.per_atom else None
    further = {"arrays": more.arrays, "tensors": more.tensors}
    writer.write(chunk.frames, prediction, rows=rows, extra=extra, **further)
    return flags


@dataclass(frozen=True)
class _Wanted:
    """What is to be written besides the prediction."""

    forces: bool
    stress: bool
    atoms: bool
    ensemble: bool

    def of(self, model: AtomisticModel, chunk: Chunk, tally: _Tally) -> _Further:
        """Predict each structure of a chunk once; count those that have no stress."""
        if not (self.forces or self.stress):
            return _Further(arrays=self._of_atoms(chunk, self._forces_on_known(model, chunk)))
        frames = chunk.frames
        sizes = [len(atoms) for atoms in frames]
        solid: BoolArray = np.array([atoms.cell.rank == 3 for atoms in frames]) & self.stress
        tally.n_without_volume += int(np.count_nonzero(~solid)) if self.stress else 0
        parts = [chosen for chosen in (solid, ~solid) if chosen.any()]
        energies: list[Prediction] = []
        arrays: dict[str, Any] = {}
        tensors = self._no_stress(len(frames), model.settings.n_members)
        for chosen in parts:
            some = [frames[i] for i in np.flatnonzero(chosen)]
            found = model.predict_forces(some, stress=chosen is solid)
            energies.append(found.energy)
            _put(arrays, np.repeat(chosen, sizes), force_arrays(found, ensemble=self.ensemble))
            _put(tensors, chosen, stress_arrays(found, ensemble=self.ensemble))
        back = np.argsort(np.concatenate([np.flatnonzero(chosen) for chosen in parts]))
        of_atoms = self._of_atoms(chunk, arrays["forces_uncertainty"])
        forces = arrays if self.forces else {}
        return _Further(Prediction.concatenate(energies)[back], forces | of_atoms, tensors)

    def _forces_on_known(self, model: AtomisticModel, chunk: Chunk) -> Float64Array | None:
        """Return error bars (n, 3) of forces on the atoms that the model knows, if it has any."""
        if not self.atoms or not has_forces(model.fitted):
            return None
        return model.predict_forces(chunk.known).forces.std

    def _of_atoms(self, chunk: Chunk, forces_std: Float64Array | None) -> dict[str, Any]:
        return atom_arrays(chunk, forces_std, ensemble=self.ensemble) if self.atoms else {}

    def _no_stress(self, n: int, n_members: int) -> dict[str, Any]:
        """Return what is written of structures without a stress: all batches have the same keys."""
        if not self.stress:
            return {}
        widths = {"stress": 6, "stress_uncertainty": 6}
        if self.ensemble:
            widths["stress_ensemble"] = 6 * n_members
        return {key: np.full((n, width), np.nan) for key, width in widths.items()}


def _put(arrays: dict[str, Any], rows: BoolArray, some: dict[str, Any]) -> None:
    """Put what is known of some rows into arrays of all of them, made where there are none."""
    for key, values in some.items():
        if key not in arrays:
            arrays[key] = np.full((len(rows), *values.shape[1:]), np.nan)
        arrays[key][rows] = values


def _check_forces(model: AtomisticModel, output: Path, ignore_unknown: bool, option: str) -> None:
    check_model(model.fitted)
    if ignore_unknown:
        raise InputError(option, "with --ignore-unknown-species", "one of the two")
    if output.suffix == ".csv":
        expected = f"a file that ends in .xyz or .npz, for {option.removeprefix('--')}"
        raise InputError("--output", str(output), expected)


def _check_atoms(model: AtomisticModel, output: Path) -> None:
    if model.fitted.per_atom:
        raise InputError("--atoms", "a property of atoms", "one of structures", "Leave it out.")
    if output.suffix == ".csv":
        raise InputError("--output", str(output), "a file that ends in .xyz or .npz, for atoms")


def atom_arrays(chunk: Chunk, forces_std: Float64Array | None, *, ensemble: bool) -> dict[str, Any]:
    """Return what makes atoms uncertain; NaN for those that are unknown.

    That is what they contribute, how strange they are, and the error bars of the forces on them, if
    these are given, (n, 3), and continuous.
    """
    parts = atom_contributions(chunk)
    name = f"{chunk.fitted.settings.target}_atoms"
    known = np.concatenate(
        [np.isin(np.arange(len(f)), c) for f, c in zip(chunk.frames, chunk.centers, strict=True)]
    )

    def of_all(values: Sequence[Float64Array]) -> Float64Array:
        found = np.concatenate(values)
        full = np.full((len(known), *found.shape[1:]), np.nan)
        full[known] = found
        return full

    pairs = zip(chunk.known, parts, strict=True)
    local = [local_contributions(known, part).std for known, part in pairs]
    arrays = {
        name: of_all([part.mean for part in parts]),
        f"{name}_uncertainty": of_all([part.std for part in parts]),
        f"{name}_local_uncertainty": of_all(local),
        f"{name}_novelty": of_all(chunk.atom_novelty()),
    }
    if forces_std is not None and has_forces(chunk.fitted):
        arrays[f"{name}_force_uncertainty"] = of_all([force_norm(forces_std)])
    if ensemble:
        arrays[f"{name}_ensemble"] = of_all([part.members for part in parts])
    return arrays


def force_arrays(mechanics: Mechanics, *, ensemble: bool) -> dict[str, Any]:
    """Return forces (n_atoms, 3), their error bars, and perhaps what each member says."""
    forces = mechanics.forces
    arrays: dict[str, Any] = {"forces": forces.mean, "forces_uncertainty": forces.std}
    if ensemble:
        by_member = forces.members.transpose(0, 2, 1)
        arrays["forces_ensemble"] = by_member.reshape(len(by_member), -1)
    return arrays


def stress_arrays(mechanics: Mechanics, *, ensemble: bool) -> dict[str, Any]:
    """Return stresses (n_structures, 6), their error bars, and perhaps what each member says."""
    stress = mechanics.stress
    if stress is None:
        return {}
    arrays: dict[str, Any] = {"stress": stress.mean, "stress_uncertainty": stress.std}
    if ensemble:
        by_member = stress.members.transpose(0, 2, 1)
        arrays["stress_ensemble"] = by_member.reshape(len(by_member), -1)
    return arrays
