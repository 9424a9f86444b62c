"""The paper's table on a public benchmark function: what calibration does at every sub-sample size.

A sparse Gaussian process learns Friedman's function #1 from 3000 noisy samples. For each size of
the sub-samples the members' spread is used as it is (Raw), scaled on a validation set (CV, N-L),
and scaled internally, on training points that members did not see (Int., Int. N-L, student,
shrinkage), which needs no validation set. The score is the mean log likelihood of 1000 test points:
higher is better. Run with `python examples/regression.py`.
"""

from __future__ import annotations

import time

import numpy as np
from sklearn.datasets import make_friedman1

from qualms import Prediction, ProjectedProcessRegressor, calibrate, score
from qualms.metrics import log_likelihood

N_TRAIN, N_VALIDATION, N_TEST = 3000, 1000, 1000
SIZES = (0.05, 0.25, 0.5, 0.75, 0.9)
INTERNAL = {"Int.": "linear", "Int. N-L": "power", "student": "student", "shrinkage": "shrinkage"}


def main() -> None:
    """Train at every sub-sample size and print the table."""
    start = time.perf_counter()
    n_all = N_TRAIN + N_VALIDATION + N_TEST
    X, y = make_friedman1(n_all, n_features=10, noise=0.05, random_state=0)
    train, validation, test = np.split(np.arange(n_all), [N_TRAIN, N_TRAIN + N_VALIDATION])

    columns = ["Raw", "CV", "N-L", *INTERNAL]
    print(
        f"Friedman's function #1: {N_TRAIN} training, {N_VALIDATION} validation, {N_TEST} test"
        " points."
        "\nMean log likelihood of the test points; 16 members, 500 shared representatives.\n"
    )
    print("n/N     " + "".join(f"{name:>11}" for name in columns))
    for size in SIZES:
        row = table_row(X, y, train, validation, test, size)
        print(f"{size:<8}" + "".join(f"{row[name]:11.3f}" for name in columns))

    model = new_model(0.5).fit(X[train], y[train])
    pp = log_likelihood(y[test] - model.pp_mean(X[test]), model.pp_std(X[test]))
    print(f"{'GPR PP':<8}{pp:11.3f}")

    prediction = model.predict_ensemble(X[test])
    print("\nThe default (n/N = 0.5, student), judged on the test points:\n")
    print(score(y[test], prediction))
    difference = prediction[0] - prediction[1]
    print(
        f"\nTwo predictions:      {prediction.mean[0]:.2f} ± {prediction.std[0]:.2f}"
        f" and {prediction.mean[1]:.2f} ± {prediction.std[1]:.2f}"
        f"\nTheir difference:     {difference.mean:.2f} ± {difference.std:.2f}"
        f"   (truth {y[test][0] - y[test][1]:.2f})"
    )
    print(f"\nDone in {time.perf_counter() - start:.1f} s.")


def new_model(subsample: float) -> ProjectedProcessRegressor:
    """Return a sparse Gaussian process with a committee of 16."""
    return ProjectedProcessRegressor(
        kernel="rbf", length_scale=1.5, n_representatives=500, subsample=subsample, random_state=0
    )


def table_row(
    X: np.ndarray,
    y: np.ndarray,
    train: np.ndarray,
    validation: np.ndarray,
    test: np.ndarray,
    size: float,
) -> dict[str, float]:
    """Return the test log likelihood of every calibration for one sub-sample size."""
    model = new_model(size).fit(X[train], y[train])
    raw = model.predict_ensemble(X[test]).uncalibrated
    held_out = model.predict_ensemble(X[validation]).uncalibrated.members
    on_training = model.predict_ensemble(X[train]).uncalibrated.members
    absent = np.stack(
        [~np.isin(np.arange(len(train)), rows) for rows in model.member_indices_], axis=1
    )

    def judged(prediction: Prediction) -> float:
        return score(y[test], prediction).log_likelihood

    row = {"Raw": judged(raw)}
    for name, method in (("CV", "linear"), ("N-L", "power")):
        row[name] = judged(calibrate(y[validation], held_out, method=method).apply(raw))
    for name, method in INTERNAL.items():
        internal = calibrate(y[train], on_training, absent=absent, method=method)
        row[name] = judged(internal.apply(raw))
    return row


if __name__ == "__main__":
    main()
