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
            positions, strains, first = [], [], 0
            for atoms in frames:
                own = cotangents[:, first : first + len(atoms)]
                first += len(atoms)
                positions.append(self._slopes(atoms, own, range(3 * len(atoms)), self._moved))
                strains.append(self._slopes(atoms, own, range(9), self._strained))
            shape = len(cotangents), -1, 3
            positions = [p.reshape(shape) for p in positions]
            return np.concatenate(positions, axis=1), np.stack(
                [s.reshape(-1, 3, 3) for s in strains], axis=1
            )

        return self.features(frames), pull_back

    def _slopes(self, atoms, cotangents, directions, change, h=1e-5):
        found = []
        for k in directions:
            one, two = (self._of(atoms.numbers, change(atoms, k, s * h)) for s in (1, -1))
            found.append(np.einsum("rif,if->r", cotangents, (one - two) / (2 * h)))
        return np.stack(found, axis=1)

    @staticmethod
    def _moved(atoms, k, h):
        positions = atoms.positions.copy()
        positions.ravel()[k] += h
        return positions

    @staticmethod
    def _strained(atoms, k, h):
        strain = np.zeros(9)
        strain[k] = h
        return atoms.positions @ (np.eye(3) + strain.reshape(3, 3)).T

    def potential(self, frames, *, forces=False, stress=False):
        return PotentialValues(np.array([float(len(atoms)) for atoms in frames]))


class NoDerivatives:
    """The same without derivatives or energies."""

    n_features = Densities.n_features

    def features(self, frames):
        return Densities().features(frames)
