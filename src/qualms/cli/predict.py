"""``qualms predict``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qualms.cli._common import Force, Json, Model, Quiet, Terminal, Threads
from qualms.errors import InputError, counted

if TYPE_CHECKING:
    from qualms.arrays import BoolArray, Float64Array
    from qualms.atomistic.model import AtomisticModel, Chunk
    from qualms.prediction import Prediction

#: Key of the flag of structures that are out of distribution.
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
        bool, typer.Option("--ensemble", help="Write the predictions of all members, too.")
    ] = False,
    forces: Annotated[
        bool, typer.Option("--forces", help="Predict forces, too; .xyz or .npz.")
    ] = False,
    stress: Annotated[
        bool,
        typer.Option("--stress", help="Predict stresses of periodic structures; .xyz or .npz."),
    ] = False,
    atoms: Annotated[
        bool,
        typer.Option(
            "--atoms",
            help="Write the contribution, novelty and uncertainty of each atom; .xyz or .npz.",
        ),
    ] = False,
    ignore_unknown: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown-species",
            help="Ignore atoms of elements that are not in the training set.",
        ),
    ] = False,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict properties of new structures, with uncertainties."""
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.structures import iter_frames
    from qualms.io.files import check_output
    from qualms.io.predictions import open_writer
    from qualms.progress import Stages

    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_output(output, force=force)
    loaded = AtomisticModel.load(model, threads=threads)
    per_atom = loaded.fitted.per_atom
    _check_options(loaded, output, forces, stress, atoms, ignore_unknown)
    target, units = loaded.settings.target, loaded.settings.units
    counts = _Counts()
    with (
        open_writer(
            output,
            target,
            kind="atomic" if per_atom else "structure",
            ensemble=ensemble,
            force=force,
        ) as writer,
        Stages(terminal.progress()).stage("Structures") as advance,
    ):
        unknown = "ignore" if ignore_unknown else "error"
        for chunk in loaded.stream(iter_frames(structures), unknown_species=unknown):
            found = _predict(loaded, chunk, forces, stress, atoms, ensemble)
            extra: dict[str, list[Any]] = {FLAG: found.extrapolates.tolist()}
            if units:
                extra[f"{target}_units"] = [units] * len(chunk.frames)
            writer.write(
                chunk.frames,
                found.prediction,
                rows=chunk.centers if per_atom else None,
                extra=extra,
                arrays=found.arrays,
                tensors=found.tensors,
            )
            counts.n_structures += len(chunk.frames)
            counts.n_extrapolating += int(found.extrapolates.sum())
            counts.n_unknown_species += int(chunk.has_unknown.sum())
            counts.n_without_volume += found.n_without_volume
            advance(counts.n_structures)
        if stress and counts.n_without_volume == counts.n_structures:
            raise InputError("--stress", "no structure whose cell has a volume", "at least one")
    for warning in counts.warnings():
        terminal.warn(warning)
    terminal.result(
        f"{counted(counts.n_structures, 'structure')} → {output}",
        document={"output": str(output), "target": target, "units": units, **asdict(counts)},
    )


@dataclass
class _Counts:
    """Numbers of structures."""

    n_structures: int = 0
    n_extrapolating: int = 0
    n_unknown_species: int = 0
    n_without_volume: int = 0

    def warnings(self) -> Iterator[str]:
        total = f"of {self.n_structures} structures"
        if self.n_unknown_species:
            yield f"{self.n_unknown_species} {total} have elements that are ignored."
        if self.n_without_volume:
            yield f"{self.n_without_volume} {total} have no cell with a volume, and no stress."
        if self.n_extrapolating:
            yield (
                f"{self.n_extrapolating} {total} are out of distribution ({FLAG}): their "
                "uncertainties are less reliable."
            )


def _check_options(
    model: AtomisticModel, output: Path, forces: bool, stress: bool, atoms: bool, ignore: bool
) -> None:
    from qualms.atomistic.forces import check_model

    option = "--forces" if forces else "--stress" if stress else "--atoms" if atoms else None
    if forces or stress:
        check_model(model.fitted)
        if ignore:
            raise InputError(str(option), "with --ignore-unknown-species", "one of the two")
    if atoms and model.fitted.per_atom:
        raise InputError("--atoms", "for an atomic property", "a property of structures")
    if option and output.suffix == ".csv":
        raise InputError("--output", str(output), f"a file that ends in .xyz or .npz, for {option}")


@dataclass
class _Found:
    """Predictions of one chunk: arrays of atoms, and tensors of structures, by key."""

    prediction: Prediction
    extrapolates: BoolArray
    arrays: dict[str, Any]
    tensors: dict[str, Any]
    n_without_volume: int = 0


def _predict(
    model: AtomisticModel, chunk: Chunk, forces: bool, stress: bool, atoms: bool, ensemble: bool
) -> _Found:
    import numpy as np

    from qualms.atomistic.forces import has_forces

    novelty = np.empty((len(chunk.frames), 2))
    rows = chunk.rows(novelty)
    found = _Found(chunk.predict(rows), np.zeros(0, bool), {}, {})
    forces_std = None
    if forces or stress:
        force = _add_forces(found, model, chunk.frames, stress, ensemble)
        forces_std = force.std
        if forces:
            found.arrays |= _components("forces", force, ensemble)
    elif atoms and has_forces(model.fitted):
        forces_std = model.predict_forces(chunk.known).forces.std
    if atoms:
        found.arrays |= atom_arrays(chunk, forces_std, ensemble=ensemble)
    found.extrapolates = chunk.extrapolates(found.prediction, novelty)
    return found


def _add_forces(
    found: _Found, model: AtomisticModel, frames: Sequence[Any], stress: bool, ensemble: bool
) -> Prediction:
    """Predict energies, forces and, where a cell has a volume, stresses; return the forces."""
    import numpy as np

    from qualms.prediction import Prediction

    solid = np.array([stress and atoms.cell.rank == 3 for atoms in frames])
    groups = [chosen for chosen in (np.flatnonzero(solid), np.flatnonzero(~solid)) if chosen.size]
    parts = [
        model.predict_forces([frames[i] for i in chosen.tolist()], stress=bool(solid[chosen[0]]))
        for chosen in groups
    ]
    order = np.argsort(np.concatenate(groups))
    found.prediction = Prediction.concatenate([part.energy for part in parts])[order]
    if stress:
        found.n_without_volume = int(np.count_nonzero(~solid))
        widths = {"stress": 6, "stress_uncertainty": 6}
        if ensemble:
            widths["stress_ensemble"] = 6 * model.settings.n_members
        found.tensors = {key: np.full((len(frames), n), np.nan) for key, n in widths.items()}
        if parts[0].stress is not None:
            for key, values in _components("stress", parts[0].stress, ensemble).items():
                found.tensors[key][solid] = values
    by_structure = [one.forces for part in parts for one in part]
    return Prediction.concatenate([by_structure[i] for i in order])


def _components(name: str, prediction: Prediction, ensemble: bool) -> dict[str, Any]:
    """Return means and standard deviations (n, k), and members (n, N_R k) in member order."""
    arrays: dict[str, Any] = {name: prediction.mean, f"{name}_uncertainty": prediction.std}
    if ensemble:
        by_member = prediction.members.transpose(0, 2, 1)
        arrays[f"{name}_ensemble"] = by_member.reshape(len(by_member), -1)
    return arrays


def atom_arrays(chunk: Chunk, forces_std: Float64Array | None, *, ensemble: bool) -> dict[str, Any]:
    """Return contributions, novelty and uncertainties of atoms; NaN for unknown elements.

    `forces_std` (n, 3) are the standard deviations of the forces on atoms of known elements.
    """
    import numpy as np

    from qualms.atomistic.model import atom_contributions
    from qualms.atomistic.novelty import force_norm

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

    arrays = {
        name: of_all([part.mean for part in parts]),
        f"{name}_uncertainty": of_all([part.std for part in parts]),
        f"{name}_novelty": of_all(chunk.atom_novelty()),
    }
    if forces_std is not None:
        arrays[f"{name}_force_uncertainty"] = of_all([force_norm(forces_std)])
    if ensemble:
        arrays[f"{name}_ensemble"] = of_all([part.members for part in parts])
    return arrays
