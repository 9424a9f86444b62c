"""What an uncertainty costs: mean alone, mean with uncertainty and members, and the PP variance."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qualms import ProjectedProcessRegressor

N_TRAIN, N_NEW, N_FEATURES, N_REPRESENTATIVES, N_MEMBERS = 5_000, 10_000, 3_000, 2_000, 16


def soap_like(n: int, rng: np.random.Generator) -> np.ndarray:
    """Non-negative features with a decaying spectrum, float32."""
    latent = rng.gamma(0.5, size=(n, 40)) @ rng.gamma(0.5, size=(40, N_FEATURES))
    return (latent * np.arange(1, N_FEATURES + 1) ** -0.3).astype(np.float32)


def fitted_model(rng: np.random.Generator) -> ProjectedProcessRegressor:
    """Train a model of the stated size; the noise is given, because only predictions are timed."""
    X = soap_like(N_TRAIN, rng)
    y = np.log(X[:, :50].sum(axis=1)) + 0.01 * rng.normal(size=N_TRAIN)
    model = ProjectedProcessRegressor(
        n_representatives=N_REPRESENTATIVES, n_members=N_MEMBERS, noise=1e-4, random_state=0
    ).fit(X, y)
    # All sources of variance are in use, whichever these data would need.
    model.calibration_ = replace(model.calibration_, alpha=1.0, posterior=1.0, novelty=1.0)
    return model


def median_times(calls: dict[str, Callable[[], object]], n_repeats: int = 7) -> dict[str, float]:
    """Return the median time of each call; calls take turns, so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n_repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(t)) for name, t in times.items()}


def main() -> None:
    """Time the calls; print one line each: name, seconds, ratio to the mean alone."""
    rng = np.random.default_rng(0)
    model = fitted_model(rng)
    X = soap_like(N_NEW, rng)
    calls = {
        "mean alone": lambda: model.predict(X),
        "mean, σ and 16 members": lambda: model.predict_ensemble(X).std,
        "PP mean and PP variance": lambda: (model.pp_mean(X), model.pp_std(X)),
    }
    for call in calls.values():
        call()
    times = median_times(calls)
    for name, seconds in times.items():
        print(f"{name}\t{seconds}\t{seconds / times['mean alone']}")
    print(f"peak\t{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}\t{X.nbytes / 2**20}")


def run() -> list[dict[str, object]]:
    """Run in a process of its own, so that peak memory is its own too."""
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_prediction"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line.split("\t") for line in output.strip().splitlines()]
    target = {"mean, σ and 16 members": "≤ 1.05"}
    rows = [[n, f"{float(t):.3f}", f"{float(r):.3f}", target.get(n, "")] for n, t, r in lines[:-1]]
    _, peak, inputs = lines[-1]
    return [
        {
            "title": f"Prediction: {N_NEW} × {N_FEATURES} float32 inputs, M = {N_REPRESENTATIVES}, "
            f"{N_MEMBERS} members, kernel included",
            "columns": ["what", "seconds (median)", "× mean alone", "target"],
            "rows": rows,
            "notes": [
                f"Peak memory {float(peak):.0f} MiB, training of the model included; "
                f"the inputs take {float(inputs):.0f} MiB."
            ],
        }
    ]


if __name__ == "__main__":
    main()
