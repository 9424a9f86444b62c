"""Uncertainties of any regressor: `ResamplingRegressor` beside MAPIE, crepes, uncertainty-toolbox.

Eight public tables that packages provide offline: patients (scikit-learn), activities of drug
candidates (RDKit) and six properties of QM9's molecules (qm9pack), with fingerprints, descriptors
or Coulomb matrices as features; four kinds of model. The defaults were chosen on the tables of
`CHOICE` alone. All methods get the same models and the same rows; those that need a calibration set
take a quarter of the rows for it.

Intervals are scored as the Gaussian of the same 68 % width, and at 95 % as they are. Run this file
alone, with a number of draws, for a table of these.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes
from sklearn.ensemble import BaggingRegressor, RandomForestRegressor
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from qualms import ResamplingRegressor, score

PACKAGES = ("mapie", "crepes", "uncertainty_toolbox", "lightgbm", "rdkit", "qm9pack")
N_TRAIN, N_TEST, N_MOLECULES, N_DRAWS = 500, 500, 2000, 5
N_MEMBERS = 16  # of every ensemble
LEVELS = (0.6827, 0.95)
EV = 27.211386245988  # one hartree
#: Tables on which the defaults were chosen; the others test them.
CHOICE = ("diabetes", "gap", "heat capacity", "extent")
#: Property of QM9, its factor, whether it is per atom, and the features, by table.
QM9 = {
    "gap": ("HOMO_LUMO_gap_au", EV, False, "fingerprint"),
    "heat capacity": ("Heatcapacity_Cv_cal_mol_K", 1.0, False, "descriptors"),
    "extent": ("R2_bohr2", 1.0, False, "coulomb"),
    "dipole": ("Dipole_debye", 1.0, False, "descriptors"),
    "polarisability": ("Polarizability_bohr3", 1.0, False, "coulomb"),
    "energy": ("InternalEnergy_0K_au", EV, True, "fingerprint"),
}
SPECIES = ("H", "C", "N", "O", "F")


class Intervals(NamedTuple):
    """Predictions (n,), and lower and upper limits (n, 2) of the intervals at `LEVELS`."""

    mean: Any
    lower: Any
    upper: Any


def models() -> dict[str, Any]:
    """Return the regressors by name."""
    from lightgbm import LGBMRegressor

    network = MLPRegressor(hidden_layer_sizes=(32,), solver="lbfgs", alpha=1.0, max_iter=60)
    return {
        "ridge": make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 4, 13))),
        "forest": RandomForestRegressor(25, max_features=1 / 3),
        "boosting": LGBMRegressor(n_jobs=1, verbose=-1),
        "network": TransformedTargetRegressor(
            make_pipeline(StandardScaler(), network), transformer=StandardScaler()
        ),
    }


def fingerprints(molecules: list[Any]) -> np.ndarray:
    """Return counts of circular fragments, hashed: (n, 128)."""
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=128)
    return np.array([generator.GetCountFingerprintAsNumPy(m) for m in molecules], dtype=float)


def descriptors(molecules: list[Any]) -> np.ndarray:
    """Return RDKit's molecular properties, such as counts of rings and logP: (n, 43)."""
    from rdkit.Chem import rdMolDescriptors

    properties = rdMolDescriptors.Properties()
    return np.array([list(properties.ComputeProperties(m)) for m in molecules])


def coulomb(frame: pd.DataFrame) -> np.ndarray:
    """Return the sorted eigenvalues of Coulomb matrices, and the numbers of atoms: (n, 34)."""
    numbers = dict(zip(SPECIES, (1, 6, 7, 8, 9), strict=True))
    rows = []
    for symbols, positions in zip(frame["Elements"], frame["XYZ_Ang"], strict=True):
        kinds = json.loads(symbols.replace("'", '"'))
        Z, R = np.array([numbers[s] for s in kinds]), np.array(json.loads(positions))
        distances = np.linalg.norm(R[:, None] - R, axis=-1) / 0.529177 + np.eye(len(Z))
        matrix = np.outer(Z, Z) / distances
        np.fill_diagonal(matrix, 0.5 * Z**2.4)
        eigenvalues = np.sort(np.linalg.eigvalsh(matrix))[::-1]
        padded = np.pad(eigenvalues, (0, 29 - len(Z)))
        rows.append([*padded, *(kinds.count(s) for s in SPECIES)])
    return np.array(rows)


def tables() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield name, features (n, d) and values (n,) of each table."""
    import rdkit
    from rdkit import Chem

    yield "diabetes", *load_diabetes(return_X_y=True)
    folder = Path(rdkit.__file__).parent / "Contrib/FreeWilson/data"
    smiles = pd.read_csv(folder / "CHEMBL2321810.smi", sep=" ", names=["SMILES", "Name"])
    activity = smiles.merge(pd.read_csv(folder / "CHEMBL2321810_act.csv"), on="Name")
    molecules = [Chem.MolFromSmiles(s) for s in activity["SMILES"]]
    yield "activity", fingerprints(molecules), activity["Act"].to_numpy()

    found = find_spec("qm9pack")
    assert found is not None
    assert found.origin is not None
    columns = ["SMILES", "N_atoms", "Elements", "XYZ_Ang", *(c for c, *_ in QM9.values())]
    parts = [
        pd.read_csv(path, usecols=columns)
        for path in sorted((Path(found.origin).parent / "data").glob("qm9_part*.csv"))
    ]
    frame = pd.concat(parts).sample(N_MOLECULES, random_state=0)
    molecules = [Chem.MolFromSmiles(s) for s in frame["SMILES"]]
    valid = np.array([m is not None for m in molecules])
    frame, molecules = frame[valid], [m for m in molecules if m is not None]
    features = {
        "fingerprint": fingerprints(molecules),
        "descriptors": descriptors(molecules),
        "coulomb": coulomb(frame),
    }
    composition = features["coulomb"][:, -len(SPECIES) :]
    for name, (column, unit, per_atom, kind) in QM9.items():
        y = unit * frame[column].to_numpy()
        if per_atom:  # relative to atoms in the mean molecule, by least squares
            y -= composition @ np.linalg.lstsq(composition, y, rcond=None)[0]
            y /= frame["N_atoms"].to_numpy()
        yield name, features[kind], y


# Methods: a model, training rows, test features and a seed in, predictions and intervals out.
def gaussian(mean: np.ndarray, std: np.ndarray) -> Intervals:
    """Return the intervals of Gaussians."""
    half = std[:, None] * np.array([1.0, 1.959964])
    return Intervals(mean, mean[:, None] - half, mean[:, None] + half)


def qualms(model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int) -> Intervals:
    """Return the intervals of the defaults."""
    fitted = ResamplingRegressor(model, random_state=seed).fit(X, y)
    return gaussian(*fitted.predict(X_test, return_std=True))


def qualms_conformal(
    model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int
) -> Intervals:
    """Return the conformal intervals of the defaults."""
    found = ResamplingRegressor(model, random_state=seed).fit(X, y).predict_ensemble(X_test)
    limits = [found.interval(level, "conformal") for level in LEVELS]
    lower, upper = np.moveaxis(np.array(limits), 0, -1)
    return Intervals(found.mean, lower, upper)


def qualms_halves(
    model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int
) -> Intervals:
    """Members of half of the rows, and a factor alone."""
    settings: dict[str, Any] = {"n_members": N_MEMBERS, "subsample": 0.5, "calibration": "student"}
    fitted = ResamplingRegressor(model, random_state=seed, **settings).fit(X, y)
    return gaussian(*fitted.predict(X_test, return_std=True))


def from_mapie(predicted: tuple[np.ndarray, np.ndarray]) -> Intervals:
    """Return the predictions and limits (n, 2, levels) of MAPIE."""
    mean, limits = predicted
    return Intervals(mean, limits[:, 0], limits[:, 1])


def mapie_split(
    model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int
) -> Intervals:
    """Split conformal prediction."""
    from mapie.regression import SplitConformalRegressor

    X_fit, X_cal, y_fit, y_cal = train_test_split(X, y, test_size=0.25, random_state=seed)
    fitted = SplitConformalRegressor(model, confidence_level=LEVELS, prefit=False)
    fitted.fit(X_fit, y_fit).conformalize(X_cal, y_cal)
    return from_mapie(fitted.predict_interval(X_test))


def mapie_cv(model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int) -> Intervals:
    """CV+, ten folds."""
    from mapie.regression import CrossConformalRegressor

    fitted = CrossConformalRegressor(model, confidence_level=LEVELS, cv=10, random_state=seed)
    return from_mapie(fitted.fit_conformalize(X, y).predict_interval(X_test))


def mapie_bootstrap(
    model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int
) -> Intervals:
    """Jackknife+ after bootstrap."""
    from mapie.regression import JackknifeAfterBootstrapRegressor

    fitted = JackknifeAfterBootstrapRegressor(
        model, confidence_level=LEVELS, resampling=N_MEMBERS, random_state=seed
    )
    return from_mapie(fitted.fit_conformalize(X, y).predict_interval(X_test))


def mapie_quantiles(
    model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int
) -> Intervals | None:
    """Conformalised quantile regression, of models that have quantiles."""
    from mapie.regression import ConformalizedQuantileRegressor

    if "objective" not in model.get_params():
        return None
    X_fit, X_cal, y_fit, y_cal = train_test_split(X, y, test_size=0.25, random_state=seed)
    quantile, found = clone(model).set_params(objective="quantile", alpha=0.5), []
    for level in LEVELS:
        fitted = ConformalizedQuantileRegressor(quantile, confidence_level=level)
        fitted.fit(X_fit, y_fit).conformalize(X_cal, y_cal)
        found.append(fitted.predict_interval(X_test))
    limits = np.concatenate([limits for _, limits in found], axis=2)
    return from_mapie((found[0][0], limits))


def crepes(model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int) -> Intervals:
    """Split conformal prediction with a difficulty from the nearest neighbours."""
    from crepes import WrapRegressor
    from crepes.extras import DifficultyEstimator

    X_fit, X_cal, y_fit, y_cal = train_test_split(X, y, test_size=0.25, random_state=seed)
    fitted = WrapRegressor(model)
    fitted.fit(X_fit, y_fit)
    difficulty = DifficultyEstimator()
    difficulty.fit(X=X_fit, y=y_fit, scaler=True)
    fitted.calibrate(X_cal, y_cal, de=difficulty)
    limits = np.stack([fitted.predict_int(X_test, confidence=p) for p in LEVELS], axis=2)
    return Intervals(np.asarray(fitted.predict(X_test)), limits[:, 0], limits[:, 1])


def toolbox(model: Any, X: np.ndarray, y: np.ndarray, X_test: np.ndarray, seed: int) -> Intervals:
    """Rescale the standard deviation over bootstrapped members with uncertainty-toolbox."""
    from uncertainty_toolbox.recalibration import get_std_recalibrator

    X_fit, X_cal, y_fit, y_cal = train_test_split(X, y, test_size=0.25, random_state=seed)
    fitted = BaggingRegressor(model, n_estimators=N_MEMBERS, random_state=seed).fit(X_fit, y_fit)

    def moments(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        members = np.stack([e.predict(X) for e in fitted.estimators_])
        return members.mean(axis=0), np.maximum(members.std(axis=0, ddof=1), 1e-9 * np.std(y))

    rescale = get_std_recalibrator(*moments(X_cal), y_cal)
    mean, std = moments(X_test)
    return gaussian(mean, rescale(std))


METHODS: dict[str, Callable[..., Intervals | None]] = {
    "**qualms**": qualms,
    "qualms, conformal": qualms_conformal,
    "qualms, halves, `student`": qualms_halves,
    "MAPIE split": mapie_split,
    "MAPIE CV+": mapie_cv,
    "MAPIE jackknife+ after bootstrap": mapie_bootstrap,
    "MAPIE quantile regression": mapie_quantiles,
    "crepes": crepes,
    "uncertainty-toolbox": toolbox,
}
#: Methods of the first draw alone: this one searches for its factor for 5 to 15 s.
ONCE = ("uncertainty-toolbox",)


def interval_score(y: np.ndarray, lower: np.ndarray, upper: np.ndarray, level: float) -> float:
    """Return the mean interval score of Gneiting and Raftery (2007)."""
    outside = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    return float(np.mean(upper - lower + 2 / (1 - level) * outside))


def evaluate(method: Callable[..., Intervals | None], *case: Any, y_test: np.ndarray) -> dict:
    """Return the scores of a method, empty if it does not apply; RMSE in units of y's std."""
    start = time.perf_counter()
    found = method(*case)
    if found is None:
        return {}
    mean, lower, upper = (np.asarray(values) for values in found)
    unit = float(np.std(y_test))
    std = np.maximum((upper[:, 0] - lower[:, 0]) / 2, 1e-3 * unit)  # of quantiles that cross
    scores = score(y_test / unit, mean=mean / unit, std=std / unit)
    inside = (y_test[:, None] >= lower) & (y_test[:, None] <= upper)
    return {
        "rmse": scores.rmse,
        "crps": scores.crps,
        "ll": scores.log_likelihood,
        "interval": interval_score(y_test, lower[:, 1], upper[:, 1], LEVELS[1]) / unit,
        "coverage_68": float(inside[:, 0].mean()),
        "coverage_95": float(inside[:, 1].mean()),
        "seconds": time.perf_counter() - start,
    }


def measure(n_draws: int) -> pd.DataFrame:
    """Return the scores of each table, model, draw and method."""
    rows = []
    for table, X, y in tables():
        n_train = min(N_TRAIN, 2 * len(y) // 3)
        for draw in range(n_draws):
            order = np.random.default_rng(draw).permutation(len(y))
            train, test = order[:n_train], order[n_train : n_train + N_TEST]
            for name, model in models().items():
                for label, method in METHODS.items():
                    if draw and label in ONCE:
                        continue
                    case = (clone(model), X[train], y[train], X[test], draw)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        scores = evaluate(method, *case, y_test=y[test])
                    if scores:
                        rows.append(
                            {"table": table, "model": name, "draw": draw, "method": label} | scores
                        )
        print(f"  {table}", flush=True)
    return pd.DataFrame(rows)


def summary(found: pd.DataFrame, title: str) -> dict:
    """Return the means over tables, models and draws, relative to the defaults of qualms."""
    keys = ["table", "model", "draw"]
    own = found[found["method"] == next(iter(METHODS))].set_index(keys)
    rows = []
    for label in METHODS:
        other = found[found["method"] == label].set_index(keys)
        if other.empty:
            continue
        mine = own.loc[other.index]
        ratios = [
            float(np.exp(np.log(other[name] / mine[name]).mean()))
            for name in ("rmse", "crps", "interval")
        ]
        wider = float((other["ll"] - mine["ll"]).mean())
        covered = [f"{other[name].mean():.1%}" for name in ("coverage_68", "coverage_95")]
        cells = [f"{ratios[0]:.3f}", f"{ratios[1]:.3f}", f"{wider:+.3f}", f"{ratios[2]:.3f}"]
        rows.append([label, *cells, *covered, f"{other['seconds'].mean():.1f}"])
    columns = ["", "RMSE", "CRPS", "log likelihood", "interval score", "68 %", "95 %", "s"]
    return {"title": title, "columns": columns, "rows": rows}


def run(n_draws: int = N_DRAWS) -> list[dict]:
    """Compare the defaults with other packages, on all tables."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(f"  skipped: {', '.join(missing)} not installed")
        return []
    for name in ("mapie.regression", "crepes.extras", "uncertainty_toolbox"):
        import_module(name)  # not within the time that is measured
    found = measure(n_draws)
    chosen = found["table"].isin(CHOICE)
    tested = summary(found[~chosen], "Tables that were not used for the choice of the defaults")
    tested["notes"] = [
        f"Means over tables ({', '.join(sorted(set(found.loc[~chosen, 'table'])))}), models (ridge "
        "regression, random forest, boosting, neural network) and "
        f"{n_draws} draws of {N_TRAIN} training and {N_TEST} test rows (diabetes: two "
        "thirds and one third of 442). RMSE, CRPS and interval score at 95 % are geometric means "
        "of ratios to those of qualms: above 1 is worse. "
        "Log likelihood is the difference from that of qualms: below 0 is worse. Quantile "
        "regression is for boosting alone, and predicts the median. Standard deviations are at "
        "least 0.1 % of that of the test values, because quantiles may cross. "
        "uncertainty-toolbox has the first draw alone, because of its time. "
        + ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        + "."
    ]
    tables = [tested, summary(found[chosen], "Tables that the defaults were chosen on")]
    own, peers = next(iter(METHODS)), [name for name in METHODS if "qualms" not in name]
    rows = []
    for (table, model), group in found.groupby(["table", "model"], sort=False):
        scores = group.groupby("method").mean(numeric_only=True)
        others = scores.loc[[p for p in peers if p in scores.index and p not in ONCE]]
        mine = scores.loc[own]
        rows.append(
            [
                table,
                model,
                *(f"{mine[name]:.3f}" for name in ("rmse", "crps", "ll", "interval")),
                f"{mine['rmse'] / others['rmse'].min():.3f}",
                f"{mine['ll'] - others['ll'].max():+.3f}",
                f"{mine['interval'] / others['interval'].min():.3f}",
            ]
        )
    columns = ["table", "model", "RMSE", "CRPS", "log likelihood", "interval score"]
    columns += ["RMSE / best", "log likelihood − best", "interval score / best"]
    note = (
        "In units of the standard deviation of the test values. The best is that of MAPIE and "
        "crepes, for each column of its own."
    )
    tables.append(
        {"title": "Each table and model", "columns": columns, "rows": rows, "notes": [note]}
    )
    return tables


if __name__ == "__main__":
    from benchmarks.__main__ import render

    start = time.perf_counter()
    result = run(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    print(render("tables", result, time.perf_counter() - start))
