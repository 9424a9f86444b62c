"""The atomistic model on the molecules that come with qualms.

What an uncertainty costs, what the engines cost and what is added to them, and what compression of
the features saves. With the environment variable QUALMS_CSD, an extended XYZ file of crystals, the
engines are compared on these too. Run this file alone, with a divisor of all sizes if it should be
quick, for the tables on the terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from ase import Atoms
from featomic import SphericalExpansion

from qualms import AtomisticModel
from qualms.atomistic.structures import read_frames
from qualms.data import qm9
from qualms.features.base import Problem
from qualms.features.densities import expansion_options
from qualms.features.soap import (
    Compression,
    DscribeEngine,
    FeatomicEngine,
    Soap,
    SoapRepresentation,
    _dscribe_soap,
    make_engine,
    make_soap,
)

N_TRAIN, N_TEST = 2_000, 1_000
TARGET = "atomization_energy"
PREDICTION_SIZES = (1_000, 5_000)
PREDICTION_TARGET = 1.03
COMPRESSIONS: dict[str, dict[str, Any] | str | None] = {
    "none": None,
    "auto": "auto",
    "PCA 1000": {"method": "pca", "n_features": 1000},
    "PCA 500": {"method": "pca", "n_features": 500},
}


def times(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """Return the times of each call; calls take turns, so that noise hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(timed(call)[0])
    return {name: np.array(seconds) for name, seconds in found.items()}


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median time of each call."""
    return {name: float(np.median(t)) for name, t in times(calls, repeats).items()}


def priced(
    mean: Callable[[], object], everything: Callable[[], object], repeats: int
) -> tuple[float, float, float]:
    """Return the median times of two calls, and the median of their ratios in turns.

    A machine that is slow for a while is slow for both calls of a turn.
    """
    calls = {"mean": mean, "all": everything}
    times(calls, 1)  # makes engines, and warms up
    found = times(calls, repeats)
    ratio = float(np.median(found["all"] / found["mean"]))
    return float(np.median(found["mean"])), float(np.median(found["all"])), ratio


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time that a call takes, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def train(molecules: Sequence[Atoms], n_representatives: int, **settings: Any) -> AtomisticModel:
    """Train a model of atomisation energies."""
    return AtomisticModel(TARGET, n_representatives=n_representatives, **settings).fit(molecules)


def mean_absolute_error(model: AtomisticModel, molecules: Sequence[Atoms]) -> float:
    """Return the error of energies in meV per atom."""
    sizes = np.array([len(atoms) for atoms in molecules])
    y = np.array([atoms.info[TARGET] for atoms in molecules])
    return 1e3 * float(np.mean(np.abs(model.predict(molecules).mean - y) / sizes))


# --- what an uncertainty costs ---


def prediction_row(
    known: Sequence[Atoms], new: Sequence[Atoms], n_representatives: int, repeats: int = 21
) -> list[Any]:
    """Time predictions with and without uncertainties, from structures."""
    model = train(known, n_representatives)
    fitted = model.fitted
    weights, baseline = fitted.weights.mean(axis=1), fitted.baseline.members.mean(axis=1)

    def mean_alone() -> list[object]:
        chunks = model.chunks(new)
        return [chunk.rows() @ weights + chunk.design @ baseline for chunk in chunks]

    mean, everything, ratio = priced(mean_alone, lambda: model.predict(new).std, repeats)
    return [
        n_representatives,
        f"{mean:.3f}",
        f"{everything:.3f}",
        f"{ratio:.3f} ×",
        f"≤ {PREDICTION_TARGET} ×",
    ]


def prediction_table(known: Sequence[Atoms], new: Sequence[Atoms], divisor: int) -> dict[str, Any]:
    """Compare predictions with and without uncertainties."""
    return {
        "title": f"Uncertainties of {len(new)} molecules, from structures, 16 members",
        "columns": ["M", "mean alone, s", "mean, σ and members, s", "ratio", "target"],
        "rows": [prediction_row(known, new, M // divisor) for M in PREDICTION_SIZES],
        "notes": [
            "Medians of 21 calls of each, in turns, and of the ratios in turns; models trained on "
            f"{len(known)} molecules."
        ],
    }


# --- what the engines cost ---


def raw_dscribe(engine: DscribeEngine, frames: Sequence[Atoms], *, own_species: bool) -> None:
    """Call dscribe and do nothing else; with the species of each molecule, or with all of them."""
    for atoms in frames:
        species = tuple(np.unique(atoms.numbers).tolist()) if own_species else engine.species
        soap = _dscribe_soap(engine.scale, species, bool(np.any(atoms.pbc)))
        soap.create(atoms, centers=list(range(len(atoms))))


def raw_featomic(engine: FeatomicEngine, frames: Sequence[Atoms]) -> None:
    """Call featomic and do nothing else."""
    expansion = SphericalExpansion(**expansion_options(engine.scale))
    expansion.compute(list(frames), use_native_system=True)


def engine_calls(soap: Soap, frames: Sequence[Atoms]) -> dict[str, Callable[[], object]]:
    """Return what to time for one engine: its bare calls, and features without and with PCA."""
    species = tuple(sorted({int(z) for atoms in frames for z in atoms.numbers}))
    centers = [np.arange(len(atoms)) for atoms in frames]
    engine = make_engine(soap.resolved_engine, soap.scales[0], species)
    calls: dict[str, Callable[[], object]] = {}
    if isinstance(engine, DscribeEngine):
        calls["all species"] = partial(raw_dscribe, engine, frames, own_species=False)
        calls["bare"] = partial(raw_dscribe, engine, frames, own_species=True)
    elif isinstance(engine, FeatomicEngine):
        calls["bare"] = partial(raw_featomic, engine, frames)
    plain = SoapRepresentation(soap, species)
    with_pca = soap.model_copy(update={"compression": Compression()})
    compressed = with_pca.fit(species, Problem(1, False), lambda: (frames, centers))
    calls["features"] = partial(plain.features, frames, centers)
    calls["features, PCA 1000"] = partial(compressed.features, frames, centers)
    return calls


ENGINE_LABELS = {
    "all species": "bare calls, all species",
    "bare": "bare calls",
    "features": "regrouped, normalised, float32",
    "features, PCA 1000": "the same and PCA 1000",
}


def engine_rows(
    name: str, preset: str, frames: Sequence[Atoms], repeats: int = 5
) -> list[list[Any]]:
    """Time one engine."""
    calls = engine_calls(make_soap(preset, engine=name), frames)
    medians(calls, 1)
    seconds = medians(calls, repeats)
    n = sum(map(len, frames))
    return [
        [
            name,
            ENGINE_LABELS[what],
            f"{n / t:.0f}",
            "–" if what in ("bare", "all species") else f"{1 - seconds['bare'] / t:.1%}",
        ]
        for what, t in seconds.items()
    ]


def engine_table(frames: Sequence[Atoms], preset: str, what: str) -> dict[str, Any]:
    """Compare the engines, and what is added to them."""
    return {
        "title": f"Engines: {sum(map(len, frames))} environments of {len(frames)} {what}, "
        f"preset {preset}, one process",
        "columns": ["engine", "what", "environments per second", "share added by qualms"],
        "rows": [
            row for name in ("dscribe", "featomic") for row in engine_rows(name, preset, frames)
        ],
        "notes": [
            "One process: dscribe then uses one core, featomic all. Training spreads environments "
            "over processes when there are many of them.",
            "Bare calls: the library alone, structure by structure (dscribe, with the species that "
            "the structure has, as qualms calls it, or with all) or in one call (featomic).",
        ],
    }


# --- what compression saves ---


def compression_row(
    name: str, known: Sequence[Atoms], new: Sequence[Atoms], n_representatives: int
) -> list[Any]:
    """Train and predict with one compression."""
    representation = make_soap("organic", compression=COMPRESSIONS[name])
    seconds, model = timed(partial(train, known, n_representatives, representation=representation))
    predicting, error = timed(partial(mean_absolute_error, model, new))
    stages = model.record.seconds
    projections = model.fitted.representation.projections
    return [
        name,
        model.fitted.representation.n_features,
        f"{error:.3f}",
        f"{projections[0].kernel_error:.0e}" if projections else "–",
        f"{seconds:.1f}",
        *(f"{stages.get(s, 0.0):.1f}" for s in COMPRESSION_STAGES),
        f"{predicting:.2f}",
    ]


COMPRESSION_STAGES = ("Compression", "Features", "Representatives", "Kernel rows")


def compression_table(known: Sequence[Atoms], new: Sequence[Atoms], divisor: int) -> dict[str, Any]:
    """Compare compressions."""
    n_representatives = 1_000 // divisor
    train(known[:200], min(n_representatives, 200))  # makes the engines
    return {
        "title": f"Compression: {len(known)} molecules, M = {n_representatives}, 16 members, "
        f"tested on {len(new)} others",
        "columns": [
            "compression",
            "features",
            "MAE, meV/atom",
            "kernel error",
            "training, s",
            *(f"{stage.lower()}, s" for stage in COMPRESSION_STAGES),
            "predicting, s",
        ],
        "rows": [compression_row(name, known, new, n_representatives) for name in COMPRESSIONS],
        "notes": [
            "auto: the default of qualms. Kernel error: root mean squared change of "
            "x·x′ between environments that the compression was not made from.",
        ],
    }


def tables(divisor: int = 1) -> Iterator[dict[str, Any]]:
    """Measure one thing after the other; `divisor` makes them small."""
    molecules = qm9()
    known, new = molecules[: N_TRAIN // divisor], molecules[N_TRAIN:][: N_TEST // divisor]
    yield prediction_table(known, new, divisor)
    yield engine_table(new, "organic", "molecules")
    if "QUALMS_CSD" in os.environ:
        crystals = read_frames(os.environ["QUALMS_CSD"])[: 40 // divisor]
        yield engine_table(crystals, "nmr", "molecular crystals")
    yield compression_table(known, new, divisor)


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return list(tables())


if __name__ == "__main__":
    for table in tables(*map(int, sys.argv[1:])):
        print("\n" + table["title"], table["columns"], *table["rows"], sep="\n", flush=True)
