"""Calibrated error bars for committees of neural networks, on molecules of QM9.

Two committees of PyTorch networks learn atomisation energies per atom from the composition and from
SOAP features averaged over the atoms of a molecule:

sub-sampled
    Sixteen networks, each trained on half of the molecules. Molecules that a network did not see
    tell how its error bars must be scaled; no data need be set aside.
shallow
    One network with sixteen last layers (heads), each trained on half of the molecules. It costs
    no more than one network, but the layers below the heads have seen all molecules: those that a
    head did not see are not really new to it, and error bars calibrated on them are too small. The
    table shows by how much, and two remedies: molecules that are held out; and cross-fitting, which
    trains more networks, each without a quarter of the molecules, to calibrate on what they say of
    that quarter, and needs no data of its own.

Sparse Gaussian processes of the same molecules stand beside them. Run with
`python examples/neural_network.py`, after `pip install 'qualms[torch]'`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from ase import Atoms
from rich.console import Console
from scipy.stats import norm
from sklearn.model_selection import KFold

from qualms import AtomisticModel, Prediction, ProjectedProcessRegressor, calibrate, score
from qualms.data import qm9
from qualms.features.hypers import Compression, make_soap
from qualms.features.soap import all_atoms, fit_representation
from qualms.gp.ensemble import draw_members, membership_counts
from qualms.report import score_table

try:
    import torch
    from torch.func import functional_call, stack_module_state, vmap
except ImportError:
    raise SystemExit("This example needs PyTorch: pip install 'qualms[torch]'") from None

N_TRAIN, N_MEMBERS, N_FOLDS = 2000, 16, 4
WIDTH, BATCH = 64, 100  # of hidden layers; molecules in a step of the training
SOAP = make_soap("organic", n_radial=4, l_max=3, compression=Compression(n_features=200))

#: A trained committee: from features (n, d) to what its members say, (n, N_MEMBERS), in eV/atom.
Committee = Callable[[np.ndarray], np.ndarray]
#: Predictions of the test molecules, by the names of model and calibration.
Named = dict[str, Prediction]
#: What a network is to make small, for some of the molecules, given by number.
Loss = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Train, calibrate and judge everything, and print the table."""
    start = time.perf_counter()
    y_test, predictions = run(qm9(), N_TRAIN)
    scores = {name: score(y_test, prediction) for name, prediction in predictions.items()}
    title = f"QM9: {N_TRAIN} training and {len(y_test)} test molecules, {N_MEMBERS} members"
    columns = ("mae", "log_likelihood", "miscalibration_area", "coverage_68", "coverage_95")
    Console().print(score_table(scores, title=title, units="eV/atom", columns=columns))

    shared = predictions["shallow, internal"]
    covered = {name: f"{found.coverage_68:.0%}" for name, found in scores.items()}
    print(
        "\nOf the test molecules, intervals of 68 % should hold 68 %. Calibrated internally, those"
        f"\nof separate networks hold {covered['sub-sampled, internal']}, and those of heads on"
        f" shared layers {covered['shallow, internal']}: their error\nbars are"
        f" {too_small(y_test, shared):.2f} times too small, because no training molecule is new to"
        f" the shared layers.\nWith molecules held out they hold {covered['shallow, held out']},"
        f" and cross-fitted, without loss of data, {covered['shallow, cross-fitted']}."
        f"\n\nDone in {time.perf_counter() - start:.0f} s."
    )


def too_small(y: np.ndarray, prediction: Prediction) -> float:
    """Return how much longer error bars must be for intervals of 68 % to hold 68 % of y."""
    in_error_bars = np.abs(y - prediction.mean) / prediction.std
    return float(np.quantile(in_error_bars, 0.68) / norm.ppf(0.84))


def run(
    molecules: list[Atoms], n_train: int, *, epochs: int = 100, n_representatives: int = 1000
) -> tuple[np.ndarray, Named]:
    """Train on the first molecules; return energies (eV/atom) and predictions of the others.

    Parameters
    ----------
    molecules : list of Atoms
        With ``atomization_energy`` (eV) and ``atomization_energy_per_atom`` (eV/atom).
    n_train : int
        How many of them are for training.
    epochs : int
        How often a network sees each of its molecules.
    n_representatives : int
        Of the Gaussian processes.
    """
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # small matrices: more threads would only wait for each other
    train, test = molecules[:n_train], molecules[n_train:]
    energies = np.array([atoms.info["atomization_energy_per_atom"] for atoms in molecules])
    y, y_test = np.split(energies, [n_train])
    features = averaged_features(molecules, n_train)
    gpr = ProjectedProcessRegressor(exponent=4, n_representatives=n_representatives, random_state=0)
    of_features = gpr.fit(features[:n_train], y).predict_ensemble(features[n_train:])
    model = AtomisticModel(
        "atomization_energy", representation=SOAP, n_representatives=n_representatives, units="eV"
    )
    of_atoms = model.fit(train).predict(test) / np.array([len(atoms) for atoms in test])

    X, X_test = np.split(scaled(features, n_train), [n_train])
    return y_test, (
        subsampled(X, y, X_test, epochs)
        | shallow(X, y, X_test, epochs)
        | before_and_after("GPR, same features", of_features)
        | before_and_after("GPR, SOAP kernel", of_atoms)
    )


def averaged_features(molecules: list[Atoms], n_train: int) -> np.ndarray:
    """Return composition and average SOAP vector of each molecule: (n, n_species + 200)."""
    species = np.unique(np.concatenate([atoms.numbers for atoms in molecules]))
    sample = molecules[: min(n_train, 300)]
    soap = fit_representation(SOAP, species.tolist(), sample, all_atoms(sample), SOAP.compression)
    environments = soap.features(molecules, all_atoms(molecules))
    n_atoms = np.array([len(atoms) for atoms in molecules])
    sums = np.add.reduceat(environments, np.cumsum(n_atoms) - n_atoms, axis=0)
    counts = np.stack([(atoms.numbers[:, None] == species).sum(axis=0) for atoms in molecules])
    return np.hstack([counts, sums]) / n_atoms[:, None]


def scaled(features: np.ndarray, n_train: int) -> np.ndarray:
    """Return features for a network: centred, and of more similar size."""
    # Not of equal size, as is common: the smallest of 200 principal components are mostly noise.
    std = features[:n_train].std(axis=0)
    size = np.sqrt(std.max() * np.maximum(std, 1e-6 * std.max()))
    return (features - features[:n_train].mean(axis=0)) / size


def subsampled(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, epochs: int) -> Named:
    """Train the sub-sampled committee, and calibrate it internally."""
    present = draw_present(len(y))
    committee = train_subsampled(X, y, present, epochs)
    internal = calibrate(y, committee(X), absent=~present)
    return before_and_after("sub-sampled", internal.apply(Prediction(committee(X_test))))


def shallow(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, epochs: int) -> Named:
    """Train the shallow ensemble, and calibrate it internally, held out, and cross-fitted."""
    present = draw_present(len(y))
    committee = train_shallow(X, y, present, epochs)
    prediction = Prediction(committee(X_test))
    internal = calibrate(y, committee(X), absent=~present)

    # What is said of each molecule by a network that has not seen it with any of its layers.
    unseen = np.empty((len(y), N_MEMBERS))
    for seen, fold in KFold(N_FOLDS, shuffle=True, random_state=0).split(X):
        partial = train_shallow(X[seen], y[seen], draw_present(len(seen)), epochs)
        unseen[fold] = partial(X[fold])
    cross_fitted = calibrate(y, unseen)
    # The last of these networks is what remains to predict with if its fold is held out.
    held_out = calibrate(y[fold], unseen[fold])
    return before_and_after("shallow", internal.apply(prediction)) | {
        "shallow, held out": held_out.apply(Prediction(partial(X_test))),
        "shallow, cross-fitted": cross_fitted.apply(prediction),
    }


def draw_present(n_train: int) -> np.ndarray:
    """Draw half of the molecules for each member: (n_train, N_MEMBERS), true if it sees one."""
    members = draw_members(n_train, N_MEMBERS, 0.5, np.random.default_rng(0))
    return membership_counts(members, n_train) > 0


def before_and_after(model: str, prediction: Prediction) -> Named:
    """Return a prediction before and after internal calibration."""
    return {f"{model}, none": prediction.uncalibrated, f"{model}, internal": prediction}


def train_subsampled(X: np.ndarray, y: np.ndarray, present: np.ndarray, epochs: int) -> Committee:
    """Train a network for each member, all at once, on the molecules that it sees."""
    torch.manual_seed(0)
    inputs, targets = as_tensor(X), as_tensor((y - y.mean()) / y.std())
    networks = [new_network(X.shape[1], 1) for _ in range(N_MEMBERS)]
    weights, _ = stack_module_state(networks)  # every tensor has one more axis: the members

    def one(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(networks[0], weights, (x,))[:, 0]

    # Row i: the molecules of member i, in random order.
    rng = np.random.default_rng(0)
    own = torch.as_tensor(np.array([rng.permutation(np.flatnonzero(seen)) for seen in present.T]))

    def loss(batch: torch.Tensor) -> torch.Tensor:
        rows = own[:, batch]
        errors = vmap(one)(weights, inputs[rows]) - targets[rows]
        return (errors**2).mean(dim=1).sum()

    minimize(loss, list(weights.values()), own.shape[1], epochs)
    everyone = vmap(one, in_dims=(0, None), out_dims=1)
    return lambda new: y.mean() + y.std() * everyone(weights, as_tensor(new)).detach().numpy()


def train_shallow(X: np.ndarray, y: np.ndarray, present: np.ndarray, epochs: int) -> Committee:
    """Train a network with a head for each member, which learns from what that member sees."""
    torch.manual_seed(0)
    inputs, targets = as_tensor(X), as_tensor((y - y.mean()) / y.std())
    network, seen = new_network(X.shape[1], N_MEMBERS), as_tensor(present)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        errors = network(inputs[batch]) - targets[batch, None]
        return (seen[batch] * errors**2).sum() / seen[batch].sum()

    minimize(loss, list(network.parameters()), len(y), epochs)
    return lambda new: y.mean() + y.std() * network(as_tensor(new)).detach().numpy()


def new_network(n_inputs: int, n_outputs: int) -> torch.nn.Module:
    """Return a network with two hidden layers."""
    hidden = [torch.nn.Linear(n_inputs, WIDTH), torch.nn.SiLU()]
    hidden += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU()]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(WIDTH, n_outputs))


def minimize(loss: Loss, weights: list[torch.Tensor], n_points: int, epochs: int) -> None:
    """Minimise the loss of batches of points, with a learning rate that rises and falls."""
    optimizer = torch.optim.AdamW(weights, weight_decay=1e-4)
    n_steps = epochs * -(-n_points // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=n_steps)
    for _ in range(epochs):
        for batch in torch.randperm(n_points).split(BATCH):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
            schedule.step()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return numbers, or truth values as 0 and 1, for a network."""
    return torch.as_tensor(array, dtype=torch.float32)


if __name__ == "__main__":
    main()
