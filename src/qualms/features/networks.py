"""Pretrained networks in torch: SevenNet, MACE and models of metatomic.

Each takes structures to scalars of atoms inside the graph of automatic differentiation, so that
features have derivatives, in float64: predictions do not depend on the batch. Opening weights may
run code in them: `qualms.features.learned` decides which are opened.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from ase import Atoms
from ase.neighborlist import primitive_neighbor_list

from qualms.arrays import Float64Array, whole_blocks
from qualms.errors import InputError
from qualms.features.base import PACKAGES, VOIGT, PotentialValues, offsets_of
from qualms.features.learned import Weights

#: Atoms in a forward pass: intermediate results of more do not fit in the cache.
_ATOMS = 128


class Output(NamedTuple):
    """Features and energies of a batch, with the tensors that they depend on.

    Features (n_atoms, d), energies (n_structures,) in eV, positions (n_atoms, 3), and strains
    (n_structures, 3, 3).
    """

    features: Any
    energies: Any
    positions: Any
    strain: Any


class TorchNetwork(ABC):
    """A `qualms.features.learned.Network` with derivatives and energies of its own."""

    species: tuple[int, ...]
    cutoff: float
    n_features: int
    version: str
    digest: str
    step: float = 1e-4  #: of central differences of features, in Å

    @abstractmethod
    def evaluate(self, frames: Sequence[Atoms]) -> Output:
        """Evaluate some structures in one forward pass."""

    def features(self, frames: Sequence[Atoms]) -> Float64Array:
        """Return the features of all atoms: (n_atoms, n_features)."""
        features = [np.empty((0, self.n_features))]
        for batch in _batches(frames):
            with torch.no_grad(), _quiet():
                features.append(self.evaluate(batch).features.double().numpy())
        return np.concatenate(features)

    def vjp(self, frames: Sequence[Atoms]) -> tuple[Float64Array, Any]:
        """Return features, and what takes cotangents of them back to positions and strain."""
        with _quiet():
            output = self.evaluate(frames)

        def pull_back(cotangents: Float64Array) -> tuple[Float64Array, Float64Array]:
            b = torch.as_tensor(cotangents, dtype=output.features.dtype)
            parts = [self._gradients(output, output.features, cotangent) for cotangent in b]
            positions, strains = zip(*parts, strict=True)
            return np.stack(positions), np.stack(strains)

        return output.features.detach().double().numpy(), pull_back

    def potential(
        self, frames: Sequence[Atoms], *, forces: bool = False, stress: bool = False
    ) -> PotentialValues:
        """Return energies, and perhaps forces and stresses, of the network itself."""
        energies, of_atoms, stresses = [], [], []
        for batch in _batches(frames):
            with _quiet(), contextlib.nullcontext() if forces or stress else torch.no_grad():
                output = self.evaluate(batch)
            if output.energies is None:
                raise InputError(
                    "The network of the representation has no energies, which `baseline='backbone'`"
                    " needs. Choose another baseline, or a network with energies.",
                    parameter="representation",
                )
            energies.append(output.energies.detach().double().numpy())
            if forces or stress:
                ones = torch.ones_like(output.energies)
                slopes, virials = self._gradients(output, output.energies, ones)
                edges = offsets_of([len(atoms) for atoms in batch])
                of_atoms += np.split(-slopes, edges[1:-1])
                volumes = np.array([max(atoms.cell.volume, 1e-30) for atoms in batch])
                stresses.append(virials[:, *VOIGT] / volumes[:, None])
        return PotentialValues(
            np.concatenate(energies),
            of_atoms if forces else None,
            np.concatenate(stresses) if stress else None,
        )

    def _gradients(
        self, output: Output, outputs: Any, cotangents: Any
    ) -> tuple[Float64Array, Float64Array]:
        """Return derivatives by positions (n_atoms, 3) and strain (n_structures, 3, 3)."""
        inputs = [output.positions, output.strain]
        if not outputs.requires_grad:  # no atom has a neighbour
            slopes = [torch.zeros_like(tensor) for tensor in inputs]
        else:
            slopes = torch.autograd.grad(
                outputs, inputs, cotangents, retain_graph=True, materialize_grads=True
            )
        positions, strain = (tensor.double().numpy() for tensor in slopes)
        return positions, strain


def _batches(frames: Sequence[Atoms]) -> Iterator[Sequence[Atoms]]:
    """Group structures for forward passes."""
    for first, last in whole_blocks(offsets_of([len(atoms) for atoms in frames]), _ATOMS):
        yield frames[first:last]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings and printed text of packages."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


# --- weights ---


@lru_cache(maxsize=4)
def load_network(backbone: str, weights: Weights, layer: Layer) -> TorchNetwork:
    """Return the network in a file, opened once in a process."""
    kinds: dict[str, Any] = {"sevennet": SevenNet, "mace": Mace, "metatomic": Metatomic}
    installed = version(PACKAGES[backbone])
    try:
        with _quiet():
            network: TorchNetwork = kinds[backbone](weights.path, layer)
    except InputError:
        raise
    except Exception as error:  # each package has its own
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{PACKAGES[backbone]} {installed} cannot read the weights {weights.path} ({reason}).",
            parameter="model",
        ) from error
    network.version, network.digest = installed, weights.sha256
    return network


#: An interaction, from the first or from the last, or all of them.
Layer = int | Literal["all"]


def _picked(layer: Layer, n: int) -> list[int]:
    """Return which of n interactions a layer is."""
    if layer == "all":
        return [*range(n)]
    if not -n <= layer < n:
        raise InputError(
            f"The network has {n} interactions, and no layer {layer}. Use 'all', or a number from "
            f"{-n} to {n - 1}, as `layer`.",
            parameter="layer",
        )
    return [layer % n]


def _joined(layers: Sequence[Any]) -> Any:
    """Return the features (n, d) of one layer, or those of several, each of unit length."""
    if len(layers) == 1:
        return layers[0]
    return torch.cat([x / (torch.linalg.norm(x, dim=1, keepdim=True) + 1e-12) for x in layers], 1)


def _frozen(model: Any) -> Any:
    model = model.to(torch.float64).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


# --- networks of edges ---


class Graph(NamedTuple):
    """Structures of a batch as one graph, and the tensors that features depend on."""

    numbers: Any  #: (n_atoms,)
    batch: Any  #: (n_atoms,): structure of each atom
    sizes: Any  #: (n_structures,)
    positions: Any  #: (n_atoms, 3): leaf
    strain: Any  #: (n_structures, 3, 3): leaf, zero
    strained: Any  #: positions after the strain
    cell: Any  #: (n_structures, 3, 3): after the strain
    edges: Any  #: (2, n_edges): centre and neighbour
    images: Any  #: (n_edges, 3): the periodic image that the neighbour is in
    shifts: Any  #: (n_edges, 3): its lattice vector
    vectors: Any  #: (n_edges, 3): from centre to neighbour


def make_graph(frames: Sequence[Atoms], cutoff: float) -> Graph:
    """Return the graph of all pairs of atoms within the cutoff (Å)."""
    first, edges, images = 0, [], []
    for atoms in frames:
        cell = atoms.cell.complete().array
        i, j, image = primitive_neighbor_list(  # type: ignore[no-untyped-call]
            "ijS", atoms.pbc, cell, atoms.positions, cutoff
        )
        edges.append(np.stack([i, j]) + first)
        images.append(image)
        first += len(atoms)
    sizes = torch.tensor([len(atoms) for atoms in frames])
    batch = torch.repeat_interleave(torch.arange(len(frames)), sizes)
    positions = torch.tensor(np.concatenate([atoms.positions for atoms in frames]))
    strain = torch.zeros(len(frames), 3, 3, dtype=torch.float64)
    if torch.is_grad_enabled():
        positions.requires_grad_(True)
        strain.requires_grad_(True)
    grown = torch.eye(3, dtype=torch.float64) + strain
    strained = torch.einsum("na,nab->nb", positions, grown[batch])
    cell = torch.tensor(np.stack([atoms.cell.array for atoms in frames])) @ grown
    pairs = torch.tensor(np.concatenate(edges, axis=1), dtype=torch.int64)
    of_images = torch.tensor(np.concatenate(images), dtype=torch.float64)
    shifts = torch.einsum("ea,eab->eb", of_images, cell[batch[pairs[0]]])
    vectors = strained[pairs[1]] - strained[pairs[0]] + shifts
    numbers = torch.tensor(np.concatenate([atoms.numbers for atoms in frames]), dtype=torch.int64)
    return Graph(
        numbers, batch, sizes, positions, strain, strained, cell, pairs, of_images, shifts, vectors
    )


class SevenNet(TorchNetwork):
    """SevenNet: scalars after an interaction, the output of ``{layer}_equivariant_gate``."""

    def __init__(self, path: Path, layer: Layer) -> None:
        import sevenn._keys as keys
        from e3nn.o3 import Irreps
        from sevenn.util import load_checkpoint

        checkpoint = load_checkpoint(str(path))
        self._model, self._keys = _frozen(checkpoint.build_model()), keys
        self._model.set_is_batch_data(True)
        if self._model.modal_map:
            raise InputError(
                f"{path} has several fidelities, of which qualms cannot choose one. Use a SevenNet "
                "model with a single fidelity, such as '7net-0'.",
                parameter="model",
            )
        self.species = tuple(sorted(int(z) for z in self._model.type_map))
        self.cutoff = float(self._model.cutoff)
        self._steps = dict(self._model._modules)
        for name, module in self._steps.items():
            if name.endswith("_convolution"):
                self._steps[name] = _Convolution(module)
        gates = [name for name in self._steps if name.endswith("_equivariant_gate")]
        # Scalars come first.
        self._scalars = {
            gates[k]: _n_scalars(Irreps(self._steps[gates[k]].gate.irreps_out))
            for k in _picked(layer, len(gates))
        }
        self.n_features = sum(self._scalars.values())

    def evaluate(self, frames: Sequence[Atoms]) -> Output:
        """Evaluate some structures in one forward pass."""
        keys, graph = self._keys, make_graph(frames, self.cutoff)
        data = {
            keys.ATOMIC_NUMBERS: graph.numbers,
            keys.EDGE_IDX: graph.edges,
            keys.EDGE_VEC: graph.vectors,
            keys.NUM_ATOMS: graph.sizes,
            keys.BATCH: graph.batch,
        }
        data[keys.NODE_FEATURE] = self._model._atomic_numbers_to_onehot(graph.numbers)
        features = []
        for name, module in self._steps.items():
            if name == "force_output":
                break
            data = module(data)
            if name == "onehot_idx_to_onehot":  # which is float32
                for key in (keys.NODE_FEATURE, keys.NODE_ATTR):
                    data[key] = data[key].double()
            if name in self._scalars:
                features.append(data[keys.NODE_FEATURE][:, : self._scalars[name]])
        energies = data[keys.PRED_TOTAL_ENERGY]
        return Output(_joined(features), energies, graph.positions, graph.strain)


def _n_scalars(irreps: Any) -> int:
    """Return the number of scalars among features."""
    return sum(n for n, irrep in irreps if irrep.l == 0 and irrep.p == 1)


class _Convolution:
    """A convolution of SevenNet, in half the time of its own.

    e3nn multiplies the features of each neighbour with spherical harmonics for each path by itself,
    and keeps all messages. Here, all paths of features of one order are a product with a small
    matrix for each edge, and messages are summed at once.
    """

    def __init__(self, module: Any) -> None:
        from e3nn.o3 import Irreps

        self._module, product = module, module.convolution
        irreps, harmonics, out = map(
            Irreps, (product.irreps_in1, product.irreps_in2, product.irreps_out)
        )
        inputs, outputs, n = irreps.slices(), out.slices(), harmonics.dim
        self._paths: dict[int, list[tuple[int, slice]]] = {}
        matrices: dict[int, list[Any]] = {}
        first = 0
        for path in product.instructions:
            multiplicity, dim = irreps[path.i_in1].mul, irreps[path.i_in1].ir.dim
            columns = slice(first, first + multiplicity)
            weights = torch.zeros(dim * n, product.weight_numel, dtype=torch.float64)
            weights[:, columns] = 1.0
            # Its coefficients, from unit vectors: those of the first of all features.
            x = torch.zeros(dim * n, irreps.dim, dtype=torch.float64)
            where = torch.arange(dim).repeat_interleave(n)
            x[torch.arange(dim * n), inputs[path.i_in1].start + where] = 1.0
            f = torch.eye(n, dtype=torch.float64).repeat(dim, 1)
            start = outputs[path.i_out].start
            coefficients = product(x, f, weights)[:, start : start + out[path.i_out].ir.dim]
            matrices.setdefault(path.i_in1, []).append(coefficients.reshape(dim, n, -1))
            self._paths.setdefault(path.i_in1, []).append((path.i_out, columns))
            first = columns.stop
        self._matrices = {
            block: torch.cat(parts, dim=2).permute(1, 0, 2).reshape(n, -1)
            for block, parts in matrices.items()
        }
        self._sizes = {
            block: [part.shape[2] for part in parts] for block, parts in matrices.items()
        }
        self._inputs = {b: (inputs[b], irreps[b].mul, irreps[b].ir.dim) for b in matrices}
        self._n_out = len(out)

    def __call__(self, data: Any) -> Any:
        module = self._module
        x, f = data[module.key_x], data[module.key_filter]
        weights = module.weight_nn(data[module.key_weight_input])
        centre, neighbour = data[module.key_edge_idx]
        n, n_edges = len(x), len(centre)
        sums: list[Any] = [None] * self._n_out
        for block, matrix in self._matrices.items():
            columns, multiplicity, dim = self._inputs[block]
            x_edges = x[:, columns][neighbour].reshape(n_edges, multiplicity, dim)
            of_edges = (f @ matrix).reshape(n_edges, dim, matrix.shape[1] // dim)
            products = torch.bmm(x_edges, of_edges) if dim > 1 else x_edges * of_edges
            parts = products.split(self._sizes[block], dim=2)
            for part, (place, some) in zip(parts, self._paths[block], strict=True):
                total = torch.zeros(n, *part.shape[1:], dtype=x.dtype)
                total = total.index_add(0, centre, part * weights[:, some, None])
                sums[place] = total.reshape(n, -1)
        data[module.key_x] = torch.cat(sums, dim=1).div(module.denominator)
        return data


class Mace(TorchNetwork):
    """MACE: scalars of the features of atoms after an interaction."""

    def __init__(self, path: Path, layer: Layer) -> None:
        from e3nn.o3 import Irreps

        self._model = _frozen(torch.load(path, map_location="cpu", weights_only=False))
        self.cutoff = float(self._model.r_max)
        self.species = tuple(int(z) for z in self._model.atomic_numbers)
        irreps = [Irreps(product.linear.irreps_out) for product in self._model.products]
        edges = offsets_of([of_layer.dim for of_layer in irreps])
        starts = [int(edges[k]) for k in _picked(layer, len(irreps))]
        sizes = [_n_scalars(irreps[k]) for k in _picked(layer, len(irreps))]
        self._columns = [slice(a, a + n) for a, n in zip(starts, sizes, strict=True)]
        self.n_features = sum(sizes)

    def evaluate(self, frames: Sequence[Atoms]) -> Output:
        """Evaluate some structures in one forward pass."""
        graph = make_graph(frames, self.cutoff)
        places = torch.searchsorted(torch.tensor(self.species), graph.numbers)
        data = {
            "node_attrs": torch.nn.functional.one_hot(places, len(self.species)).double(),
            "positions": graph.strained,
            "edge_index": graph.edges,
            "shifts": graph.shifts,
            "unit_shifts": graph.images,
            "cell": graph.cell.reshape(-1, 3),
            "batch": graph.batch,
            "ptr": torch.cat([torch.zeros(1, dtype=torch.int64), graph.sizes.cumsum(0)]),
        }
        outputs = self._model(data, compute_force=False)
        features = [outputs["node_feats"][:, columns] for columns in self._columns]
        return Output(_joined(features), outputs["energy"], graph.positions, graph.strain)


# --- models of metatomic ---


class Metatomic(TorchNetwork):
    """A model of metatomic: its output ``feature``, in the precision that it was exported with."""

    def __init__(self, path: Path, layer: Layer) -> None:
        from metatomic.torch import ModelEvaluationOptions, ModelOutput, load_atomistic_model

        self._model = load_atomistic_model(str(path))
        capabilities = self._model.capabilities()
        names = [name for name in ("feature", "features") if name in capabilities.outputs]
        if not names:
            raise InputError(
                f"{path} has no features: its outputs are {', '.join(capabilities.outputs)}. "
                "Export the model with the output 'feature'.",
                parameter="model",
            )
        self._name, self._has_energy = names[0], "energy" in capabilities.outputs
        outputs = {self._name: ModelOutput(sample_kind="atom")}
        if self._has_energy:
            outputs["energy"] = ModelOutput(unit="eV", sample_kind="system")
        self._options = ModelEvaluationOptions(length_unit="angstrom", outputs=outputs)
        self._lists = self._model.requested_neighbor_lists()
        self._dtype = getattr(torch, capabilities.dtype)
        self.step = 1e-4 if self._dtype == torch.float64 else 1e-2
        self.species = tuple(sorted(int(z) for z in capabilities.atomic_types))
        cutoffs = [options.engine_cutoff("angstrom") for options in self._lists]
        self.cutoff = float(max(cutoffs, default=0.0))
        pair = Atoms([self.species[0]] * 2, [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        with torch.no_grad():
            self.n_features = int(self.evaluate([pair]).features.shape[1])

    def evaluate(self, frames: Sequence[Atoms]) -> Output:
        """Evaluate some structures in one forward pass."""
        graph = make_graph(frames, self.cutoff)
        outputs = self._model(self._systems(frames, graph), self._options, check_consistency=False)
        tensor = outputs[self._name]
        features = tensor.keys_to_samples(tensor.keys.names).block()
        order = torch.tensor(np.lexsort(features.samples.values[:, [1, 0]].numpy().T))
        energies = None
        if self._has_energy:
            energies = outputs["energy"].block().values.reshape(-1)
        return Output(features.values[order], energies, graph.positions, graph.strain)

    def _systems(self, frames: Sequence[Atoms], graph: Graph) -> list[Any]:
        """Return structures with the neighbour lists that the model requests."""
        from metatensor.torch import Labels, TensorBlock
        from metatomic.torch import System

        names = ["first_atom", "second_atom", "cell_shift_a", "cell_shift_b", "cell_shift_c"]
        systems, edges = [], offsets_of([len(atoms) for atoms in frames])
        centre, neighbour = graph.edges
        distances = torch.linalg.norm(graph.vectors.detach(), dim=1)
        for s, atoms in enumerate(frames):
            rows, pbc = slice(int(edges[s]), int(edges[s + 1])), torch.tensor(atoms.pbc)
            system = System(
                types=graph.numbers[rows].to(torch.int32),
                positions=graph.strained[rows].to(self._dtype),
                cell=(graph.cell[s] * pbc[:, None]).to(self._dtype),
                pbc=pbc,
            )
            for options in self._lists:
                mask = (graph.batch[centre] == s) & (distances <= options.engine_cutoff("angstrom"))
                if not options.full_list:
                    mask &= _once(centre, neighbour, graph.images)
                pairs = torch.stack([centre[mask], neighbour[mask]], dim=1) - int(edges[s])
                samples = torch.cat([pairs, graph.images[mask]], dim=1).to(torch.int32)
                block = TensorBlock(
                    values=graph.vectors[mask].to(self._dtype)[:, :, None],
                    samples=Labels(names, samples),
                    components=[Labels.range("xyz", 3)],
                    properties=Labels.range("distance", 1),
                )
                system.add_neighbor_list(options, block)
            systems.append(system)
        return systems


def _once(centre: Any, neighbour: Any, images: Any) -> Any:
    """Return which edges a list has that has each pair in one direction alone."""
    a, b, c = images.T
    positive = (a > 0) | ((a == 0) & ((b > 0) | ((b == 0) & (c > 0))))
    return (centre < neighbour) | ((centre == neighbour) & positive)
