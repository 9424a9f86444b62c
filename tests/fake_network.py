"""Features of atoms in plain NumPy, with derivatives, as an object of a user would have them."""

import numpy as np

from qualms.features.base import PotentialValues

WIDTHS = np.array([0.8, 1.2, 1.7, 2.3])


class Densities:
    """Sums over neighbours of Gaussians of distances, and products of them.

    Of molecules. A second layer sums the features of neighbours, as networks do.
    """

    n_features = 4 * len(WIDTHS) + 1
    cutoff = 20.0
    digest = "densities-1"

    def features(self, frames):
        return np.concatenate([self._of(atoms.numbers, atoms.positions) for atoms in frames])

    def _of(self, numbers, r):
        distance = np.linalg.norm(r[:, None] - r[None], axis=2)
        g = np.exp(-((distance[:, :, None] / (2 * WIDTHS)) ** 2))
        g[np.arange(len(r)), np.arange(len(r))] = 0.0
        first = np.einsum("ijk,j->ik", g, np.sqrt(numbers))
        second = np.einsum("ijk,jk->ik", g, first)
        parts = [
            np.ones((len(r), 1)),
            first,
            first**2 / 10,
            second / 10,
            first[:, ::-1] * second / 50,
        ]
        return np.concatenate(parts, axis=1)

    def vjp(self, frames):
        """Return features and a vector-Jacobian product, by differences: slow and simple."""

        def pull_back(cotangents):
            edges = np.cumsum([0, *map(len, frames)])
            positions, strains = [], []
            for atoms, first, last in zip(frames, edges[:-1], edges[1:], strict=True):
                n, b = len(atoms), cotangents[:, first:last]
                shifts = np.eye(3 * n).reshape(-1, n, 3)
                strained = atoms.positions @ np.eye(9).reshape(9, 3, 3)
                positions.append(self._slopes(atoms, b, shifts).reshape(-1, n, 3))
                strains.append(self._slopes(atoms, b, strained).reshape(-1, 3, 3))
            return np.concatenate(positions, axis=1), np.stack(strains, axis=1)

        return self.features(frames), pull_back

    def _slopes(self, atoms, cotangents, directions, h=1e-5):
        """Derivatives along changes of the positions: (R, directions)."""
        slopes = []
        for direction in directions:
            plus, minus = (
                self._of(atoms.numbers, atoms.positions + sign * h * direction) for sign in (1, -1)
            )
            slopes.append(np.einsum("rif,if->r", cotangents, (plus - minus) / (2 * h)))
        return np.stack(slopes, axis=1)

    def potential(self, frames, *, forces=False, stress=False):
        return PotentialValues(np.array([float(len(atoms)) for atoms in frames]))


class NoDerivatives:
    """The same without derivatives or energies."""

    n_features = Densities.n_features

    def features(self, frames):
        return Densities().features(frames)
