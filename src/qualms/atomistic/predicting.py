"""From new structures to kernel rows, as a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ase import Atoms

from qualms.atomistic.baselines import atom_design, structure_design
from qualms.atomistic.featurize import BATCH, Batch, stream_features
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.structures import check_species, check_structures
from qualms.core.calibration import Scaled
from qualms.core.typing import BoolArray, Float64Array, IntArray
from qualms.prediction import Prediction

#: What novelties may differ by in rounding.
_NOVEL = 1e-6


@dataclass(frozen=True)
class Chunk:
    """Some of the structures that are to be predicted, and their features.

    Attributes
    ----------
    frames : list of Atoms
        As they were given.
    known : list of Atoms
        Without atoms of species that the model does not know.
    centers : list of arrays of int
        The atoms of `frames` whose environments count.
    batch : Batch
        Features of these environments.
    fitted : Fitted
    """

    frames: list[Atoms]
    known: list[Atoms]
    centers: list[IntArray]
    batch: Batch
    fitted: Fitted

    @property
    def has_unknown(self) -> BoolArray:
        """Whether a structure has atoms of species that the model does not know."""
        pairs = zip(self.frames, self.known, strict=True)
        return np.array([len(given) != len(known) for given, known in pairs])

    @property
    def sizes(self) -> Float64Array:
        """What an average is multiplied by: the number of atoms if the target is extensive."""
        if self.fitted.settings.kind != "extensive":
            return np.ones(len(self.frames))
        return np.array([len(known) for known in self.known], dtype=np.float64)

    @property
    def factors(self) -> Float64Array:
        """What averages are multiplied by, a number for each prediction."""
        return np.ones(len(self.batch.features)) if self.fitted.per_atom else self.sizes

    @property
    def design(self) -> Float64Array:
        """Design matrix of the baseline, a row for each prediction."""
        species = self.fitted.baseline.species
        if self.fitted.per_atom:
            return atom_design(self.center_species, species)
        return structure_design(self.known, species)

    @property
    def center_species(self) -> IntArray:
        """Atomic number at the centre of each environment."""
        pairs = zip(self.frames, self.centers, strict=True)
        return np.concatenate([atoms.numbers[chosen] for atoms, chosen in pairs])

    def rows(self, novelty: Float64Array | None = None) -> Float64Array:
        """Return the kernel rows K_XM."""
        return self.fitted.basis.rows(self.batch.features, self.batch.offsets, novelty=novelty)

    def atom_novelty(self) -> list[Float64Array]:
        """Return how strange each environment of each structure is, relative to the training set.

        One is where `extrapolates` begins: so strange is the strangest environment of one training
        structure in a hundred, representatives of its own not counted.
        """
        limit = self.fitted.training_novelty[0] + _NOVEL
        novelty = self.fitted.basis.novelty(self.batch.features) / limit
        return [novelty[a:b] for a, b in pairwise(self.batch.offsets)]

    def prior_variance(self) -> Float64Array:
        """Return the diagonal of K_XX, a number for each prediction."""
        return self.fitted.basis.prior_variance(self.batch.features, self.batch.offsets)

    def predict(self, rows: Float64Array) -> Prediction:
        """Return the calibrated prediction."""
        raw = Prediction(self.fitted.members(rows, self.design))
        calibrated = raw.calibrated(self.fitted.calibration)
        return calibrated * self.sizes if self.fitted.settings.kind == "extensive" else calibrated

    def extrapolates(self, prediction: Prediction, novelty: Float64Array) -> BoolArray:
        """Return for each structure, given its novelty, whether it looks like extrapolation.

        It does if an environment, or all of them on average, are less like any representative than
        those of 99 % of the training structures were like representatives from other structures,
        if the members disagree more than they did about any training row that they had not seen, or
        if it has atoms of unknown species.
        """
        flags: BoolArray = np.any(novelty > np.array(self.fitted.training_novelty) + _NOVEL, axis=1)
        spread = prediction.uncalibrated.std
        # Members that agreed to rounding on all training rows differ by rounding everywhere.
        largest = self.fitted.training_spread or np.inf
        if self.fitted.per_atom:
            wild = spread > largest
            edges = pairwise(self.batch.offsets)
            flags |= np.array([bool(np.any(wild[a:b])) for a, b in edges])
        else:
            flags |= spread > largest * self.sizes
        return flags | self.has_unknown


def stream_chunks(
    fitted: Fitted,
    frames: Iterable[Atoms],
    *,
    threads: int = 1,
    allow_unknown: bool = False,
    batch: int = BATCH,
) -> Iterator[Chunk]:
    """Yield structures with their features, in order.

    Parameters
    ----------
    fitted : Fitted
    frames : iterable of Atoms
        May be a generator that reads a file.
    threads : int
    allow_unknown : bool
        Whether atoms of species that the model does not know are left out, rather than an error.
    batch : int
        Environments in a chunk, about.
    """
    waiting: deque[tuple[Atoms, Atoms, IntArray]] = deque()

    def structures() -> Iterator[tuple[Atoms, IntArray]]:
        for index, atoms in enumerate(frames):
            check_structures([atoms], first=index)
            kept = _known_atoms(atoms, fitted, index, allow_unknown)
            known = atoms if len(kept) == len(atoms) else atoms[kept]
            inside = centers_of(known.numbers, fitted)
            waiting.append((atoms, known, kept[inside]))
            yield known, inside

    for found in stream_features(
        fitted.representation, structures(), n_workers=threads, batch=batch
    ):
        taken = [waiting.popleft() for _ in found.sizes]
        yield Chunk(
            frames=[given for given, _, _ in taken],
            known=[known for _, known, _ in taken],
            centers=[centers for _, _, centers in taken],
            batch=found,
            fitted=fitted,
        )


def _known_atoms(atoms: Atoms, fitted: Fitted, index: int, allow_unknown: bool) -> IntArray:
    known = np.isin(atoms.numbers, fitted.representation.species)
    if not known.all() and (not allow_unknown or not known.any()):
        check_species([atoms], fitted.representation.species, first=index)
    return np.flatnonzero(known)


def centers_of(numbers: IntArray, fitted: Fitted) -> IntArray:
    """Return the atoms whose environments count: all, or those of the species of the target."""
    species = fitted.settings.species
    if not fitted.per_atom or species is None:
        return np.arange(len(numbers))
    return np.flatnonzero(np.isin(numbers, species))


def atom_contributions(chunk: Chunk) -> list[Prediction]:
    """Return what each atom contributes to the property of its structure.

    Contributions sum (extensive) or average (intensive) to the prediction of the structure, member
    by member, and so after calibration: the members of all atoms of a structure are scaled about
    their means by the factor that calibrates the structure. Of atomic properties, they are the
    predictions.
    """
    fitted = chunk.fitted
    whole = chunk.predict(chunk.rows())
    edges = list(pairwise(chunk.batch.offsets))
    if fitted.per_atom:
        return [whole[a:b] for a, b in edges]
    raw = fitted.basis.environment_rows(chunk.batch.features) @ fitted.weights
    raw += fitted.intercepts
    raw += fitted.baseline.predict_members(
        atom_design(chunk.center_species, fitted.baseline.species)
    )
    spread = whole.uncalibrated.std
    factors = np.divide(whole.std, spread, out=np.ones_like(spread), where=spread > 0)
    return [
        Prediction(raw[a:b]).calibrated(Scaled(float(factor)))
        for (a, b), factor in zip(edges, factors, strict=True)
    ]


def concatenated(predictions: Sequence[Prediction]) -> Prediction:
    """Join the predictions of chunks."""
    return predictions[0] if len(predictions) == 1 else Prediction.concatenate(predictions)
