"""``qualms predict``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from qualms.cli.cluster import open_workers
from qualms.cli.options import (
    FORMATS,
    RUNNING,
    Force,
    InUnits,
    Json,
    Model,
    Per,
    Quiet,
    baseline_of,
    with_options,
)
from qualms.cli.terminal import Terminal, naming_files
from qualms.errors import InputError, counted, warn

if TYPE_CHECKING:
    from qualms.atomistic.bulk import Output
    from qualms.atomistic.model import AtomisticModel


@with_options(RUNNING)
def predict(
    model: Model,
    structures: Annotated[Path, Argument(metavar="STRUCTURES", help=f"New structures: {FORMATS}.")],
    output: Annotated[
        Path,
        Option(
            "--output",
            "-o",
            help="File to write: .xyz, .csv, .parquet or .npz.",
        ),
    ],
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
    per: Per = None,
    ignore_unknown: Annotated[
        bool,
        Option(
            "--ignore-unknown-species",
            help="Ignore atoms of elements that are not in the training set, and accept any "
            "composition.",
        ),
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **running: Any,
) -> None:
    """Run ``qualms predict``."""
    from qualms.atomistic import bulk
    from qualms.atomistic.quantities import TARGET
    from qualms.atomistic.structures import FrameFiles, Places, iter_frames
    from qualms.execution import as_workers
    from qualms.io.files import check_output
    from qualms.io.predictions import open_writer
    from qualms.progress import Stages

    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_output(output, force=force)
    contents = bulk.Output(
        *(ensemble, interval, forces, stress, atoms, in_units, per, ignore_unknown),
        running["skip_failed"],
    )
    baseline = baseline_of(running["confirm_baseline"], running["baseline_key"])
    threads, cluster = running["threads"], running["cluster"]
    file = bulk.ModelFile.of(model, threads=threads, baseline=baseline, weights=running["weights"])
    loaded = file.load()
    _check_options(loaded, output, contents)
    target, (_, units) = loaded.settings.target, contents.units(loaded)
    kind: Literal["atomic", "structure"] = "atomic" if loaded.fitted.per_atom else "structure"
    n: Counter[str] = Counter()
    # Before workers are started: there may be nothing to read.
    frames = None if cluster is None else FrameFiles.open([structures])
    with (
        open_workers(cluster, running["cluster_config"], terminal) as executor,
        Stages(terminal.progress()).stage("Structures") as advance,
        open_writer(
            output, target, kind=kind, ensemble=ensemble, interval=interval, force=force
        ) as writer,
        naming_files(Places.of(structures)),
    ):
        if frames is None:
            batches = bulk.predict_batches(loaded, enumerate(iter_frames(structures)), contents)
        else:
            workers = as_workers(executor, threads or 1)
            file = replace(file, threads=workers.threads)
            batches = bulk.predict_parts(frames, file, contents, workers)
        for batch in batches:
            writer.write(**batch.arguments)
            n.update(batch.counts)
            advance(n["structures"])
        if stress and n["without_volume"] == n["structures"]:
            raise InputError(
                f"No structure of {structures} has a cell with a volume, which --stress needs.",
                parameter="--stress",
            )
    for name, text in {
        "unknown_species": "have elements that are ignored.",
        "without_volume": "have no cell with a volume, and no stress.",
        "extrapolating": "are out of distribution (qualms_extrapolates, with the reason): their "
        "uncertainties are less reliable.",
    }.items():
        if n[name]:
            warn(f"{n[name]} of {n['structures']} structures {text}")
    for name, record in loaded.record.quantities.items():
        doubt = record.doubt(loaded.settings.keys[name])
        if doubt and (name == TARGET or getattr(contents, name)):
            warn(doubt)
    if atoms and loaded.baseline_potential is not None:
        terminal.info(f"{target}_atoms are contributions to the difference from the baseline.")
    counts = {f"n_{name}": count for name, count in n.items()}
    terminal.result(
        f"{counted(n['structures'], 'structure')} → {output}",
        document={"output": str(output), "target": target, "units": units, **counts},
    )


def _check_options(model: AtomisticModel, output: Path, contents: Output) -> None:
    """Reject options that the model or the format of the output cannot fulfil."""
    from qualms.atomistic.forces import check_model

    is_table = output.suffix in (".csv", ".parquet")
    option = next(
        (f"--{name}" for name in ("forces", "stress", "atoms") if getattr(contents, name)), None
    )
    if contents.forces or contents.stress:
        check_model(model.fitted)
        if contents.ignore_unknown:
            raise InputError(
                f"{option} and --ignore-unknown-species exclude each other: atoms that are ignored "
                "have no forces.",
                parameter=str(option),
            )
    if contents.atoms and model.fitted.per_atom:
        raise InputError(
            f"--atoms is for properties of structures, and {model.settings.target!r} is a property "
            "of atoms.",
            parameter="--atoms",
        )
    if option and is_table:
        raise InputError(
            f"{output} cannot hold the values of {option}: --output must end in .xyz or .npz.",
            parameter="--output",
        )
    if (contents.in_units or contents.per) and not (is_table or output.suffix == ".npz"):
        # Programs that read structures assume eV.
        option = "--in" if contents.in_units else "--per"
        raise InputError(
            f"{output} would be read in eV by other programs: with {option}, --output must end in "
            ".csv, .parquet or .npz.",
            parameter="--output",
        )
    extensive = model.settings.kind == "extensive"
    if contents.per not in (None, "structure") and (contents.per != "atom" or not extensive):
        raise InputError(
            f"--per {contents.per} cannot be used: it is atom or structure, and for extensive "
            f"properties only ({model.settings.target!r} is {model.settings.kind}).",
            parameter="--per",
        )
