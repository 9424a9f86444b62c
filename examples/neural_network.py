"""Calibrated uncertainties for ensembles of neural networks, on molecules of QM9.

Two ensembles of PyTorch networks are trained on atomisation energies per atom, with the composition
and the average SOAP vector of a molecule as features:

separate
    Sixteen networks, each trained on half of the molecules. They are calibrated on out-of-bag
    molecules; no validation set is needed.
shared
    One network with sixteen last layers (heads), each trained on half of the molecules. It costs
    as much as one network, but the shared layers are trained on all molecules. Out-of-bag
    molecules are therefore not new to a head, and uncertainties calibrated on them are too small.
    Two remedies are compared: a validation set; and cross-fitting, in which further networks are
    trained without a quarter of the molecules each, and their predictions of that quarter are used
    for the calibration.

Run with `python examples/neural_network.py`, after `pip install 'qualms[torch]'`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ase import Atoms
from dscribe.descriptors import SOAP
from sklearn.decomposition import PCA
from sklearn.model_selection import KFold

from qualms import Prediction, calibrate, score
from qualms.data import qm9

try:
    import torch
    from torch.func import functional_call, stack_module_state, vmap
except ImportError:
    raise SystemExit("This example needs PyTorch: pip install 'qualms[torch]'") from None

N_TRAIN, N_MEMBERS, N_FOLDS = 2000, 16, 4
WIDTH, BATCH = 64, 100  # of hidden layers; molecules in a step of the training

#: A trained ensemble: features (n, d) to predictions of the members (n, N_MEMBERS), in eV/atom.
Ensemble = Callable[[np.ndarray], np.ndarray]
#: Predictions of the test molecules, by ensemble and calibration.
Named = dict[str, Prediction]
#: Loss of some of the molecules, given by index.
Loss = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Train, calibrate and score all ensembles."""
    y_test, predictions = run(qm9(), N_TRAIN)
    print(f"QM9: {N_TRAIN} training and {len(y_test)} test molecules, {N_MEMBERS} members\n")
    print(f"{'ensemble, calibration':24}{'MAE':>10}{'LL':>10}{'68 %':>8}{'95 %':>8}")
    for name, prediction in predictions.items():
        found = score(y_test, prediction)
        print(
            f"{name:24}{found.mae:10.5f}{found.log_likelihood:10.3f}"
            f"{found.coverage_68:8.1%}{found.coverage_95:8.1%}"
        )


def run(molecules: list[Atoms], n_train: int, *, epochs: int = 100) -> tuple[np.ndarray, Named]:
    """Train on the first molecules; return energies (eV/atom) and predictions of the others."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # faster for small matrices
    energies = np.array([atoms.info["atomization_energy_per_atom"] for atoms in molecules])
    y, y_test = np.split(energies, [n_train])
    X, X_test = np.split(scaled(averaged_features(molecules, n_train), n_train), [n_train])
    return y_test, separate(X, y, X_test, epochs) | shared(X, y, X_test, epochs)


def averaged_features(molecules: list[Atoms], n_train: int) -> np.ndarray:
    """Return composition and average SOAP vector of each molecule: (n, n_species + 200)."""
    species = sorted({symbol for atoms in molecules for symbol in atoms.symbols})
    soap = SOAP(species=species, r_cut=5.0, n_max=4, l_max=3, sigma=0.3, average="outer")
    spectra = soap.create(molecules)
    spectra /= np.linalg.norm(spectra, axis=1, keepdims=True)
    spectra = PCA(200, random_state=0).fit(spectra[:n_train]).transform(spectra)
    composition = [[np.mean(atoms.symbols == symbol) for symbol in species] for atoms in molecules]
    return np.hstack([composition, spectra])


def scaled(features: np.ndarray, n_train: int) -> np.ndarray:
    """Return centred features of more similar size."""
    # Not of equal size: the smallest of 200 principal components are mostly noise.
    std = features[:n_train].std(axis=0)
    size = np.sqrt(std.max() * np.maximum(std, 1e-6 * std.max()))
    return (features - features[:n_train].mean(axis=0)) / size


def separate(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, epochs: int) -> Named:
    """Train separate networks, and calibrate them on out-of-bag molecules."""
    present = draw_present(len(y))
    ensemble = train_separate(X, y, present, epochs)
    prediction = Prediction(ensemble(X_test))
    out_of_bag = calibrate(y, ensemble(X), absent=~present)
    return {
        "separate, none": prediction,
        "separate, out-of-bag": out_of_bag.apply(prediction),
    }


def shared(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, epochs: int) -> Named:
    """Train heads on shared layers; calibrate out of bag, on a validation set, and cross-fitted."""
    present = draw_present(len(y))
    ensemble = train_shared(X, y, present, epochs)
    prediction = Prediction(ensemble(X_test))
    out_of_bag = calibrate(y, ensemble(X), absent=~present)

    # Predictions of each molecule by a network of which no layer was trained on it.
    unseen = np.empty((len(y), N_MEMBERS))
    for rows, fold in KFold(N_FOLDS, shuffle=True, random_state=0).split(X):
        partial = train_shared(X[rows], y[rows], draw_present(len(rows)), epochs)
        unseen[fold] = partial(X[fold])
    # The last of these networks is used with its fold as the validation set.
    validation = calibrate(y[fold], unseen[fold])
    return {
        "shared, none": prediction,
        "shared, out-of-bag": out_of_bag.apply(prediction),
        "shared, validation": validation.apply(Prediction(partial(X_test))),
        "shared, cross-fitted": calibrate(y, unseen).apply(prediction),
    }


def draw_present(n_train: int) -> np.ndarray:
    """Draw half of the molecules for each member: (n_train, N_MEMBERS), true if it is drawn."""
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(n_train) for _ in range(N_MEMBERS)], axis=1)
    return ranks < n_train // 2


def train_separate(X: np.ndarray, y: np.ndarray, present: np.ndarray, epochs: int) -> Ensemble:
    """Train a network for each member on its subsample, all at once."""
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
    all_members = vmap(one, in_dims=(0, None), out_dims=1)
    return lambda new: y.mean() + y.std() * all_members(weights, as_tensor(new)).detach().numpy()


def train_shared(X: np.ndarray, y: np.ndarray, present: np.ndarray, epochs: int) -> Ensemble:
    """Train a network with a head for each member; each head is trained on its subsample."""
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
    """Return an array as a float32 tensor."""
    return torch.as_tensor(array, dtype=torch.float32)


if __name__ == "__main__":
    main()
