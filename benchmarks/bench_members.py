"""Full model and 16 members against the full model alone, and against sixteen direct solves.

Every case runs in a process of its own, so that its peak memory is its own and both sides of a
ratio come from one process. Run this file alone for the tables on the terminal.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qualms.gp.ensemble import solve_members
from qualms.gp.noise import select_noise
from qualms.gp.sparse_gp import fit_projected_process, whiten

N_TRAIN, N_MEMBERS, N_FEATURES = 20_000, 16, 600
SIZES = (5_000, 2_000)
TARGETS = {0.05: 2.5, 0.25: 4.0, 0.5: 4.0, 0.75: 2.5, 0.9: 2.5}
HARDER = 100.0  # divides the leave-one-out noise variance in the hard case
SEED = 0
METHOD_COLUMNS = ("dual", "complement", "cg", "direct")


def soap_like(n_points: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return features like SOAP vectors and a smooth target.

    Thirty clusters of different widths in ten latent dimensions, mapped to non-negative normalised
    features of decaying weight.
    """
    n_clusters, n_latent = 30, 10
    centres = rng.standard_normal((n_clusters, n_latent))
    widths = rng.uniform(0.15, 0.6, n_clusters)
    label = rng.integers(n_clusters, size=n_points)
    within = rng.standard_normal((n_points, n_latent)) * (1 + np.arange(n_latent)) ** -0.5
    z = centres[label] + widths[label, None] * within
    phase = rng.standard_normal(N_FEATURES)
    X = 1 + np.tanh(0.6 * z @ rng.standard_normal((n_latent, N_FEATURES)) + phase)
    X *= (1 + np.arange(N_FEATURES)) ** -0.6
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = np.sin(z @ rng.standard_normal((n_latent, 6))).sum(axis=1)
    y += 0.2 * (z @ rng.standard_normal((n_latent, 3))).prod(axis=1)
    y = (y - y.mean()) / y.std()
    return X, y + 0.02 * rng.standard_normal(n_points)


def problem(n_train: int, n_representatives: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whitened features of the kernel (x·x′)², and targets of unit variance."""
    rng = np.random.default_rng(SEED)
    X, y = soap_like(n_train, rng)
    chosen = rng.choice(n_train, n_representatives, replace=False)
    whitening = whiten((X[chosen] @ X[chosen].T) ** 2)
    K_NM = (X @ X[chosen][whitening.pivots].T) ** 2
    Phi = whitening.features(K_NM, overwrite=True)
    return np.ascontiguousarray(Phi, dtype=np.float64), y - y.mean()


def leave_one_out_noise(n_representatives: int) -> float:
    """Noise variance that leave-one-out chooses for a problem of a fifth the size in N and M."""
    Phi, y = problem(N_TRAIN // 5, n_representatives // 5)
    return float(select_noise(Phi, y, np.geomspace(1e-7, 1.0, 15)).noise_variance)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time that a call takes, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def peak() -> float:
    """Peak resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def draw(n_train: int, fraction: float) -> np.ndarray:
    """Return the counts of 16 subsamples: (N, 16)."""
    rng = np.random.default_rng(SEED + 1)
    counts = np.zeros((n_train, N_MEMBERS), dtype=np.intp)
    for i in range(N_MEMBERS):
        counts[rng.permutation(n_train)[: round(fraction * n_train)], i] = 1
    return counts


def run_case(folder: str, fraction: float, noise: float, repeats: int) -> dict[str, Any]:
    """Time one case: the best of some turns of the full model and of its members."""
    Phi, y = np.load(Path(folder) / "Phi.npy"), np.load(Path(folder) / "y.npy")
    Y, counts = y[:, None], draw(len(y), fraction)
    Phi[:1000] @ Phi[:1000].T  # wakes the BLAS threads
    peaks = [peak()]
    full_seconds, member_seconds = [], []
    for _ in range(repeats):
        seconds, full = timed(lambda: fit_projected_process(Phi, Y, noise))
        full_seconds.append(seconds)
        peaks.append(peak())
        seconds, solved = timed(lambda full=full: solve_members(Phi, Y, counts, full))
        member_seconds.append(seconds)
        peaks.append(peak())
    # Two members of sixteen, because direct solves are slow; all cost the same.
    direct_seconds, direct = timed(
        lambda: solve_members(Phi, Y, counts[:, :2], full, method="direct")
    )
    F = Phi @ solved.weights[:, 0]
    error = Phi @ direct.weights[:, 0] - F[:, :2]
    return {
        "full": min(full_seconds),
        "members": min(member_seconds),
        "direct": direct_seconds * N_MEMBERS / 2,
        "method": solved.method,
        "iterations": solved.n_iterations,
        "error": float(np.sqrt(np.mean(error**2) / np.mean(F.var(axis=1, ddof=1)))),
        "memory": [m / (Phi.nbytes / 2**20) for m in peaks[:3]],
        "Phi": Phi.nbytes / 2**20,
        "rank": Phi.shape[1],
    }


def run_methods(n_train: int, rank: int, noise: float) -> list[list[Any]]:
    """Time every method at every fraction, to see what the cost model's choice is worth."""
    Phi, y = problem(n_train, rank)
    Y = y[:, None]
    full = fit_projected_process(Phi, Y, noise)
    warnings.simplefilter("ignore")  # of methods that fall back to another: they get no time
    rows = []
    for fraction in (0.05, 0.25, 0.5, 0.75, 0.9, 0.99):
        counts, seconds = draw(n_train, fraction), {}
        chosen = solve_members(Phi, Y, counts, full).method
        for method in METHOD_COLUMNS:
            solve = partial(solve_members, Phi, Y, counts, full, method=method)
            turns = [timed(solve) for _ in range(3)]
            if turns[0][1].method == method:
                seconds[method] = min(t for t, _ in turns)
        best = min(seconds, key=seconds.__getitem__)
        cells = [f"{seconds[m]:.3f}" if m in seconds else "–" for m in METHOD_COLUMNS]
        rows.append([rank, fraction, *cells, chosen, f"{seconds[chosen] / seconds[best]:.2f} ×"])
    return rows


def in_subprocess(function: str, *arguments: Any) -> Any:
    """Return the result of one function of this file, from a fresh process."""
    command = [sys.executable, __file__, function, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def save_problem(folder: str, n_train: int, n_representatives: int) -> None:
    """Write a problem to files, outside the processes whose memory is measured."""
    Phi, y = problem(n_train, n_representatives)
    np.save(Path(folder) / "Phi.npy", Phi)
    np.save(Path(folder) / "y.npy", y)


def row(case: dict[str, Any], fraction: float, target: float | None) -> list[Any]:
    """Return the cells of one case."""
    how = case["method"] + (f", {case['iterations']} iterations" if case["iterations"] else "")
    total = case["full"] + case["members"]
    before, full, members = case["memory"]
    return [
        fraction,
        how,
        f"{case['full']:.2f}",
        f"{case['members']:.2f}",
        f"{total / case['full']:.2f} ×",
        f"≤ {target} ×" if target else "–",
        f"{case['direct']:.0f}",
        f"{(case['full'] + case['direct']) / case['full']:.1f} ×",
        f"{case['error']:.0e}",
        f"{before:.2f} → {full:.2f} → {members:.2f}",
    ]


def run(repeats: int = 2) -> list[dict[str, Any]]:
    """Measure every case; one table for each size and noise, and one for the cost model."""
    tables = []
    for size in SIZES:
        loo = leave_one_out_noise(size)
        with tempfile.TemporaryDirectory() as folder:
            in_subprocess("save_problem", folder, N_TRAIN, size)
            for label, noise in (("leave-one-out", loo), ("a hundredth of it", loo / HARDER)):
                rows = []
                for fraction, target in TARGETS.items():
                    case = in_subprocess("run_case", folder, fraction, noise, repeats)
                    rows.append(row(case, fraction, target if size == 5_000 else None))
                tables.append(
                    {
                        "title": f"Members: N = {N_TRAIN}, M = {size} (rank {case['rank']}), "
                        f"{N_MEMBERS} members, σ² = {noise:.1e} Var[y] ({label})",
                        "columns": COLUMNS,
                        "rows": rows,
                        "notes": [f"Φ takes {case['Phi']:.0f} MiB.", *NOTES],
                    }
                )
    tables.append(
        {
            "title": f"Members: what the cost model chooses, N = {N_TRAIN // 4}, seconds",
            "columns": ["M", "n/N", *METHOD_COLUMNS, "chosen", "over fastest"],
            "rows": [
                cells
                for rank in (100, 400, 1250)
                for cells in in_subprocess("run_methods", N_TRAIN // 4, rank, 1e-4)
            ],
            "notes": [
                "–: members have too few rows for the method, which falls back to another. Dual is "
                "direct where there are more rows than features.",
            ],
        }
    )
    return tables


COLUMNS = [
    "n/N",
    "how",
    "full model, s",
    "16 members, s",
    "full + members",
    "target",
    "16 direct, s",
    "full + direct",
    "error",
    "peak memory / Φ",
]
NOTES = [
    "Full model: Gram matrix, Cholesky factor, weights. Ratios are to the full model alone.",
    "16 direct: eight times the time of two direct solves.",
    "Error: RMS difference to these two, over the RMS ensemble standard deviation (at most 1e-3).",
    "Peak memory of the process over the size of Φ: with Φ loaded, after the full model, after the "
    "members.",
]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
    else:
        for table in run():
            print("\n" + table["title"], table["columns"], *table["rows"], sep="\n")
