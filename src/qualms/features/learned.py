"""Features of pretrained networks, or of any object that computes features of atoms.

A `Network` takes structures to raw features y of atoms. Here they are placed in columns of the
species of the atom, so that only atoms of one species are compared, and scaled to unit length, x.
The kernel is that of Gaussians, less its constant part,

    k(x, x′) = (exp(x·x′/ℓ²) − 1) / (exp(1/ℓ²) − 1),

which is linear for large ℓ. Networks with a vector-Jacobian product have forces.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from numpy.typing import ArrayLike
from pydantic import Field, PrivateAttr

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray, whole_blocks
from qualms.errors import InputError, QualmsWarning, did_you_mean
from qualms.features.base import (
    PACKAGES,
    VOIGT,
    Changes,
    DifferentiableFeatures,
    Dtype,
    Problem,
    Representation,
    RepresentationDocument,
    RepresentationSettings,
    Sample,
    Tape,
    offsets_of,
    validated,
)
from qualms.gp.kernels import ExponentialKernel, Kernel, LinearKernel, normalize_rows

#: Atoms whose derivatives are in memory at once, several small structures or one of any size.
_ATOMS = 128

#: Takes R cotangents (R, n_atoms, d) of features to derivatives by positions (R, n_atoms, 3) and by
#: strain (R, n_structures, 3, 3).
PullBack: TypeAlias = Callable[[Float64Array], tuple[Float64Array, Float64Array]]


@runtime_checkable
class Network(Protocol):
    """What computes raw features of atoms: a pretrained network, or an object of yours.

    It may have more, each of which is optional:

    - ``vjp(frames)``, which returns features and a function, `PullBack`: models have forces;
    - ``potential(frames, forces=False, stress=False)``, which returns energies of its own in
      `qualms.features.base.PotentialValues`: it can be the baseline of a model;
    - ``species``, the atomic numbers that it knows, ``cutoff`` in Å, ``step`` in Å for central
      differences of features, 1e-4 by default, and ``digest``, a text that identifies it, which a
      model file stores and compares.
    """

    @property
    def n_features(self) -> int:
        """Number of features of an atom."""
        ...

    def features(self, frames: Sequence[Atoms], /) -> FloatArray:
        """Return the features of all atoms of all structures, in order: (n_atoms, n_features)."""
        ...


# --- hyper-parameters ---


class Backbone(RepresentationSettings):
    """A pretrained network, or an object, and the kernel of its features.

    Attributes
    ----------
    backbone : {"sevennet", "mace", "metatomic", "object"}
    model : str, optional
        File with the weights, or the name of weights that come with the package (``7net-0``, the
        default, ``7net-0_22may2024``, ``7net-l3i5``), which no file in the working directory
        replaces.
    layer : int or "all"
        Interaction whose scalars are the features, from the first (0) or from the last (-1); or
        those of all interactions, each scaled to unit length.
    length_scale : float, optional
        ℓ of the kernel; a linear kernel if None.
    version, sha256 : str, optional
        Version of the package and digest of the weights, which training fills in.
    """

    dtype: ClassVar[Dtype] = np.dtype(np.float64)

    backbone: Literal["sevennet", "mace", "metatomic", "object"]
    model: Annotated[str, Field(min_length=1, max_length=4000)] | None = None
    layer: Annotated[int, Field(ge=-100, le=100)] | Literal["all"] = "all"
    length_scale: Annotated[float, Field(ge=0.1, le=100)] | None = 1.0
    version: Annotated[str, Field(max_length=100)] | None = None
    sha256: Annotated[str, Field(max_length=200)] | None = None
    #: Given by users alone, never by files: the object; whether weights, which may run code when
    #: they are opened, are theirs.
    _network: Any = PrivateAttr(default=None)
    _trusted: bool = PrivateAttr(default=False)

    def trusting(self, network: object = None) -> Backbone:
        """Return hyper-parameters with the object, or weights that may be opened, of a user."""
        copy = self.model_copy()
        copy._network, copy._trusted = network or self._network, True
        return copy

    def opened(self) -> Any:
        """Return the `Network`; that of a name is loaded once in a process."""
        if self.backbone != "object":
            _check_installed(self.backbone)
            weights = find_weights(
                self.backbone, self.model, sha256=self.sha256, trusted=self._trusted
            )
            from qualms.features.networks import load_network  # imports torch

            return load_network(self.backbone, weights, self.layer)
        if self._network is None:
            raise InputError(
                f"The features of the model are those of an object, {self.model}, which is not in "
                "the model file. Give the object to AtomisticModel.load as `representation`.",
                parameter="representation",
            )
        if self.sha256 not in (None, digest := _digest(self._network)):
            raise InputError(
                f"The digest of the object is {digest!r}, but the model was trained with "
                f"{self.model} with the digest {self.sha256!r}. Give that one as `representation`.",
                parameter="representation",
            )
        return self._network

    def with_weights(self, weights: object) -> Backbone:
        """Return hyper-parameters with the file of the weights, or the object, of a user."""
        is_path = isinstance(weights, str | Path)
        if is_path == (self.backbone == "object"):
            needed = f"the object {self.model}" if is_path else f"a file for {self.backbone}"
            raise InputError(
                f"The model was trained with another kind of network than {weights!r}. Give "
                f"{needed} as `representation`.",
                parameter="representation",
            )
        if isinstance(weights, str | Path):
            # A text may be the name of weights that come with the package; a path never is.
            model = weights if isinstance(weights, str) else str(weights.absolute())
            return self.model_copy(update={"model": model}).trusting()
        return self.trusting(weights)

    @property
    def has_forces(self) -> bool:
        """Whether the network has a vector-Jacobian product."""
        return self.backbone != "object" or hasattr(self._network, "vjp")

    def with_forces(self) -> Backbone:
        """Return these hyper-parameters, or reject a network without a vector-Jacobian product."""
        if not self.has_forces:
            raise InputError(
                f"Forces are derivatives of features, which {self.model} does not have. Give it a "
                "method vjp, as qualms.features.learned.Network describes.",
                parameter="representation",
            )
        return self

    def resolved(self, species: Sequence[int]) -> Backbone:
        """Load the network, reject elements that it does not know, and fill in what identifies it.

        A model that was trained before is trained with the same weights.
        """
        network = self.opened()
        elements = getattr(network, "species", None)
        if elements is not None and (unknown := sorted(set(species) - set(elements))):
            symbols = ", ".join(chemical_symbols[z] for z in unknown)
            raise InputError(
                f"The structures contain {symbols}, which the network {self.backbone} does not "
                "know. Leave these structures out, or use another `representation`.",
                parameter="frames",
            )
        identity = {"version": getattr(network, "version", None), "sha256": _digest(network)}
        return self.model_copy(update=identity)

    @property
    def overhead(self) -> float:
        """Bytes of torch and of the network in a forward pass."""
        return 0.0 if self.backbone == "object" else 1e9

    def n_moving(self, sizes: IntArray, effort: str) -> int | None:
        """Return the largest number for which displaced structures do not have too many atoms."""
        # Environments of displaced structures take some milliseconds each.
        largest = {"fast": 1e5, "default": 5e5, "best": 4e6}[effort]
        most = int(sizes.max(initial=1))
        counts = (k for k in range(most, 1, -1) if 6 * np.sum(sizes * sizes.clip(max=k)) <= largest)
        n = next(counts, 1)
        return None if n == most else n

    def n_features(self, species: Sequence[int], problem: Problem) -> tuple[int, int]:
        """Return the number of features twice: they are not compressed."""
        d = int(self.opened().n_features) * len(species)
        return d, d

    def fit(
        self, species: Sequence[int], problem: Problem, sample: Sample
    ) -> LearnedRepresentation:
        """Return the representation; features of some structures are checked."""
        representation = LearnedRepresentation(self, tuple(species), self.opened().n_features)
        _check_features(representation, *sample())
        return representation

    def build(
        self,
        species: tuple[int, ...],
        document: RepresentationDocument,
        tensors: Mapping[str, FloatArray],
    ) -> LearnedRepresentation:
        """Return a representation from a file; a `ValueError` if its parts do not fit together."""
        if not isinstance(document, LearnedDocument):
            raise ValueError("features that are not those of a network")
        return LearnedRepresentation(self, species, document.n_raw)


class LearnedDocument(RepresentationDocument):
    """Number of features of the network."""

    n_raw: int = Field(ge=1, le=1_000_000)


def _digest(network: object) -> str | None:
    digest = getattr(network, "digest", None)
    return None if digest is None else str(digest)


def _check_installed(backbone: str) -> None:
    package = PACKAGES[backbone]
    try:
        version(package)
    except PackageNotFoundError:
        raise InputError(
            f"The network {backbone} needs the package {package}, which is not installed. Run: "
            f"pip install 'qualms[{backbone}]'",
            parameter="representation",
        ) from None


def make_backbone(network: object) -> Backbone | None:
    """Return hyper-parameters for a name ("sevennet", "mace:path"), a dict, or an object.

    None if it is none of these, but may belong to SOAP.
    """
    if isinstance(network, str):
        name, _, model = network.partition(":")
        network = {"backbone": name, "model": model or None} if name in PACKAGES else network
    if isinstance(network, dict) and "backbone" in network:
        return validated(Backbone, network)
    if isinstance(network, type) or not isinstance(network, Network):
        return None
    model = f"{type(network).__module__}.{type(network).__qualname__}"
    return Backbone(backbone="object", model=model).trusting(network)


# --- the representation ---


@dataclass(frozen=True)
class LearnedRepresentation(Representation):
    """Features of a network with `n_raw` features of each atom, in columns of its species."""

    settings: Backbone
    n_raw: int

    @property
    def serial(self) -> float:
        """Environments from which on processes pay; an object stays in its own."""
        return np.inf if self.settings.backbone == "object" else 10_000

    @cached_property
    def network(self) -> Any:
        """The `Network`."""
        network = self.settings.opened()
        if network.n_features != self.n_raw:
            raise InputError(
                f"The network has {network.n_features} features of each atom, and the model was "
                f"trained with {self.n_raw}. Give the same network as `representation`.",
                parameter="representation",
            )
        return network

    def prepare(self) -> None:
        """Open the network, and compare it with that of the training."""
        installed, trained = getattr(self.network, "version", None), self.settings.version
        if installed != trained:
            warnings.warn(
                f"The model was trained with version {trained} of {self.settings.backbone}, and "
                f"{installed} is installed: features of the same weights may differ.",
                QualmsWarning,
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes load networks themselves.
        return {name: value for name, value in vars(self).items() if name != "network"}

    @property
    def n_features(self) -> int:
        """Number d of features of an environment."""
        return self.n_raw * len(self.species)

    @property
    def kernel(self) -> Kernel:
        """The exponential or linear kernel."""
        if self.settings.length_scale is None:
            return LinearKernel()
        return ExponentialKernel(self.settings.length_scale)

    def features(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> FloatArray:
        """Return the features of the chosen atoms of each structure, in order: (n, d)."""
        y = self.raw_features(frames)
        offsets = offsets_of([len(atoms) for atoms in frames])
        pairs = zip(offsets[:-1], centers, strict=True)
        rows = np.concatenate([np.empty(0, np.intp), *(first + some for first, some in pairs)])
        numbers = np.concatenate([np.empty(0, np.intp), *(atoms.numbers for atoms in frames)])
        return self.placed(normalize_rows(y[rows]), numbers[rows])

    def raw_features(self, frames: Sequence[Atoms]) -> Float64Array:
        """Return the output of the network for all atoms: (n, n_raw)."""
        return self.checked(self.network.features(frames), frames)

    def checked(self, features: ArrayLike, frames: Sequence[Atoms]) -> Float64Array:
        """Return features by a network as an array; reject others than finite ones of its shape."""
        y = np.asarray(features, dtype=np.float64)
        shape = sum(map(len, frames)), self.n_raw
        if y.shape != shape:
            raise InputError(
                f"The network returned features of shape {y.shape}; their shape should be {shape}, "
                "the number of atoms and of features.",
                parameter="representation",
            )
        if not np.all(np.isfinite(y)):
            offsets = offsets_of([len(atoms) for atoms in frames])
            bad = int(np.flatnonzero(~np.isfinite(y).all(axis=1))[0])
            which = frames[int(np.searchsorted(offsets, bad, side="right")) - 1]
            raise InputError(
                f"The network returned features of {which.symbols} that are not finite. Leave this "
                "structure out, or use another `representation`.",
                parameter="representation",
            )
        return y

    def placed(self, values: FloatArray, numbers: IntArray) -> Float64Array:
        """Return features (n, …, n_raw) in the columns of species of atoms (n,): (n, …, d)."""
        shape = *values.shape[:-1], len(self.species), self.n_raw
        placed, places = np.zeros(shape), np.searchsorted(self.species, numbers)
        placed[np.arange(len(values)), ..., places, :] = values
        return placed.reshape(*values.shape[:-1], self.n_features)

    def describe(self) -> str:
        """Return hyper-parameters and sizes in a few words."""
        settings = self.settings
        name = settings.backbone if settings.backbone != "object" else ""
        text = " ".join(filter(None, (name, settings.version, settings.model)))
        if settings.sha256:
            text += f" (SHA-256 {settings.sha256[:12]})"
        width = "linear kernel"
        if settings.length_scale is not None:
            width = f"ℓ = {settings.length_scale:g}"
        return f"{text}, layer {settings.layer}, {width}, {self.n_raw} features of each element"

    @property
    def cutoff(self) -> float:
        """Cutoff of the network in Å, or none."""
        return float(getattr(self.network, "cutoff", np.inf))

    @property
    def has_derivatives(self) -> bool:
        """Whether the network has a vector-Jacobian product."""
        return self.settings.has_forces

    def check_derivatives(self) -> None:
        """Raise an `InputError` if features have no derivatives."""
        self.settings.with_forces()

    @property
    def differentiable(self) -> Sequence[DifferentiableFeatures]:
        """Features with derivatives: one term."""
        return [NetworkFeatures(self)]

    @property
    def stored(self) -> tuple[LearnedDocument, dict[str, FloatArray]]:
        """What a model file has of it, beside the hyper-parameters."""
        return LearnedDocument(n_raw=self.n_raw), {}


def _check_features(
    representation: LearnedRepresentation, frames: Sequence[Atoms], centers: Sequence[IntArray]
) -> None:
    """Reject features that are constant; warn if they differ between two evaluations."""
    few = frames[: int(np.searchsorted(np.cumsum([len(atoms) for atoms in frames]), 200)) + 1]
    # The kernel sees directions of features alone: their lengths may differ and yet be useless.
    x, again = (normalize_rows(representation.raw_features(few)) for _ in range(2))
    numbers, rounding = np.concatenate([atoms.numbers for atoms in few]), 1e-8 * np.abs(x).max()
    spread = max(float(np.ptp(x[numbers == z], axis=0).max()) for z in np.unique(numbers))
    if len(few) > 1 and spread <= rounding:
        raise InputError(
            "All atoms of an element have the same features, so that nothing can be learned. Use "
            "another `representation`, or another layer of the network.",
            parameter="representation",
        )
    if (change := float(np.abs(x - again).max())) > rounding:
        warnings.warn(
            f"The network is not deterministic: features differ by up to {change:.1e} between two "
            "evaluations of the same structures, and so will predictions.",
            QualmsWarning,
            stacklevel=2,
        )


# --- derivatives ---


@dataclass(frozen=True)
class NetworkFeatures:
    """Derivatives of the features of a network: `qualms.features.base.DifferentiableFeatures`."""

    representation: LearnedRepresentation
    concurrent: ClassVar[bool] = False  # networks have threads of their own

    def following(self) -> NetworkFeatures:
        """Return these features: structures before are of no use."""
        return self

    def tapes(
        self,
        frames: Sequence[Atoms],
        gradients: Sequence[str] = (),
        moving: BoolArray | None = None,
    ) -> Iterator[NetworkTape]:
        """Yield all environments, of some structures at a time."""
        offsets = offsets_of([len(atoms) for atoms in frames])
        for first, last in whole_blocks(offsets, _ATOMS):
            atoms = np.arange(offsets[first], offsets[last])
            sizes = np.diff(offsets[first : last + 1])
            yield NetworkTape(
                structures=np.arange(first, last),
                atoms=atoms,
                owners=np.repeat(np.arange(last - first), sizes),
                centers=np.arange(len(atoms)),
                feature_scale=None,
                representation=self.representation,
                frames=frames[first:last],
                gradients=bool(gradients),
                moving=np.ones(len(atoms), dtype=bool) if moving is None else moving[atoms],
            )


@dataclass(frozen=True, eq=False)
class NetworkTape(Tape):
    """Features of all atoms of some structures."""

    representation: LearnedRepresentation
    frames: Sequence[Atoms]
    gradients: bool
    moving: BoolArray  #: (n,): atoms with whose positions changes are needed

    @cached_property
    def _evaluated(self) -> tuple[Float64Array, PullBack | None]:
        """Features of the network (n, n_raw), and its vector-Jacobian product if it is needed."""
        if not self.gradients:
            return self.representation.raw_features(self.frames), None
        y, pull_back = self.representation.network.vjp(self.frames)
        return self.representation.checked(y, self.frames), pull_back

    @cached_property
    def numbers(self) -> IntArray:
        """Atomic numbers of the environments."""
        return np.concatenate([atoms.numbers for atoms in self.frames])

    @cached_property
    def y(self) -> Float64Array:
        """Raw features, in the columns of species: (n, d)."""
        return self.representation.placed(self._evaluated[0], self.numbers)

    @property
    def columns(self) -> IntArray:
        """Features of the elements that there are."""
        places = np.searchsorted(self.representation.species, np.unique(self.numbers))
        n = self.representation.n_raw
        return np.concatenate([np.arange(k * n, (k + 1) * n) for k in places])

    def pull_back(
        self, slopes: Float64Array, columns: IntArray
    ) -> tuple[Float64Array, Float64Array | None]:
        """Return derivatives by positions and strain, for slopes ∂e/∂y (n, R, k)."""
        pull_back, n_raw = self._evaluated[1], self.representation.n_raw
        assert pull_back is not None, "derivatives were requested"
        n, R = slopes.shape[:2]
        starts = np.searchsorted(self.representation.species, self.numbers) * n_raw
        # Slopes by the features of other species are multiplied with zeros.
        first = np.searchsorted(columns, starts)
        b = np.stack([slopes[i, :, k : k + n_raw] for i, k in enumerate(first)], axis=1)
        positions, strain = map(np.asarray, pull_back(b.reshape(R, n, -1)))
        shapes = (R, n, 3), (R, len(self.frames), 3, 3)
        finite = np.all(np.isfinite(positions)) and np.all(np.isfinite(strain))
        if (positions.shape, strain.shape) != shapes or not finite:
            raise InputError(
                f"The network returned derivatives of shapes {positions.shape} and {strain.shape}"
                f"{'' if finite else ', which are not finite'}; they should be finite, of shapes "
                f"{shapes[0]} and {shapes[1]}.",
                parameter="representation",
            )
        virials = strain[:, :, *VOIGT]
        return positions.transpose(1, 2, 0), virials.transpose(1, 2, 0)

    @property
    def _step(self) -> float:
        """Displacement in Å, and strain: for float64, errors of features are below 1e-5."""
        return float(getattr(self.representation.network, "step", 1e-4))

    def push_forward(self) -> Iterator[Changes]:
        """Yield ∂y/∂r of all atoms of a structure with those that move, by central differences."""
        k, species = self.representation.n_raw, self.representation.species
        edges = offsets_of([len(atoms) for atoms in self.frames])
        for atoms, first in zip(self.frames, edges[:-1], strict=True):
            n = len(atoms)
            movable = np.flatnonzero(self.moving[first : first + n])
            step = max(16_384 // (6 * n), 1)  # environments in memory at once
            for start in range(0, len(movable), step):
                moving = movable[start : start + step]
                shifts = np.zeros((len(moving), 3, n, 3))
                for place, axis in product(range(len(moving)), range(3)):
                    shifts[place, axis, moving[place], axis] = self._step
                unstrained = np.zeros((3 * len(moving), 3, 3))
                change = self._differences(atoms, shifts.reshape(-1, n, 3), unstrained)
                change = change.reshape(len(moving), 3, n, k)
                for z in np.unique(atoms.numbers):
                    centers = np.flatnonzero(atoms.numbers == z)
                    i, j = (a.ravel() for a in np.meshgrid(centers, moving, indexing="ij"))
                    values = change[:, :, centers].transpose(2, 0, 1, 3).reshape(-1, 3, k)
                    columns = np.searchsorted(species, z) * k + np.arange(k)
                    yield Changes(i + first, j + first, columns, values, complete=True)

    def push_strain(self) -> Float64Array:
        """Return ∂y/∂ε (n, 6, d) in the order of `VOIGT`."""
        changes = []
        for atoms in self.frames:
            strains = np.zeros((6, 3, 3))
            for strain, a, b in zip(strains, *VOIGT, strict=True):
                strain[a, b] += self._step / 2
                strain[b, a] += self._step / 2
            change = self._differences(atoms, np.zeros((6, 1, 3)), strains)
            changes.append(change.transpose(1, 0, 2))
        return self.representation.placed(np.concatenate(changes), self.numbers)

    def _differences(
        self, atoms: Atoms, shifts: Float64Array, strains: Float64Array
    ) -> Float64Array:
        """Return central differences of y for shifts (p, n, 3) and strains (p, 3, 3): (p, n, …)."""
        frames = []
        for (shift, strain), sign in product(zip(shifts, strains, strict=True), (1, -1)):
            grown = np.eye(3) + sign * strain
            positions, cell = atoms.positions @ grown + sign * shift, atoms.cell.array @ grown
            frames.append(Atoms(atoms.numbers, positions, cell=cell, pbc=atoms.pbc))
        y = self.representation.raw_features(frames).reshape(len(shifts), 2, len(atoms), -1)
        return np.asarray((y[:, 0] - y[:, 1]) / (2 * self._step))


# --- weights: which file is opened, and whether it may be ---

# Opening the weights of most packages runs code in them. They are opened if they come with an
# installed package and have a digest that is listed here, or if a user gives the file. A model file
# names weights, but never a place where they are searched.


class Weights(NamedTuple):
    """A file of weights, with an absolute path, and its SHA-256."""

    path: Path
    sha256: str


#: Weights in the wheels of packages, by backbone and name: the file inside the package and its
#: SHA-256, the same in sevenn 0.11 to 0.13. The first are the default.
SHIPPED: dict[str, dict[str, tuple[str, str]]] = {
    "sevennet": {
        "7net-0": (
            "sevenn/pretrained_potentials/SevenNet_0__11Jul2024/checkpoint_sevennet_0.pth",
            "7052cb42b7b3be42b40b97fa0d21077a48c54b5548948fc4dcf346629f813c36",
        ),
        "7net-0_22may2024": (
            "sevenn/pretrained_potentials/SevenNet_0__22May2024/checkpoint_sevennet_0.pth",
            "5d389fafd512e6ae2830d74d0b66ffc49a55d3832653ff8e7bf7f1343013c1d1",
        ),
        "7net-l3i5": (
            "sevenn/pretrained_potentials/SevenNet_l3i5/checkpoint_l3i5.pth",
            "a7ff190d41efe5b8317a03d20a468e4036a1a3e64e0b14fdbab64ac3f4bfc09d",
        ),
    }
}


def installed_folder(package: str) -> Path | None:
    """Return the folder that a package is installed in; None if Python imports it from elsewhere.

    Elsewhere is anything but site-packages: above all the working directory, where a folder or a
    file with the name of the package may have come with a model.
    """
    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.origin).absolute().parents[1]
    is_site = folder.name in ("site-packages", "dist-packages")
    return folder if is_site and folder != Path.cwd() else None


def shipped_weights(backbone: str, name: str | None = None) -> Weights:
    """Return weights that come with the package of a network; the default ones if None."""
    shipped = SHIPPED[backbone]
    name = name or next(iter(shipped))
    file, sha256 = shipped[name]
    package = file.partition("/")[0]
    folder = installed_folder(package)
    path = None if folder is None else folder / file
    if path is None or not path.is_file():
        raise InputError(
            f"The weights {name!r} come with the package {package}, but there is no {file} in "
            f"site-packages. Install the package again, pip install 'qualms[{backbone}]', or give "
            "the file of the weights.",
            parameter="model",
        )
    weights = Weights(path, _sha256(path))
    if weights.sha256 != sha256:
        raise InputError(
            f"{path} is not the file that comes with {package}: its SHA-256 is "
            f"{weights.sha256[:16]}…, and that of {name!r} is {sha256[:16]}…. It was not opened, "
            "because that may run code. Install the package again.",
            parameter="model",
        )
    return weights


def find_weights(
    backbone: str, model: str | None, *, sha256: str | None = None, trusted: bool
) -> Weights:
    """Return the weights of a network, unless opening them is not allowed.

    Parameters
    ----------
    backbone : str
    model : str, optional
        Name of weights that come with the package, or a file; a file of that name is not looked
        for. The default weights of the package if None.
    sha256 : str, optional
        Digest of the weights that a model was trained with.
    trusted : bool
        Whether a user gave the file, rather than a model file: otherwise only weights that come
        with the package are returned.
    """
    shipped = SHIPPED.get(backbone, {})
    if model in shipped or (model is None and shipped):
        weights = shipped_weights(backbone, model)
    elif not trusted:
        file = "a file" if model is None else repr(Path(model).name)
        raise InputError(
            f"The model was trained with the weights in {file}, which may run code when they are "
            "opened. Give the file, if you trust it, as `representation`.",
            parameter="representation",
        )
    elif model is None:
        raise InputError(
            f"No weights come with {backbone}. Give the file of a model, such as "
            f"`representation='{backbone}:my.model'`.",
            parameter="model",
        )
    else:
        path = Path(model).absolute()
        if not path.is_file():
            names = f", or one of {', '.join(shipped)}" if shipped else ""
            raise InputError(
                f"{model!r} is no file of weights of a {backbone} model. Give the path of a "
                f"file{names}.{did_you_mean(model, shipped)}",
                parameter="model",
            )
        weights = Weights(path, _sha256(path))
    if sha256 is not None and weights.sha256 != sha256:
        raise InputError(
            f"{weights.path} has the SHA-256 {weights.sha256[:16]}…, but the model was trained "
            f"with weights whose SHA-256 is {sha256[:16]}…. Give those as `representation`.",
            parameter="model",
        )
    return weights


def _sha256(path: Path) -> str:
    """Return the digest of a file, computed once as long as the file does not change."""
    try:
        status = path.stat()
        return _digest_of(path, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise InputError(
            f"The weights {path} cannot be read ({error.strerror}).", parameter="model"
        ) from error


@lru_cache(maxsize=16)
def _digest_of(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
