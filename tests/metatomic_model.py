"""A model of metatomic, whose features are sums of Gaussians of distances, from a half list.

Run with a path, this script writes it.
"""

import sys
from typing import Dict, List, Optional  # noqa: UP035 — TorchScript

import torch
from metatensor.torch import Labels, TensorBlock, TensorMap
from metatomic.torch import (
    AtomisticModel,
    ModelCapabilities,
    ModelMetadata,
    ModelOutput,
    NeighborListOptions,
    System,
)


class Densities(torch.nn.Module):
    """Sums over neighbours of Gaussians of distances; the energy is the sum of them all."""

    def __init__(self, options: NeighborListOptions):
        super().__init__()
        self.options = options
        self.widths = torch.tensor([0.8, 1.2, 1.7, 2.3], dtype=torch.float64)

    def requested_neighbor_lists(self) -> List[NeighborListOptions]:  # noqa: UP006
        return [self.options]

    def forward(
        self,
        systems: List[System],  # noqa: UP006
        outputs: Dict[str, ModelOutput],  # noqa: UP006
        selected_atoms: Optional[Labels] = None,  # noqa: UP045
    ) -> Dict[str, TensorMap]:  # noqa: UP006
        features: List[torch.Tensor] = []  # noqa: UP006
        samples: List[torch.Tensor] = []  # noqa: UP006
        energies: List[torch.Tensor] = []  # noqa: UP006
        for s, system in enumerate(systems):
            pairs = system.get_neighbor_list(self.options)
            i, j = pairs.samples.column("first_atom"), pairs.samples.column("second_atom")
            r = torch.linalg.norm(pairs.values[:, :, 0], dim=1)
            fade = 0.5 * (1 + torch.cos(torch.pi * r / 6.0))
            g = fade[:, None] * torch.exp(-((r[:, None] / self.widths) ** 2))
            types = system.types.to(torch.float64)[:, None]
            own = torch.zeros(len(system), 4, dtype=torch.float64)
            own = own.index_add(0, i.to(torch.int64), g * types[j.to(torch.int64)])
            own = own.index_add(0, j.to(torch.int64), g * types[i.to(torch.int64)])
            features.append(own + 0.1 * own**2)
            energies.append(own.sum().reshape(1))
            atoms = torch.arange(len(system))
            samples.append(torch.stack([torch.full_like(atoms, s), atoms], dim=1))
        key = Labels(["_"], torch.tensor([[0]]))
        of_atoms = TensorBlock(
            values=torch.cat(features),
            samples=Labels(["system", "atom"], torch.cat(samples)),
            components=torch.jit.annotate(List[Labels], []),  # noqa: UP006
            properties=Labels(["feature"], torch.arange(4).reshape(-1, 1)),
        )
        of_systems = TensorBlock(
            values=torch.cat(energies).reshape(-1, 1),
            samples=Labels(["system"], torch.arange(len(systems)).reshape(-1, 1)),
            components=torch.jit.annotate(List[Labels], []),  # noqa: UP006
            properties=Labels(["energy"], torch.tensor([[0]])),
        )
        results: Dict[str, TensorMap] = {}  # noqa: UP006
        if "feature" in outputs:
            results["feature"] = TensorMap(key, [of_atoms])
        if "energy" in outputs:
            results["energy"] = TensorMap(key, [of_systems])
        return results


if __name__ == "__main__":
    outputs = {"feature": ModelOutput(sample_kind="atom")}
    outputs["energy"] = ModelOutput(unit="eV", sample_kind="system")
    capabilities = ModelCapabilities(
        outputs=outputs,
        atomic_types=[1, 8],
        interaction_range=6.0,
        length_unit="angstrom",
        supported_devices=["cpu"],
        dtype="float64",
    )
    module = Densities(NeighborListOptions(cutoff=6.0, full_list=False, strict=True)).eval()
    AtomisticModel(module, ModelMetadata(), capabilities).save(sys.argv[1])
