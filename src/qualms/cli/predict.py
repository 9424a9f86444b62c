"""``qualms predict``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from qualms.cli._common import (
    Baseline,
    BaselineKey,
    Force,
    InUnits,
    Json,
    Model,
    Quiet,
    SkipFailed,
    Terminal,
    Threads,
    Weights,
    baseline_of,
)
from qualms.errors import InputError, counted

if TYPE_CHECKING:
    from qualms.arrays import BoolArray, Float64Array
    from qualms.atomistic.forces import ForcePrediction
    from qualms.atomistic.model import AtomisticModel, Chunk
    from qualms.prediction import Prediction

_WARNINGS = {
    "unknown_species": "have elements that are ignored.",
    "without_volume": "have no cell with a volume, and no stress.",
    "extrapolating": "are out of distribution (qualms_extrapolates): their uncertainties are less "
    "reliable.",
}


def predict(
    model: Model,
    structures: Annotated[
        Path, Argument(metavar="STRUCTURES", help="New structures: extended XYZ.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="File to write: .xyz, .csv or .npz.")],
    ensemble: Annotated[
        bool, Option("--ensemble", help="Write the predictions of all members, too.")
    ] = False,
    interval: Annotated[
        float | None,
        Option("--interval", help="Write conformal intervals of this coverage, such as 0.9."),
    ] = None,
    forces: Annotated[bool, Option("--forces", help="Predict forces, too; .xyz or .npz.")] = False,
    stress: Annotated[
        bool, Option("--stress", help="Predict stresses of periodic structures; .xyz or .npz.")
    ] = False,
    atoms: Annotated[
        bool,
        Option(
            "--atoms",
            help="Write the contribution, novelty and uncertainty of each atom; .xyz or .npz.",
        ),
    ] = False,
    in_units: InUnits = None,
    per: Annotated[
        str | None,
        Option(
            metavar="[atom|structure]",
            help="Energies per atom or per structure, the default; .csv or .npz.",
        ),
    ] = None,
    ignore_unknown: Annotated[
        bool,
        Option(
            "--ignore-unknown-species",
            help="Ignore atoms of elements that are not in the training set, and accept any "
            "composition.",
        ),
    ] = False,
    baseline: Baseline = None,
    baseline_key: BaselineKey = None,
    skip_failed: SkipFailed = False,
    weights: Weights = None,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict properties of new structures, with uncertainties."""
    import numpy as np

    from qualms.atomistic.forces import has_forces
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.structures import iter_frames
    from qualms.evaluation import energy_factor, per_atom_units
    from qualms.io.files import check_output
    from qualms.io.predictions import EXTRAPOLATES, open_writer
    from qualms.progress import Stages

    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_output(output, force=force)
    chosen = baseline_of(baseline, baseline_key)
    loaded = AtomisticModel.load(model, threads=threads, baseline=chosen, representation=weights)
    per_atom = loaded.fitted.per_atom
    _check_options(loaded, output, forces, stress, atoms, ignore_unknown)
    if interval is not None:
        _check_interval(loaded, interval)
    if (in_units or per) and output.suffix not in (".csv", ".npz"):
        # Programs that read structures assume eV.
        option = "--in" if in_units else "--per"
        raise InputError("--output", str(output), f"a file that ends in .csv or .npz, for {option}")
    if per not in (None, "structure") and (per != "atom" or loaded.settings.kind != "extensive"):
        raise InputError("--per", per, "atom or structure, for an extensive property")
    target, (factor, units) = loaded.settings.target, energy_factor(loaded.settings.units, in_units)
    units = per_atom_units(units) if per == "atom" else units
    kind: Literal["atomic", "structure"] = "atomic" if per_atom else "structure"
    n = dict.fromkeys(("structures", "extrapolating", "unknown_species", "without_volume"), 0)
    with (
        open_writer(
            output, target, kind=kind, ensemble=ensemble, interval=interval, force=force
        ) as writer,
        Stages(terminal.progress()).stage("Structures") as advance,
    ):
        unknown = "ignore" if ignore_unknown else "error"
        frames = iter_frames(structures)
        if skip_failed and loaded.reference is not None:
            frames = loaded.reference.computable(frames, forces=forces or stress, stress=stress)
        for chunk in loaded.stream(frames, unknown_species=unknown):
            novelty = np.empty((len(chunk.frames), 2))
            prediction = chunk.predict(chunk.rows(novelty))
            arrays: dict[str, Any] = {}
            tensors: dict[str, Any] = {}
            found = None
            if forces or stress or (atoms and has_forces(loaded.fitted)):
                solid = np.array([stress and one.cell.rank == 3 for one in chunk.known])
                found = loaded.predict_forces(chunk.known, stress=bool(solid.all()))
                if forces or stress:
                    prediction = found.energy
                if forces:
                    arrays |= _components("forces", found.forces, ensemble, interval)
                if stress:
                    stresses = found.stress
                    tensors = _stresses(loaded, chunk.frames, solid, stresses, ensemble, interval)
            if atoms:
                arrays |= _atom_arrays(chunk, found, ensemble)
            extrapolates = chunk.extrapolates(prediction, novelty)
            extra: dict[str, list[Any]] = {EXTRAPOLATES: extrapolates.tolist()}
            if in_units or per:
                sizes = [len(known) for known in chunk.known] if per == "atom" else 1.0
                prediction = prediction * (factor / np.asarray(sizes))
                arrays, tensors = (
                    {k: v if k.endswith("_novelty") else v * factor for k, v in part.items()}
                    for part in (arrays, tensors)
                )
            if units:
                extra[f"{target}_units"] = [units] * len(chunk.frames)
            rows = chunk.centers if per_atom else None
            writer.write(
                chunk.frames, prediction, rows=rows, extra=extra, arrays=arrays, tensors=tensors
            )
            n["structures"] += len(chunk.frames)
            n["extrapolating"] += int(extrapolates.sum())
            n["unknown_species"] += int(chunk.has_unknown.sum())
            n["without_volume"] += sum(stress and int(one.cell.rank) < 3 for one in chunk.frames)
            advance(n["structures"])
        if stress and n["without_volume"] == n["structures"]:
            raise InputError("--stress", "no structure whose cell has a volume", "at least one")
    for name, text in _WARNINGS.items():
        if n[name]:
            terminal.warn(f"{n[name]} of {n['structures']} structures {text}")
    if atoms and loaded.reference is not None:
        terminal.info(f"{target}_atoms are contributions to the difference from the baseline.")
    counts = {f"n_{name}": count for name, count in n.items()}
    terminal.result(
        f"{counted(n['structures'], 'structure')} → {output}",
        document={"output": str(output), "target": target, "units": units, **counts},
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


def _check_interval(model: AtomisticModel, level: float) -> None:
    conformal = model.fitted.conformal
    if "energy" not in conformal:
        raise InputError("--interval", level, "a model with out-of-bag errors")
    largest = min(float(one.probabilities[-1]) for one in conformal.values())
    if not 0 < level <= largest:
        raise InputError("--interval", level, f"between 0 and {largest:.4g}, by out-of-bag points")


def _stresses(
    model: AtomisticModel,
    frames: Sequence[Any],
    solid: BoolArray,
    stress: Prediction | None,
    ensemble: bool,
    interval: float | None,
) -> dict[str, Any]:
    """Return stresses of solids, NaN elsewhere; `stress` is known if all structures are solids."""
    import numpy as np

    n_members = model.fitted.n_members if ensemble else 0
    widths = {"stress": 6, "stress_uncertainty": 6, "stress_ensemble": 6 * n_members}
    if interval is not None and "stress" in model.fitted.conformal:
        widths |= {"stress_lower": 6, "stress_upper": 6}
    tensors = {key: np.full((len(frames), n), np.nan) for key, n in widths.items() if n}
    if stress is None and solid.any():
        some = [atoms for atoms, is_solid in zip(frames, solid, strict=True) if is_solid]
        stress = model.predict_forces(some, stress=True).stress
    if stress is not None:
        for key, values in _components("stress", stress, ensemble, interval).items():
            tensors[key][solid] = values
    return tensors


def _components(
    name: str, prediction: Prediction, ensemble: bool, interval: float | None
) -> dict[str, Any]:
    """Return means and standard deviations (n, k), and members (n, N_R k) in member order.

    And the limits (n, k) of conformal intervals of this level, if it is given and they are known.
    """
    arrays: dict[str, Any] = {name: prediction.mean, f"{name}_uncertainty": prediction.std}
    if interval is not None and prediction.conformal is not None:
        limits = prediction.interval(interval, "conformal")
        arrays |= dict(zip((f"{name}_lower", f"{name}_upper"), limits, strict=True))
    if ensemble:
        by_member = prediction.members.transpose(0, 2, 1)
        arrays[f"{name}_ensemble"] = by_member.reshape(len(by_member), -1)
    return arrays


def _atom_arrays(chunk: Chunk, found: ForcePrediction | None, ensemble: bool) -> dict[str, Any]:
    """Return contributions, novelty and uncertainties of atoms; NaN for unknown elements."""
    import numpy as np

    from qualms.atomistic.model import atom_contributions
    from qualms.atomistic.novelty import force_norm

    parts = atom_contributions(chunk)
    name = f"{chunk.fitted.settings.target}_atoms"
    known = np.concatenate(
        [np.isin(np.arange(len(f)), c) for f, c in zip(chunk.frames, chunk.centers, strict=True)]
    )

    def of_all(values: Sequence[Float64Array]) -> Float64Array:
        full = np.full((len(known), *values[0].shape[1:]), np.nan)
        full[known] = np.concatenate(values)
        return full

    arrays = {
        name: of_all([part.mean for part in parts]),
        f"{name}_uncertainty": of_all([part.std for part in parts]),
        f"{name}_novelty": of_all(chunk.atom_novelty()),
    }
    if found is not None:
        arrays[f"{name}_force_uncertainty"] = of_all([force_norm(found.forces.std)])
    if ensemble:
        arrays[f"{name}_ensemble"] = of_all([part.members for part in parts])
    return arrays
