"""Calibrated uncertainties for scikit-learn's neural network, on a public table.

The diabetes data set (Efron et al. 2004) comes with scikit-learn: ten measurements of each of 442
patients, and the progression of the disease after one year. The standard deviation of an ensemble
of networks, each trained on three quarters of the patients, is much smaller than the errors, most
of which all networks share. Out-of-bag patients show how large they are; no validation set is
needed.

Run with `python examples/any_regressor.py`.
"""

from __future__ import annotations

import numpy as np
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from qualms import Prediction, ResamplingRegressor, score


def main() -> None:
    """Cross-validate the ensemble and compare its scores before and after calibration."""
    X, y = load_diabetes(return_X_y=True)
    network = TransformedTargetRegressor(
        make_pipeline(
            StandardScaler(),
            MLPRegressor(
                hidden_layer_sizes=(16,), activation="tanh", solver="lbfgs", alpha=3.0, tol=1e-3
            ),
        ),
        transformer=StandardScaler(),
    )
    predictions, references = [], []
    for train, test in KFold(5, shuffle=True, random_state=0).split(X):
        model = ResamplingRegressor(network, random_state=0)
        model.fit(X[train], y[train])
        predictions.append(model.predict_ensemble(X[test]))
        references.append(y[test])
        print(f"fold {len(references)}: {model.calibration_.describe()}")

    calibrated, y_test = Prediction.concatenate(predictions), np.concatenate(references)
    before, after = score(y_test, calibrated.uncalibrated), score(y_test, calibrated)
    print(f"\n{'':22}{'before':>10}{'after':>10}   calibration")
    for name, value in after.as_dict().items():
        if (raw := before.as_dict()[name]) is not None:
            print(f"{name:22}{raw:10.4g}{value:10.4g}")
    print(
        "\nIntervals of one standard deviation, nominally 68 %, contain "
        f"{before.coverage_68:.0%} before and {after.coverage_68:.0%} after calibration."
    )


if __name__ == "__main__":
    main()
