"""Record numbers that a restructuring must not change, and compare them.

    python scripts/golden.py record golden.npz             # with the code before
    python scripts/golden.py compare golden.npz            # with the code after
    python scripts/golden.py compare golden.npz atomic cli # some sections only

Only public interfaces are used. Differences are relative to the largest absolute value of an array;
those of means and members are relative to the median standard deviation of the same prediction,
which is stricter where a target has a large offset.
"""

import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from fnmatch import fnmatch
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from sklearn.datasets import make_friedman1
from sklearn.linear_model import Ridge
from sklearn.tree import DecisionTreeRegressor

from qualms import (
    AtomisticModel,
    Prediction,
    ProjectedProcessRegressor,
    ResamplingRegressor,
    calibrate,
    score,
)
from qualms.ase import Calculator
from qualms.calibration.methods import METHODS
from qualms.data import qm9
from qualms.thermo import reweight

SCORES = [
    "rmse",
    "mae",
    "log_likelihood",
    "crps",
    "crps_ensemble",
    "miscalibration_area",
    "ence",
    "sharpness",
    "coverage_68",
    "coverage_95",
    "spearman",
    "interval_score_95",
]
DEFAULT_TOLERANCE = 1e-6
#: Larger tolerances by pattern of names, the first that matches, and why.
FLOAT32 = "float32 kernel products in training; the noise is large enough not to amplify rounding"
AMPLIFIED = "float32 rounding, amplified by the small noise that leave-one-out errors choose"
TOLERANCES = {
    "*.extrapolates": (0.0, "flags"),
    "energy.loo.*": (5e-2, AMPLIFIED),
    "atomic.loo.*": (5e-2, AMPLIFIED),
    "demo.*": (2e-2, AMPLIFIED),
    "energy.*": (1e-4, FLOAT32),
    "atomic.*": (3e-4, FLOAT32),
    "forces.*": (1e-5, "float32 features in training; predictions are float64"),
}


def predicted(name, prediction):
    """Return mean, standard deviation and members, calibrated or not."""
    return {
        f"{name}.mean": prediction.mean,
        f"{name}.std": prediction.std,
        f"{name}.members": prediction.members,
        f"{name}.raw.std": prediction.uncalibrated.std,
        f"{name}.raw.members": prediction.uncalibrated.members,
    }


def scored(name, y, prediction):
    found = score(y, prediction)
    return {f"{name}.score.{key}": getattr(found, key) for key in SCORES}


def parameters(name, calibration):
    return {f"{name}.parameters": [calibration.alpha, calibration.gamma, calibration.n_points]}


def qualms(*arguments):
    """Run a command and return the JSON document that it prints."""
    command = [sys.executable, "-m", "qualms", *map(str, arguments), "--json", "--quiet"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout)


def score_rows(name, rows):
    """Return each score as an array over the rows of a table."""
    missing = float("nan")
    return {
        f"{name}.{key}": [missing if row[key] is None else row[key] for row in rows]
        for key in SCORES
    }


def energy(directory):
    """An extensive energy of molecules, in Python and by `qualms evaluate`."""
    frames = qm9(n=350)
    train, test = frames[:300], frames[300:]
    y = [atoms.info["atomization_energy"] for atoms in test]
    settings = {"n_representatives": 200, "units": "eV"}
    found = AtomisticModel("atomization_energy", **settings).fit(train).predict(test)
    result = predicted("energy.loo", found) | scored("energy.loo", y, found)
    # A small noise amplifies float32 rounding; with this one, numbers are sharp.
    model = AtomisticModel("atomization_energy", noise=1e-3, **settings).fit(train)
    found = model.predict(test)
    result |= predicted("energy", found) | scored("energy", y, found)
    result |= scored("energy.raw", y, found.uncalibrated)
    result["energy.pp.mean"], result["energy.pp.std"] = model.predict_pp(test)
    result["energy.extrapolates"] = model.predict(test).extrapolates
    result |= predicted(
        "energy.atoms", Prediction.concatenate(model.predict(test[:5], atoms=True).atoms)
    )
    model.save(directory / "model.safetensors")
    ase.io.write(directory / "test.xyz", test)
    document = qualms("evaluate", directory / "model.safetensors", directory / "test.xyz")
    return result | score_rows("energy.evaluate", document["scores"])


def crystals(n=36, seed=0):
    """Return small cells of Cu and Al with energies, forces and stresses by EMT."""
    rng = np.random.default_rng(seed)
    frames = []
    for i in range(n):
        atoms = bulk("Cu", cubic=True)
        atoms.symbols[: 1 + i % 2] = "Al"
        atoms.set_cell(atoms.cell.array * (1 + 0.02 * rng.normal()), scale_atoms=True)
        atoms.positions += rng.normal(scale=0.08, size=(4, 3))
        atoms.calc = EMT()
        atoms.info["dft_energy"] = atoms.get_potential_energy()
        atoms.info["dft_stress"] = atoms.get_stress()
        atoms.arrays["dft_forces"] = atoms.get_forces()
        atoms.calc = None
        frames.append(atoms)
    return frames


def forces(directory):
    """Energies, forces and stresses of crystals; features by featomic."""
    frames = crystals()
    model = AtomisticModel(
        "dft_energy",
        representation={"cutoff": 3.8, "n_radial": 3, "l_max": 2, "smoothing": 0.8},
        n_representatives=60,
        forces="dft_forces",
        stress="dft_stress",
        units="eV",
    ).fit(frames[:28])
    found = model.predict(frames[28:], stress=True, forces=True)
    result = predicted("forces.predict", model.predict(frames[28:]))
    for quantity in ("energy", "forces", "stress"):
        result |= predicted(f"forces.{quantity}", getattr(found, quantity))
    model.save(directory / "forces.safetensors")
    atoms = frames[30].copy()
    atoms.calc = Calculator(directory / "forces.safetensors")
    for name in Calculator.implemented_properties:
        result[f"forces.calculator.{name}"] = atoms.calc.get_property(name, atoms)
    return result


def atomic(directory):
    """A property of atoms that depends on their neighbours."""
    frames = qm9(n=100)
    for atoms in frames:
        near = np.exp(-atoms.get_all_distances())
        atoms.arrays["shift"] = near @ atoms.numbers - near.sum(axis=1) * atoms.numbers
    small = {"cutoff": 4.0, "n_radial": 3, "l_max": 3}
    cases = {"loo": {}, "all": {"noise": 10.0}, "H": {"noise": 10.0, "species": ["H"]}}
    result = {}
    for name, settings in cases.items():
        model = AtomisticModel(
            "shift", "atomic", representation=small, n_representatives=150, **settings
        ).fit(frames[:80])
        result |= predicted(f"atomic.{name}", model.predict(frames[80:]))
        result[f"atomic.{name}.extrapolates"] = model.predict(frames[80:]).extrapolates
    return result


def estimators(directory):
    """Both estimators for tables, with every calibration, and two outputs."""
    X, y = make_friedman1(400, n_features=6, noise=0.5, random_state=0)
    two = np.stack([y, X[:, 0] * X[:, 1]], axis=1)
    new, result = X[300:], {}
    tree = DecisionTreeRegressor(min_samples_leaf=5, random_state=0)
    for method in METHODS:
        common = {"calibration": method, "random_state": 0}
        pp = ProjectedProcessRegressor("rbf", n_representatives=100, **common).fit(X[:300], y[:300])
        rs = ResamplingRegressor(tree, **common).fit(X[:300], y[:300])
        for name, model in {"pp": pp, "resampling": rs}.items():
            found = model.predict_ensemble(new)
            result |= predicted(f"estimators.{name}.{method}", found)
            result |= scored(f"estimators.{name}.{method}", y[300:], found)
            result |= parameters(f"estimators.{name}.{method}", model.calibration_)
    result["estimators.pp.full.mean"], result["estimators.pp.full.std"] = (
        pp.pp_mean(new),
        pp.pp_std(new),
    )
    several = {
        "power": ProjectedProcessRegressor(random_state=1, selection="cur"),
        "bootstrap": ProjectedProcessRegressor("rbf", random_state=1, replace=True),
        "ridge": ResamplingRegressor(Ridge(), calibration="shrinkage", random_state=1),
    }
    for name, model in several.items():
        model.fit(X[:300], two[:300], groups=np.arange(300) // 2)
        result |= predicted(f"estimators.two.{name}", model.predict_ensemble(new))
    return result


def ensemble(rng, shape, n_members=8):
    """Return reference values and members whose errors have various sizes."""
    ensemble_std = np.exp(0.5 * rng.normal(size=shape))
    y = rng.normal(size=shape)
    members = y[..., None] + ensemble_std[..., None] * (
        rng.normal(size=(*shape, 1)) + 0.6 * rng.normal(size=(*shape, n_members))
    )
    return y, members


def calibrations(directory):
    """`qualms.calibrate` with members that did, or did not, see points."""
    rng, result = np.random.default_rng(3), {}
    y, members = ensemble(rng, (200,))
    _, new = ensemble(rng, (20,))
    cases = {"new": None, "absent": rng.random(members.shape) < 0.6}
    for name, absent in cases.items():
        for method in METHODS:
            found = calibrate(y, members, absent=absent, method=method)
            result |= parameters(f"calibrations.{name}.{method}", found)
            result |= predicted(f"calibrations.{name}.{method}", found.apply(Prediction(new)))
    several = calibrate(*ensemble(rng, (200, 2)), method="shrinkage")
    return result | predicted(
        "calibrations.two", several.apply(Prediction(ensemble(rng, (20, 2))[1]))
    )


def cli(directory):
    """`qualms calibrate` and `qualms apply` for an ensemble in extended XYZ."""
    rng, frames, result = np.random.default_rng(4), [], {}
    for i in range(200):
        n = 2 + i % 3
        atoms = Atoms("CuAlCuAl"[: 2 * n], positions=rng.normal(scale=3.0, size=(n, 3)))
        atoms.info["REF_energy"], atoms.info["energy_ensemble"] = ensemble(rng, ())
        atoms.info["energy_absent"] = (rng.random(8) < 0.7).astype(int)
        atoms.info["REF_gap"], gaps = ensemble(rng, ())
        atoms.info["gap"], atoms.info["gap_uncertainty"] = gaps.mean(), gaps.std(ddof=1)
        atoms.arrays["REF_forces"], members = ensemble(rng, (n, 3))
        atoms.arrays["forces_ensemble"] = members.swapaxes(1, 2).reshape(n, -1)
        frames.append(atoms)
    given = directory / "ensemble.xyz"
    ase.io.write(given, frames)
    cases = {
        "energy": ["--target", "energy", "--method", "student"],
        "forces": ["--target", "forces", "--method", "shrinkage", "--order", "member"],
        "elements": ["--target", "forces", "--by", "element", "--order", "member"],
        "std_only": ["--target", "gap"],
    }
    for name, options in cases.items():
        file, output = directory / f"{name}.json", directory / f"{name}.xyz"
        document = qualms("calibrate", given, *options, "--output", file)
        qualms("apply", file, given, "--output", output)
        written = json.loads(file.read_text())
        fitted = [written["parameters"], *written["groups"].values()]
        result[f"cli.{name}.parameters"] = [p[key] for p in fitted for key in sorted(p)]
        result[f"cli.{name}.intervals"] = [*written["intervals"].values()]
        result |= score_rows(f"cli.{name}.score", document["scores"].values())
        target, frames = options[1], ase.io.read(output, ":")
        for key in (target, f"{target}_uncertainty", f"{target}_ensemble"):
            values = [atoms.arrays.get(key, atoms.info.get(key)) for atoms in frames]
            if values[0] is not None:
                result[f"cli.{name}.{key}"] = np.concatenate([np.ravel(v) for v in values])
    return result


def demo(directory):
    """The tables of `qualms demo`."""
    document = qualms("demo", "--output", directory / "demo")
    table = [list(row.values()) for row in document["log_likelihood"].values()]
    return score_rows("demo.score", document["scores"]) | {"demo.log_likelihood": table}


def thermo(directory):
    """Averages over a trajectory, re-weighted."""
    x, result = np.random.default_rng(0).normal(size=400), {}
    energies = 0.5 * np.linspace(0.9, 1.1, 8) * x[:, None] ** 2
    for estimator in ("cea", "direct"):
        found = reweight(energies, x**2, kT=1.0, estimator=estimator)
        result[f"thermo.{estimator}.members"] = found.prediction.members
        result[f"thermo.{estimator}.errors"] = [found.std_model, found.std_sampling]
    return result


SECTIONS = [energy, forces, atomic, estimators, calibrations, cli, demo, thermo]


def compute(names):
    """Return all arrays, and the sections that failed."""
    result, failed = {}, []
    for section in SECTIONS:
        if names and section.__name__ not in names:
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            try:
                found = section(Path(directory))
                result |= {k: np.asarray(v, dtype=float) for k, v in found.items()}
            except Exception:
                traceback.print_exc()
                failed.append(section.__name__)
        print(f"{section.__name__}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return result, failed


def difference(name, expected, found):
    """Return the largest difference, relative to the standard deviation or the largest value."""
    old, new = expected[name], found[name]
    if old.shape != new.shape or (np.isnan(old) != np.isnan(new)).any():
        return np.inf
    stem, _, last = name.rpartition(".")
    std = expected.get(f"{stem}.std") if last in ("mean", "members") else None
    scale = np.nanmax(np.abs(old), initial=0.0) if std is None else np.median(std)
    return np.nanmax(np.abs(new - old), initial=0.0) / (scale or 1.0)


def compare(expected, found):
    """Print differences and return the names of those beyond their tolerance."""
    wrong = []
    for name in sorted(expected.keys() | found.keys()):
        tolerances = (t for pattern, (t, _) in TOLERANCES.items() if fnmatch(name, pattern))
        tolerance = next(tolerances, DEFAULT_TOLERANCE)
        missing = name not in expected or name not in found
        worst = np.inf if missing else difference(name, expected, found)
        if worst > tolerance:
            wrong.append(name)
        mark = ("missing" if missing else "DIFFERS") if worst > tolerance else ""
        print(f"{name:<50} {worst:9.1e} {tolerance:9.0e} {mark}")
    return wrong


def main(action, file, *names):
    warnings.simplefilter("ignore")
    unknown = set(names) - {section.__name__ for section in SECTIONS}
    if unknown or action not in ("record", "compare"):
        sys.exit(__doc__)
    found, failed = compute(names)
    if action == "record":
        if failed:
            sys.exit(f"Nothing is written: {', '.join(failed)} failed.")
        np.savez_compressed(file, **found)
        return
    with np.load(file) as archive:
        expected = {k: archive[k] for k in archive if not names or k.split(".")[0] in names}
    wrong = compare(expected, found)
    print(f"{len(wrong)} of {len(expected)} differ. {len(failed)} sections failed.")
    sys.exit(bool(wrong or failed))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
