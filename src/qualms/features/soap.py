"""SOAP power spectra of atomic environments: hyper-parameters, two engines, compressed features.

Both engines expand the density of each species around an atom (Eqs. (15) and (16), Musil et al.
2019) and contract it to the power spectrum ⟨αnα′n′l|X⟩ of Eq. (14). Their radial functions differ,
so that a model belongs to the engine it was trained with. dscribe is faster for values, featomic
has a smooth cutoff and derivatives.

An engine stores every pair (αn, α′n′) once and weights it by the square root of how often it occurs
in the sum of Eq. (13), so that the inner product of two vectors is that sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement, pairwise, zip_longest
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import numpy as np
import scipy.linalg
from ase import Atoms
from pydantic import BaseModel, ConfigDict, Field, model_validator

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.errors import InputError, counted, did_you_mean
from qualms.features.base import (
    PACKAGES,
    DifferentiableFeatures,
    Dtype,
    Problem,
    Representation,
    RepresentationDocument,
    RepresentationSettings,
    Sample,
    offsets_of,
    validated,
)
from qualms.features.compression import Projection, fit_projection, mixing_weights
from qualms.features.densities import (
    Part,
    RadialFunctions,
    environments_of,
    find_neighbours,
    radial_functions,
)
from qualms.gp.kernels import Kernel, PowerKernel, WeightedSumKernel, normalize_rows
from qualms.io.tensors import TensorSpec

# --- hyper-parameters ---

#: Width in Å over which neighbours fade at the cutoff, if forces are learned and none is given.
SMOOTHING = 0.5
#: A length (Å), factor or exponent. The bounds hold for files as well: beyond them, libraries hang.
Positive = Annotated[float, Field(ge=1e-3, le=100)]
EngineName: TypeAlias = Literal["dscribe", "featomic"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RadialScaling(_Frozen):
    """Weight u(r) = c / (c + (r/r₀)^m) of a neighbour at distance r: near ones matter more.

    r₀ in Å is the scale, m the exponent, c the rate. Willatt, Musil & Ceriotti, Phys. Chem. Chem.
    Phys. 20, 29661 (2018).
    """

    scale: Positive = 2.0
    exponent: Positive = 6.0
    rate: Positive = 1.0


class Scale(_Frozen):
    """The environment of an atom, out to one cutoff. Eqs. (14)–(16), Musil et al. 2019.

    Attributes
    ----------
    cutoff : float
        r_cut in Å.
    smoothing : float, optional
        Width in Å over which f_cut of Eq. (16) falls to zero. Without it neighbours fade with the
        radial basis functions.
    gaussian_width : float
        Standard deviation in Å of the Gaussians g.
    n_radial, l_max : int
        Number of radial functions R_n, and largest l.
    radial_basis : {"gto", "polynomial"}
    radial_scaling : RadialScaling, optional
    center_weight : float
        Weight of the atom at the centre.
    pseudo_species : int, optional
        Number of combinations of elements whose densities are expanded; all elements by default.
        Needs featomic. See `qualms.features.compression`.
    weight : float
        Of this scale in a sum over several.
    """

    cutoff: Annotated[float, Field(gt=1, le=30)] = 5.0
    smoothing: Positive | None = None
    gaussian_width: Annotated[float, Field(ge=0.01, le=5)] = 0.3
    n_radial: Annotated[int, Field(ge=1, le=100)] = 6
    l_max: Annotated[int, Field(ge=0, le=20)] = 5
    radial_basis: Literal["gto", "polynomial"] = "gto"
    radial_scaling: RadialScaling | None = RadialScaling()
    center_weight: Annotated[float, Field(ge=0, le=100)] = 1.0
    pseudo_species: Annotated[int, Field(ge=1, le=100)] | None = None
    weight: Positive = 1.0


class Compression(_Frozen):
    """Fewer features per scale.

    Attributes
    ----------
    method : {"pca", "pairs"}
        Principal components, of all features or of those of single pairs of species.
    n_features : int
        Number of features to keep; a representation with fewer is left as it is.
    """

    method: Literal["pca", "pairs"] = "pca"
    n_features: Annotated[int, Field(ge=1, le=1_000_000)] = 1000


class Soap(RepresentationSettings):
    """All hyper-parameters of a representation and its kernel. Eqs. (13)–(16), Musil et al. 2019.

    Attributes
    ----------
    scales : tuple of Scale
        The kernel is the weighted sum of the kernels of all scales.
    exponent : float
        ζ, to which the kernel of Eq. (13) is raised.
    normalize : bool
        Whether power spectra are scaled to unit length.
    compression : Compression, "auto" or None
        "auto" compresses to 1000 principal components if there are at least 2500 representatives:
        rounding of float32 would limit the accuracy. For an energy with `smoothing`, which has
        forces, it keeps 32 components for each pair of species, or 64 with 2500 representatives,
        and at least 192 in all; at most 320 of pseudo-species.
    engine : {"auto", "dscribe", "featomic"}
        "auto" is dscribe, the faster one for values, unless `smoothing` or `pseudo_species`
        requires featomic.
    """

    scales: Annotated[tuple[Scale, ...], Field(min_length=1, max_length=16)] = (Scale(),)
    exponent: Annotated[float, Field(ge=1, le=20)] = 2.0
    normalize: bool = True
    compression: Compression | Literal["auto"] | None = "auto"
    engine: Literal["auto", "dscribe", "featomic"] = "auto"

    @property
    def _engines(self) -> list[EngineName]:
        """Engines that compute such features, the faster one for values first."""
        engines: list[EngineName] = ["dscribe", "featomic"]
        if self.engine != "auto":
            engines = [self.engine]
        if any(s.smoothing is not None or s.pseudo_species is not None for s in self.scales):
            engines = [name for name in engines if name == "featomic"]
        if any(s.radial_basis == "polynomial" for s in self.scales):
            engines = [name for name in engines if name == "dscribe"]
        return engines

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if not self._engines:
            raise ValueError(
                "smoothing and pseudo_species need the engine featomic, and radial_basis "
                "polynomial needs dscribe"
            )
        return self

    @property
    def resolved_engine(self) -> EngineName:
        """The engine that "auto" stands for."""
        return self._engines[0]

    @property
    def has_forces(self) -> bool:
        """Whether neighbours fade smoothly at the cutoff, in features by featomic."""
        return all(scale.smoothing is not None for scale in self.scales)

    def with_forces(self) -> Soap:
        """Return hyper-parameters with neighbours that fade smoothly at the cutoff."""
        if "featomic" not in self._engines:
            raise InputError(
                "Forces need features with derivatives, which `engine='featomic'` has with "
                f"`radial_basis='gto'`; the representation has the engine {self.engine!r} and the "
                f"radial basis {self.scales[0].radial_basis!r}.",
                parameter="engine",
            )
        scales = tuple(
            scale.model_copy(update={"smoothing": scale.smoothing or SMOOTHING})
            for scale in self.scales
        )
        return self.model_copy(update={"engine": "featomic", "scales": scales})

    @property
    def is_square(self) -> bool:
        """Whether ζ = 2."""
        return self.exponent == 2

    def n_features(self, species: Sequence[int], problem: Problem) -> tuple[int, int]:
        """Return the numbers of features after and before compression."""
        plain = SoapRepresentation(self, tuple(species))
        widths, compression = plain.widths, plain.choose_compression(problem)
        if compression is None:
            return sum(widths), sum(widths)
        return sum(min(w, compression.n_features) for w in widths), sum(widths)

    def fit(self, species: Sequence[int], problem: Problem, sample: Sample) -> SoapRepresentation:
        """Return the representation, with compression and scale of features by a sample."""
        plain = SoapRepresentation(self, tuple(species))
        compression = plain.choose_compression(problem)
        if compression is None and self.normalize:
            return plain
        X, feature_scale = plain.features(*sample()), 1.0
        if not self.normalize:
            feature_scale = float(np.sqrt(np.mean(np.einsum("ij,ij->i", X, X)))) or 1.0
            X /= np.float32(feature_scale)
        projections: tuple[Projection, ...] = ()
        if compression is not None:
            method, q = compression.method, compression.n_features
            projections = tuple(
                fit_projection(X[:, columns], method, q, [*engine.pair_columns.values()])
                for columns, engine in zip(plain.columns, plain.engines, strict=True)
            )
        return replace(plain, projections=projections, feature_scale=feature_scale)

    def build(
        self,
        species: tuple[int, ...],
        document: RepresentationDocument,
        tensors: Mapping[str, FloatArray],
    ) -> SoapRepresentation:
        """Return a representation from a file; a `ValueError` if its parts do not fit together."""
        if not isinstance(document, SoapDocument):
            raise ValueError("features that are not those of SOAP")
        pairs = zip(range(document.n_projections), document.kernel_errors, strict=True)
        projections = tuple(Projection(tensors[f"projection_{s}"], error) for s, error in pairs)
        raw = tuple(projection.matrix.shape[0] for projection in projections)
        if raw not in ((), widths := SoapRepresentation(self, species).widths):
            raise ValueError(f"projections of {raw} features instead of {widths}")
        return SoapRepresentation(self, species, projections, document.feature_scale).exact()


class SoapDocument(RepresentationDocument):
    """Compression and scale of features."""

    n_projections: int = Field(ge=0, le=16)
    kernel_errors: tuple[float, ...]
    feature_scale: Annotated[float, Field(ge=1e-30, le=1e30)]

    def tensors(self) -> dict[str, TensorSpec]:
        """Return the projection of each scale."""
        return {
            f"projection_{s}": TensorSpec("f", (f"D{s}", f"q{s}"))
            for s in range(self.n_projections)
        }


#: organic suits molecules such as those of QM9, nmr shieldings in molecular crystals (both compared
#: with their neighbours in `python -m benchmarks presets`), inorganic metals, ionic crystals and
#: many elements (`python -m benchmarks alloys`); general is a starting point.
PRESETS: dict[str, Soap] = {
    "organic": Soap(),
    "nmr": Soap(
        scales=(Scale(n_radial=8, l_max=7, radial_scaling=RadialScaling(scale=2.0, exponent=4.0)),)
    ),
    "general": Soap(
        scales=(
            Scale(
                cutoff=5.5, gaussian_width=0.5, n_radial=8, l_max=6,
                radial_scaling=RadialScaling(scale=3.0, exponent=4.0),
            ),
        ),
    ),
    "inorganic": Soap(scales=(Scale(smoothing=0.5, pseudo_species=6),)),
}  # fmt: skip


def choose_preset(species: Sequence[int], kind: str, *, periodic: bool) -> tuple[str, str]:
    """Return the preset for structures of some species and a kind of property, and why.

    Molecules, with few elements, are organic. Of crystals, at least half of the structures, those
    with carbon, hydrogen and other elements of organic molecules alone are organic, or nmr for
    properties of atoms. All others are inorganic.
    """
    name, of_organic_crystals = "inorganic", {1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 34, 35, 53}
    if not periodic and len(species) <= 8:
        name = "organic"
    elif periodic and {1, 6} <= {*species} <= of_organic_crystals:
        name = "nmr" if kind == "atomic" else "organic"
    what = "crystals" if periodic else "molecules"
    if periodic and name != "inorganic":
        what = "molecular crystals"
    return name, f"{what} of {counted(len(species), 'element')}"


def make_soap(representation: str | Soap | dict[str, Any] = "organic", **overrides: Any) -> Soap:
    """Return hyper-parameters from a preset, with some of them changed.

    Parameters
    ----------
    representation : str, Soap or dict
        Name of a preset; hyper-parameters; or a dict with the fields of `Soap`, or of `Scale` for a
        single cutoff, and optionally ``preset``.
    **overrides
        Fields of `Soap`, or of `Scale`, which then apply to every scale.

    Examples
    --------
    >>> make_soap("organic", cutoff=4.5, exponent=3).scales[0].cutoff
    4.5
    """
    if isinstance(representation, dict):
        overrides = {**representation, **overrides}
        representation = overrides.pop("preset", "organic")
    if isinstance(representation, str):
        if representation not in PRESETS:
            choices = (*PRESETS, *PACKAGES)
            raise InputError(
                f"There is no representation {representation!r}; choose one of "
                f"{', '.join(choices)}.{did_you_mean(representation, choices)}",
                parameter="representation",
            )
        representation = PRESETS[representation]
    if not isinstance(representation, Soap):
        raise InputError(
            "A representation is the name of a preset, a dict of hyper-parameters or a `Soap`, not "
            f"of type {type(representation).__name__}.",
            parameter="representation",
        )
    names = sorted(set(Scale.model_fields) | set(Soap.model_fields))
    if unknown := sorted(map(str, set(overrides) - set(names))):
        raise InputError(
            f"A representation has no {', '.join(map(repr, unknown))}; its hyper-parameters are "
            f"{', '.join(names)}.{did_you_mean(unknown[0], names)}",
            parameter="representation",
        )
    document = representation.model_dump()
    document |= {k: v for k, v in overrides.items() if k in Soap.model_fields}
    of_scales = {k: v for k, v in overrides.items() if k in Scale.model_fields}
    if of_scales and isinstance(document["scales"], (list, tuple)):
        scales = [s.model_dump() if isinstance(s, Scale) else s for s in document["scales"]]
        # Anything else is left for the validation.
        document["scales"] = [{**s, **of_scales} if isinstance(s, dict) else s for s in scales]
    return validated(Soap, document, overrides)


# --- engines ---

#: Power spectra of some environments: which of a batch they are (n,), their features that are not
#: zero (c,), and the values of these (n, c).
_Spectra: TypeAlias = tuple[IntArray, IntArray, Float64Array]


@dataclass(frozen=True)
class Engine(ABC):
    """Computes power spectra of one scale, for the species (atomic numbers, increasing)."""

    scale: Scale
    species: tuple[int, ...]

    @property
    @abstractmethod
    def pair_columns(self) -> dict[tuple[int, int], IntArray]:
        """Features of each pair of species."""

    @abstractmethod
    def spectra(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> Iterator[_Spectra]:
        """Yield the power spectra of the chosen atoms of each structure."""

    @property
    def n_features(self) -> int:
        """Length of a power spectrum."""
        return sum(map(len, self.pair_columns.values()))


@lru_cache(maxsize=16)
def make_engine(name: EngineName, scale: Scale, species: tuple[int, ...]) -> Engine:
    """Return an engine; cached, since the set-up takes longer than a small molecule."""
    engine = (DscribeEngine if name == "dscribe" else FeatomicEngine)(scale, species)
    try:
        next(engine.spectra([Atoms([species[0]])], [np.arange(1)]))
    except Exception as error:  # of radial functions, dscribe or featomic has its own
        if type(error).__name__ not in ("ValueError", "FeatomicError") or "radial" not in str(
            error
        ):
            raise
        raise InputError(
            f"{name} cannot compute {counted(scale.n_radial, 'radial function')} with a cutoff of "
            f"{scale.cutoff:g} Å and Gaussians of width {scale.gaussian_width:g} Å ({error}). "
            "Use a smaller `n_radial`, or another `cutoff` or `gaussian_width`.",
            parameter="n_radial",
        ) from error
    return engine


def in_cell(atoms: Atoms, scale: Scale) -> Atoms:
    """Return a structure without a cell, or periodic in all directions with atoms in the cell.

    dscribe loses neighbours of atoms outside the cell and needs one of finite volume; featomic has
    no slabs. Along directions that are not periodic the cell is made so wide that no image
    comes near: dscribe counts atoms up to 3.7 widths of their Gaussians beyond the cutoff.
    """
    if not np.any(atoms.pbc):
        return Atoms(atoms.numbers, atoms.positions) if np.any(atoms.cell.array) else atoms
    vectors = atoms.cell.array[np.asarray(atoms.pbc)]
    positions = atoms.positions - np.floor(atoms.positions @ np.linalg.pinv(vectors)) @ vectors
    normals = scipy.linalg.null_space(vectors).T
    widths = np.ptp(positions @ normals.T, axis=0) + scale.cutoff + 4 * scale.gaussian_width
    cell = np.concatenate([vectors, widths[:, None] * normals])
    return Atoms(atoms.numbers, positions, cell=cell, pbc=True)


class DscribeEngine(Engine):
    """dscribe's SOAP.

    A molecule is described in its own species, which is faster and gives shorter vectors to
    normalise and compress.
    """

    @cached_property
    def pair_columns(self) -> dict[tuple[int, int], IntArray]:
        """Features of each pair of species."""
        soap = _dscribe_soap(self.scale, self.species, False)
        features = np.arange(soap.get_number_of_features())
        pairs = combinations_with_replacement(self.species, 2)
        return {pair: features[soap.get_location(pair)] for pair in pairs}

    def spectra(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> Iterator[_Spectra]:
        """Yield power spectra, those of each set of species and kind of periodicity together."""
        starts = offsets_of([len(c) for c in centers])
        alike: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for i, atoms in enumerate(frames):
            if len(centers[i]):
                present = tuple(np.unique(atoms.numbers).tolist())
                alike.setdefault((present, bool(np.any(atoms.pbc))), []).append(i)
        for (present, periodic), members in alike.items():
            soap = _dscribe_soap(self.scale, present, periodic)
            root = self._root_multiplicity(len(present))
            rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
            values, first = np.empty((len(rows), len(root))), 0
            for i in members:
                last = first + len(centers[i])
                values[first:last] = soap.create(
                    in_cell(frames[i], self.scale), centers=centers[i].tolist()
                )
                first = last
            values *= root
            pairs = combinations_with_replacement(present, 2)
            yield rows, np.concatenate([self.pair_columns[pair] for pair in pairs]), values

    def _root_multiplicity(self, n_species: int) -> Float64Array:
        """Return √2 for each pair αn ≠ α′n′, and 1 for αn = α′n′, in dscribe's order."""
        n = self.scale.n_radial
        same = np.where(np.eye(n, dtype=bool), 1.0, np.sqrt(2.0))[np.triu_indices(n)]
        other = np.full(n * n, np.sqrt(2.0))
        pairs = combinations_with_replacement(range(n_species), 2)
        blocks = [np.tile(same if a == b else other, self.scale.l_max + 1) for a, b in pairs]
        return np.concatenate(blocks)


@lru_cache(maxsize=1024)
def _dscribe_soap(scale: Scale, species: tuple[int, ...], periodic: bool) -> Any:
    from dscribe.descriptors import SOAP

    weighting: dict[str, Any] = {"w0": scale.center_weight}
    if (radial := scale.radial_scaling) is not None:
        weighting |= {"function": "pow", "c": radial.rate, "d": radial.rate}
        weighting |= {"r0": radial.scale, "m": radial.exponent}
    return SOAP(
        species=list(species),
        r_cut=scale.cutoff,
        n_max=scale.n_radial,
        l_max=scale.l_max,
        sigma=scale.gaussian_width,
        rbf=scale.radial_basis,
        weighting=weighting,
        periodic=periodic,
    )


class FeatomicEngine(Engine):
    """Power spectra of featomic's expansion of densities, with a smooth cutoff.

    The densities of elements are mixed to those of pseudo-species, or taken as they are, and
    contracted here. Pairs of species have features for n, n′ and n′, n.
    """

    @cached_property
    def weights(self) -> Float64Array:
        """Weights of elements in pseudo-species: (S, K); each element is its own without these."""
        n_pseudo = self.scale.pseudo_species
        if n_pseudo is None:
            return np.eye(len(self.species))
        return mixing_weights(self.species, n_pseudo)

    @cached_property
    def pair_columns(self) -> dict[tuple[int, int], IntArray]:
        """Features of each pair of elements, or of pseudo-species, which are counted from 0."""
        kinds = self.species if self.scale.pseudo_species is None else range(self.weights.shape[1])
        pairs, size = [*combinations_with_replacement(kinds, 2)], self.n_products
        return {pair: np.arange(i * size, (i + 1) * size) for i, pair in enumerate(pairs)}

    @property
    def n_products(self) -> int:
        """Number of products of two densities: of all n and n′, for each l."""
        return (self.scale.l_max + 1) * self.scale.n_radial**2

    @property
    def radial(self) -> RadialFunctions:
        """Radial functions."""
        return radial_functions(self.scale)

    @cached_property
    def factors(self) -> Float64Array:
        """Factors of products of densities, of one species and of two, for each l."""
        same = np.array([order_factor(order) for order in range(self.scale.l_max + 1)])
        return np.stack([same, np.sqrt(2.0) * same])

    def contract(self, densities: Float64Array) -> Float64Array:
        """Return spectra (n, pairs, l_max + 1, n_radial, n_radial) of pairs of K species.

        Given the densities (n, (l_max + 1)², K, n_radial).
        """
        from qualms.features import pair_core

        n, _, K, n_radial = densities.shape
        spectra = np.empty((n, K * (K + 1) // 2, self.scale.l_max + 1, n_radial, n_radial))
        pair_core.contract(densities, self.factors, spectra)
        return spectra

    def spectra(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> Iterator[_Spectra]:
        """Yield power spectra, those of structures with the same elements together."""
        starts = offsets_of([len(c) for c in centers])
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, atoms in enumerate(frames):
            if len(centers[i]):
                alike.setdefault(tuple(np.unique(atoms.numbers).tolist()), []).append(i)
        for present, members in alike.items():
            orders = [np.argsort(centers[i], kind="stable") for i in members]
            batch = [
                Part(frames[i], find_neighbours(frames[i], self.scale.cutoff), centers[i][order])
                for i, order in zip(members, orders, strict=True)
            ]
            densities = environments_of(self.radial, batch).densities
            rows = np.concatenate([starts[i] + o for i, o in zip(members, orders, strict=True)])
            kinds: Sequence[int] = present
            if self.scale.pseudo_species is not None:
                W = self.weights[np.searchsorted(self.species, present)]
                densities, kinds = np.ascontiguousarray(W.T @ densities), range(W.shape[1])
            columns = [self.pair_columns[pair] for pair in combinations_with_replacement(kinds, 2)]
            yield rows, np.concatenate(columns), self.contract(densities).reshape(len(rows), -1)


def order_factor(order: int) -> float:
    """Return featomic's factor of Σ_m c_nlm c_n′lm in the power spectrum."""
    return float((-1) ** order / np.sqrt(2 * order + 1))


# --- the representation: features of environments and the kernel between them ---

#: How a model gets forces.
REMEDY = "Train with forces, or with a representation by featomic that has `smoothing=0.5`."
#: Representatives from which on rounding of float32 would limit the accuracy of kernel rows, so
#: that features are compressed.
_MANY = 2_500


@dataclass(frozen=True)
class SoapRepresentation(Representation):
    """SOAP hyper-parameters, the species they are for, and how features are compressed.

    Attributes
    ----------
    settings : Soap
    species : tuple of int
        Atomic numbers, increasing.
    projections : tuple of Projection
        One for each scale, or none at all.
    feature_scale : float
        Features that are not normalised are divided by this: keeps powers of them in range.
    dtype : dtype
        Of features.
    """

    settings: Soap
    projections: tuple[Projection, ...] = ()
    feature_scale: float = 1.0
    dtype: Dtype = Soap.dtype

    @property
    def basis_dtype(self) -> Dtype:
        """The leading components of compressed features are multiplied in float64 anyway."""
        return np.dtype(np.float32 if self.projections else np.float64)

    def exact(self) -> SoapRepresentation:
        """Return a copy with features in float64, for predictions."""
        return replace(self, dtype=np.dtype(np.float64))

    @property
    def cutoff(self) -> float:
        """Largest cutoff in Å."""
        return max(scale.cutoff for scale in self.settings.scales)

    @property
    def has_derivatives(self) -> bool:
        """Whether features are those of featomic."""
        return self.settings.resolved_engine == "featomic"

    def check_derivatives(self) -> None:
        """Raise an `InputError` if features are not those of featomic."""
        if not self.has_derivatives:
            raise InputError(
                "Features by dscribe have no derivatives, those by featomic do. " + REMEDY,
                parameter="engine",
            )

    @property
    def stored(self) -> tuple[SoapDocument, dict[str, FloatArray]]:
        """What a model file has of it, beside the hyper-parameters."""
        document = SoapDocument(
            n_projections=len(self.projections),
            kernel_errors=tuple(p.kernel_error for p in self.projections),
            feature_scale=self.feature_scale,
        )
        return document, {f"projection_{s}": p.matrix for s, p in enumerate(self.projections)}

    def describe(self) -> str:
        """Return hyper-parameters and sizes in a few words."""
        soap = self.settings
        cutoffs = " + ".join(f"{scale.cutoff:g}" for scale in soap.scales)
        text = f"SOAP by {soap.resolved_engine}, cutoff {cutoffs} Å, ζ = {soap.exponent:g}"
        numbers = {str(s.pseudo_species) for s in soap.scales if s.pseudo_species is not None}
        text += f", {' + '.join(sorted(numbers))} pseudo-species" if numbers else ""
        if not self.projections:
            return f"{text}, {self.n_features} features"
        raw = sum(p.matrix.shape[0] for p in self.projections)
        error = max(p.kernel_error for p in self.projections)
        standard = "pairs" if soap.has_forces else "pca"
        method = soap.compression.method if isinstance(soap.compression, Compression) else standard
        name = "PCA of pairs of species" if method == "pairs" else "PCA"
        text += f", {raw} → {self.n_features} features by {name}"
        return f"{text} (kernel ± {error:.1e})"

    @property
    def engines(self) -> list[Engine]:
        """The engine of each scale."""
        name = self.settings.resolved_engine
        return [make_engine(name, scale, self.species) for scale in self.settings.scales]

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

    @property
    def columns(self) -> list[slice]:
        """Features of each scale."""
        return [slice(int(a), int(b)) for a, b in pairwise(offsets_of(self.widths))]

    def choose_compression(self, problem: Problem) -> Compression | None:
        """Return the compression of such features for a problem; None if all are kept."""
        soap, is_large = self.settings, problem.n_representatives >= _MANY
        if not isinstance(soap.compression, str):
            compression = soap.compression
        elif problem.derivatives:
            # They are multiplied with all representatives, for every neighbour: fewer features pay.
            # Twice as many pay with thousands of representatives (forces of azobenzene, energies of
            # 3BPA), not with 1000; 672 of pseudo-species have errors smaller by some per cent only.
            n_pairs = max(len(engine.pair_columns) for engine in self.engines)
            # With products of features, 320 instead of 192 lower errors of 3BPA by 2 %.
            q = 192 if problem.products else max((64 if is_large else 32) * n_pairs, 192)
            if any(scale.pseudo_species is not None for scale in soap.scales):
                q = min(q, 320)
            compression = Compression(method="pairs", n_features=q)
        else:
            compression = Compression() if is_large else None
        if compression is None or max(self.widths) <= compression.n_features:
            return None
        return compression

    @property
    def differentiable(self) -> Sequence[DifferentiableFeatures]:
        """Features with derivatives, one for each term of the kernel; they need featomic."""
        from qualms.features.soap_derivatives import ScaleFeatures

        projections = [projection.matrix.astype(np.float64) for projection in self.projections]
        length = None if self.settings.normalize else self.feature_scale
        return [
            ScaleFeatures(cast(FeatomicEngine, engine), projection, length)
            for engine, projection in zip_longest(self.engines, projections)
        ]

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel between environments: Eq. (13) to the power ζ, summed over the scales."""
        # Compressed features are principal components, the largest first: these carry nearly all
        # of x·x′ and are multiplied in float64. Products of power spectra are not negative, but
        # those of compressed ones can be, a little.
        n_exact = 0
        if self.projections:
            n_exact = 512 if self.dtype == np.float64 else 64
        single = PowerKernel(self.settings.exponent, n_exact=n_exact, clip=bool(self.projections))
        if len(self.widths) == 1:
            return single
        weights = np.array([scale.weight for scale in self.settings.scales])
        columns = tuple(self.columns)
        return WeightedSumKernel((single,) * len(columns), tuple(weights / weights.sum()), columns)

    def features(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> FloatArray:
        """Return the features of the chosen atoms of each structure, in order.

        They are an (n_environments, d) array of `dtype`, of unit length for each scale if they are
        normalised.
        """
        n = sum(len(chosen) for chosen in centers)
        features: FloatArray = np.zeros((n, self.n_features), dtype=self.dtype)
        for s, engine in enumerate(self.engines):
            block = features[:, self.columns[s]]
            for rows, columns, values in engine.spectra(frames, centers):
                unit = (
                    normalize_rows(values)
                    if self.settings.normalize
                    else values / self.feature_scale
                )
                scaled = unit.astype(self.dtype, copy=False)
                if self.projections:
                    # Features that are zero are left out: for most molecules, two thirds.
                    block[rows] = scaled @ self.projections[s].matrix[columns]
                else:
                    block[np.ix_(rows, columns)] = scaled
            if self.settings.normalize and self.projections:
                block[:] = normalize_rows(block)
        return features
