"""Farthest point sampling against scikit-matter and against the bare matrix products.

Every case runs in a process of its own, so that its peak memory is its own. Ratios compare times
from one process, taken in turns, with the same number of BLAS threads.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from qualms.gp.representatives import farthest_points

N_FEATURES = 3000
SIZES = {"full": ((20_000, 500), (100_000, 2_000)), "quick": ((4_000, 100), (8_000, 200))}
DATA = {
    "soap-like": "non-negative normalised rows in 60 clusters, 16 latent dimensions",
    "Gaussian": "independent Gaussian features: all distances nearly equal, the worst case",
}
ROWS = 4096


def soap_like(n_points: int, seed: int = 0) -> np.ndarray:
    """Rows like SOAP vectors: squares of linear maps of a clustered latent space, normalised."""
    rng = np.random.default_rng(seed)
    n_clusters, n_latent = 60, 16
    decay = np.arange(1, n_latent + 1) ** -0.7
    centres = rng.normal(size=(n_clusters, n_latent)) * decay
    widths = np.exp(rng.normal(-1.2, 0.5, size=n_clusters))
    labels = rng.choice(n_clusters, size=n_points, p=rng.dirichlet(np.full(n_clusters, 0.5)))
    directions = rng.normal(size=(n_latent, N_FEATURES))
    X = np.empty((n_points, N_FEATURES), dtype=np.float32)
    for begin in range(0, n_points, 256):
        chosen = labels[begin : begin + 256]
        noise = rng.normal(size=(len(chosen), n_latent)) * decay * widths[chosen, None]
        block = ((centres[chosen] + noise) @ directions) ** 2
        X[begin : begin + 256] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return X


def gaussian(n_points: int, seed: int = 0) -> np.ndarray:
    """Independent Gaussian features."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n_points, N_FEATURES), dtype=np.float32)


def make(kind: str, n_points: int) -> np.ndarray:
    """Make the features of a case."""
    return soap_like(n_points) if kind == "soap-like" else gaussian(n_points)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock seconds, and the result."""
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def bare_products(X: np.ndarray, picks: np.ndarray) -> None:
    """Multiply all points with all picks and throw the result away."""
    P = X[picks]
    for begin in range(0, len(X), ROWS):
        X[begin : begin + ROWS] @ P.T


def scikit_matter(X: np.ndarray, n: int) -> np.ndarray:
    """Pick with the peer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skmatter.sample_selection import FPS
    return np.asarray(FPS(n_to_select=n, initialize=0).fit(X).selected_idx_)


def largest_distances(X: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the largest squared distance of any point to the first picks, after each pick."""
    P, largest = X[indices], np.zeros(len(indices))
    pick_norms = np.einsum("ij,ij->i", P, P, dtype=np.float64)
    for begin in range(0, len(X), 1024):
        block = X[begin : begin + 1024]
        norms = np.einsum("ij,ij->i", block, block, dtype=np.float64)
        d2 = norms[:, None] + pick_norms - 2.0 * (block @ P.T)
        nearest = np.minimum.accumulate(d2, axis=1)
        largest = np.maximum(largest, nearest.max(axis=0))
    return largest


def run_speed(kind: str, n_points: int, n: int, peer: bool, repeats: int = 3) -> dict[str, Any]:
    """Time one case, the best of some turns, and check its picks."""
    X = make(kind, n_points)
    farthest_points(X[:500], 20)  # wakes the BLAS threads for everybody
    ours, bare, theirs = [], [], []
    for turn in range(repeats):
        seconds, picks = timed(partial(farthest_points, X, n))
        ours.append(seconds)
        bare.append(timed(partial(bare_products, X, picks.indices))[0])
        if peer and turn < 2:
            seconds, expected = timed(partial(scikit_matter, X, n))
            theirs.append(seconds)
    # The certificate of a greedy selection: no point is farther from the picks before than a pick.
    largest = largest_distances(X, picks.indices)
    excess = float((largest[:-1] / picks.distances[1:] ** 2).max()) - 1.0
    assert excess < 1e-3, f"{kind}: a point was farther than a pick by {excess:.1e} of d²"
    result = {"ours": min(ours), "bare": min(bare), "excess": excess}
    if peer:
        radius = float(np.sqrt(largest[-1] / largest_distances(X, expected)[-1]))
        result |= {"peer": min(theirs), "radius": radius}
    return result


def run_memory(kind: str, n_points: int, n: int) -> dict[str, Any]:
    """Peak memory before and after the call, in MB."""
    X = make(kind, n_points)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    farthest_points(X, n)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"before": before, "after": after, "X": X.nbytes / 2**20}


def in_subprocess(function: str, *arguments: Any) -> dict[str, Any]:
    """Call one function of this file in a fresh process."""
    command = [sys.executable, __file__, function, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(scale: str = "full") -> list[dict[str, Any]]:
    """Measure every case; one table for each of the two targets, and one for memory."""
    (small, small_n), (large, large_n) = SIZES[scale]
    against_peer, against_products, memory = [], [], []
    for kind in DATA:
        case = in_subprocess("run_speed", kind, small, small_n, True)
        against_peer.append(
            [
                kind,
                f"{case['ours']:.2f} s",
                f"{case['peer']:.2f} s",
                f"{case['peer'] / case['ours']:.1f} × (target ≥ 10 ×)",
                f"{case['radius']:.3f} ×",
                f"{case['ours'] / case['bare']:.2f} ×",
            ]
        )
        case = in_subprocess("run_speed", kind, large, large_n, False)
        against_products.append(
            [
                kind,
                f"{case['ours']:.2f} s",
                f"{case['bare']:.2f} s",
                f"{case['ours'] / case['bare']:.2f} × (target ≤ 2 ×)",
                f"{case['excess']:.0e}",
            ]
        )
        for n_points, n in SIZES[scale]:
            case = in_subprocess("run_memory", kind, n_points, n)
            sizes = [f"{case[name]:.0f} MB" for name in ("X", "before", "after")]
            memory.append([kind, f"{n_points} × {N_FEATURES}, {n} picks", *sizes])
    return [
        {
            "title": f"Farthest points, {small} × {N_FEATURES} float32, {small_n} picks",
            "columns": [
                "data",
                "qualms",
                "scikit-matter",
                "faster by",
                "largest distance",
                "of products",
            ],
            "rows": against_peer,
            "notes": [
                *(f"{name}: {description}." for name, description in DATA.items()),
                "Largest distance: of any point to its nearest pick, over that of scikit-matter.",
            ],
        },
        {
            "title": f"Farthest points, {large} × {N_FEATURES} float32, {large_n} picks",
            "columns": ["data", "qualms", "matrix products", "ratio", "excess"],
            "rows": against_products,
            "notes": [
                "Matrix products: all points with all picks, float32, in blocks of 4096 rows. The "
                "search needs fewer, because it updates a distance only when it may matter.",
                "Excess: the most by which any point was farther than the pick at any step, in d² "
                "relative to the pick (d² is compared to 14 bits, 1e-4).",
            ],
        },
        {
            "title": "Farthest points, peak memory of the process",
            "columns": ["data", "case", "X", "before the call", "after the call"],
            "rows": memory,
            "notes": ["Before the call: X, the interpreter and what it took to make X."],
        },
    ]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
    else:
        for table in run(*sys.argv[1:]):
            print("\n" + table["title"], table["columns"], *table["rows"], sep="\n")
