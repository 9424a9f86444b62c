"""From structures to the features of their environments. Eqs. (13)–(16), Musil et al. 2019."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ase import Atoms

from qualms.atomistic.compression import Projection, fit_projection, is_worthwhile
from qualms.atomistic.engines import Engine, Piece, make_engine
from qualms.atomistic.hypers import Compression, Soap
from qualms.core.kernels import Kernel, PowerKernel, WeightedSumKernel, normalize_rows
from qualms.core.typing import FloatArray, IntArray

#: Leading principal components that are multiplied in float64: they carry nearly all of x·x′.
_N_EXACT = 64
#: Representatives from which on features are compressed for accuracy, even if that takes longer.
_MANY = 2_500
#: Components per pair of species that are kept if derivatives are needed, and the least in all.
_PER_PAIR, _AT_LEAST = 32, 192


@dataclass(frozen=True)
class Representation:
    """SOAP hyper-parameters, the species they are for, and how features are compressed.

    Attributes
    ----------
    soap : Soap
    species : tuple of int
        Atomic numbers, increasing.
    projections : tuple of Projection
        One for each scale, or none at all.
    feature_scale : float
        What features are divided by if they are not normalised: keeps powers of them in range.
    precise : bool
        Whether features are float64, as those of models that were trained on forces.
    """

    soap: Soap
    species: tuple[int, ...]
    projections: tuple[Projection, ...] = ()
    feature_scale: float = 1.0
    precise: bool = False

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of features of each scale."""
        if self.projections:
            return tuple(projection.matrix.shape[1] for projection in self.projections)
        return tuple(engine.n_features for engine in self.engines)

    @property
    def n_features(self) -> int:
        """Number d of features of an environment."""
        return sum(self.widths)

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel between environments: Eq. (13) to the power ζ, summed over the scales."""
        # Compressed features are principal components, the largest first. Products of power spectra
        # are not negative, but those of what is kept of them can be, a little.
        n_exact = _N_EXACT if self.projections else 0
        single = PowerKernel(self.soap.exponent, n_exact=n_exact, clip=bool(self.projections))
        if len(self.widths) == 1:
            return single
        ends = np.cumsum(self.widths)
        columns = [slice(int(e - w), int(e)) for e, w in zip(ends, self.widths, strict=True)]
        weights = np.array([scale.weight for scale in self.soap.scales])
        return WeightedSumKernel(
            (single,) * len(columns), tuple(weights / weights.sum()), tuple(columns)
        )

    def features(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> FloatArray:
        """Return the features of the chosen atoms of each structure, in order.

        Parameters
        ----------
        frames : sequence of Atoms
            With no species but those of the representation.
        centers : sequence of arrays of int
            The chosen atoms of each.

        Returns
        -------
        (n_environments, d) array of float32, or float64 if `precise`
            For each scale of unit length, unless the hyper-parameters say otherwise.
        """
        n = sum(len(chosen) for chosen in centers)
        dtype = np.float64 if self.precise else np.float32
        features: FloatArray = np.zeros((n, self.n_features), dtype=dtype)
        first = 0
        for s, engine in enumerate(self.engines):
            block = features[:, first : first + self.widths[s]]
            first += self.widths[s]
            for piece in engine.pieces(frames, centers, self._scaled, dtype):
                self._place(block, piece, s)
            if self.soap.normalize and self.projections:
                block[:] = normalize_rows(block)
        return features

    @property
    def engines(self) -> list[Engine]:
        """What computes the power spectra of each scale."""
        name = self.soap.resolved_engine
        return [make_engine(name, scale, self.species) for scale in self.soap.scales]

    def _scaled(self, spectra: FloatArray) -> FloatArray:
        if self.soap.normalize:
            return normalize_rows(spectra)
        return spectra / spectra.dtype.type(self.feature_scale)

    def _place(self, block: FloatArray, piece: Piece, s: int) -> None:
        """Write a piece, compressed if so wanted, where it belongs in the features of a scale."""
        if self.projections:
            # Only the rows of the map whose features are not zero: for most molecules, a third.
            matrix = self.projections[s].matrix
            block[piece.rows] = piece.values @ np.concatenate([matrix[c] for c in piece.columns])
            return
        first = 0
        for columns in piece.columns:
            width = columns.stop - columns.start
            block[piece.rows, columns] = piece.values[:, first : first + width]
            first += width


def fit_representation(
    soap: Soap,
    species: Sequence[int],
    frames: Sequence[Atoms],
    centers: Sequence[IntArray],
    compression: Compression | None,
) -> Representation:
    """Find the compression, and the scale of features that are not normalised.

    Parameters
    ----------
    soap : Soap
    species : sequence of int
        Atomic numbers of all structures to come.
    frames, centers
        A sample of environments; a few thousand will do.
    compression : Compression, optional
        What ``soap.compression`` stands for.
    """
    plain = Representation(soap, tuple(sorted(species)))
    if compression is None and soap.normalize:
        return plain
    X = plain.features(frames, centers)
    feature_scale = 1.0
    if not soap.normalize:
        feature_scale = float(np.sqrt(np.mean(np.einsum("ij,ij->i", X, X)))) or 1.0
        X /= np.float32(feature_scale)
    projections: tuple[Projection, ...] = ()
    if compression is not None and any(w > compression.n_features for w in plain.widths):
        ends = np.cumsum(plain.widths)
        projections = tuple(
            fit_projection(X[:, end - width : end], compression, engine.pair_blocks)
            for end, width, engine in zip(ends, plain.widths, plain.engines, strict=True)
        )
    return Representation(soap, plain.species, projections, feature_scale)


def resolve_compression(
    soap: Soap,
    species: Sequence[int],
    n_environments: int,
    n_representatives: int,
    *,
    derivatives: bool = False,
) -> Compression | None:
    """Return the compression that ``soap.compression`` stands for, for a training set.

    Parameters
    ----------
    soap : Soap
    species : sequence of int
    n_environments, n_representatives : int
    derivatives : bool
        Whether forces are learned, or will be wanted.
    """
    if soap.compression != "auto":
        return soap.compression
    standard = Compression()
    n_raw = max(Representation(soap, tuple(species)).widths)
    if derivatives:
        # They are multiplied with all representatives, for every neighbour: fewer features pay.
        kept = max(_PER_PAIR * len(species) * (len(species) + 1) // 2, _AT_LEAST)
        return Compression(method="pairs", n_features=kept) if n_raw > kept else None
    q = standard.n_features
    # With so many representatives rounding of the kernel rows matters: see `_N_EXACT`.
    faster = is_worthwhile(n_environments, n_representatives, n_raw, q)
    return standard if n_raw > q and (faster or n_representatives >= _MANY) else None
