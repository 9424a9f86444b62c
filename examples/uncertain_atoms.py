"""Which atoms make a molecule uncertain: its atoms coloured by how strange they are.

A model of the energies of molecules is a sum over atoms, and so is what each of its members says.
The model sees molecules of QM9, all at rest. One bond of a new molecule is stretched, which none of
the training molecules has: the error bar of its energy grows.

Error bars of what single atoms contribute hardly change. How an energy is divided between carbon
and its hydrogens is a matter of taste, as far as data tell, and members differ in taste: the model
is sure of the sum, and not of its parts. The novelty of atoms, how unlike those that the model
knows they are, does not depend on that: the atoms at the stretched bond stand out.

Run with `python examples/uncertain_atoms.py [PICTURE]`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from ase import Atoms
from ase.data import covalent_radii

from qualms import AtomisticModel, Prediction
from qualms.atomistic.novelty import atom_novelty
from qualms.data import qm9

TARGET = "atomization_energy"


def main() -> None:
    """Train, stretch bonds, and look for them."""
    molecules, contributions, novelty, energies = run()
    for i, atoms in enumerate(molecules):
        strangest = int(novelty[i].argmax())
        print(
            f"{atoms.info['what']:26}{energies.mean[i]:8.2f} ± {energies.std[i]:.2f} eV; "
            f"strangest: {atoms.symbols[strangest]}{strangest}, novelty "
            f"{novelty[i][strangest]:.2f}, ± {contributions[i].std[strangest]:.3f} eV of its own"
        )
    if len(sys.argv) > 1:
        draw(molecules, contributions, novelty, sys.argv[1])


def run(
    n_train: int = 600, n_shown: int = 2
) -> tuple[list[Atoms], list[Prediction], list[np.ndarray], Prediction]:
    """Return molecules at rest and stretched, contributions, novelty of atoms, and energies."""
    molecules = qm9(n=n_train + 100)
    model = AtomisticModel(TARGET, n_representatives=400, units="eV", threads=1)
    model.fit(molecules[:n_train])
    shown = []
    for atoms in [atoms for atoms in molecules[n_train:] if len(atoms) > 15][:n_shown]:
        atoms.info["what"] = f"{atoms.get_chemical_formula()}, at rest"
        shown += [atoms, stretched(atoms)]
    return shown, model.predict_atoms(shown), atom_novelty(model, shown), model.predict(shown)


def stretched(atoms: Atoms, by: float = 0.4) -> Atoms:
    """Return a molecule whose last hydrogen atom is so many Å further from its neighbour."""
    far = atoms.copy()
    hydrogen = int(np.flatnonzero(atoms.numbers == 1)[-1])
    distances = atoms.get_distances(hydrogen, range(len(atoms)))
    neighbour = int(np.argsort(distances)[1])
    far.set_distance(neighbour, hydrogen, distances[neighbour] + by, fix=0)
    far.info["what"] = f"{atoms.get_chemical_formula()}, {atoms.symbols[neighbour]}–H + {by} Å"
    far.info["bond"] = (neighbour, hydrogen)
    return far


def draw(
    molecules: Sequence[Atoms],
    contributions: Sequence[Prediction],
    novelty: Sequence[np.ndarray],
    path: str,
) -> None:
    """Draw the molecules in their planes, atoms coloured by error bars and by novelty."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * len(molecules) + 1, 4.4), layout="constrained")
    rows = figure.subplots(2, len(molecules), squeeze=False)
    labels = ("σ of the contribution, eV", "novelty, relative")
    shown = ([prediction.std for prediction in contributions], novelty)
    for axes, values, label in zip(rows, shown, labels, strict=True):
        colors = ScalarMappable(Normalize(0, max(v.max() for v in values)), "viridis")
        for ax, atoms, value in zip(axes, molecules, values, strict=True):
            _draw_molecule(ax, atoms, colors.to_rgba(value))
        figure.colorbar(colors, ax=axes, label=label)
    for ax, atoms in zip(rows[0], molecules, strict=True):
        ax.set_title(atoms.info["what"], fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_molecule(ax, atoms: Atoms, colors: np.ndarray) -> None:
    """Draw circles and bonds, seen along the axis in which the molecule is thinnest."""
    x = atoms.positions - atoms.positions.mean(axis=0)
    x = x @ np.linalg.svd(x, full_matrices=False)[2].T
    radii = covalent_radii[atoms.numbers]
    distances = atoms.get_all_distances()
    for i, j in np.argwhere(distances < 1.2 * (radii[:, None] + radii)):
        if i < j:
            ax.plot(*x[[i, j], :2].T, color="0.6", lw=2, zorder=-10)
    for i in np.argsort(x[:, 2]):  # those in front last
        ax.add_patch(_circle(x[i, :2], 0.6 * radii[i], colors[i], zorder=x[i, 2]))
        if atoms.numbers[i] != 1:
            ax.annotate(
                atoms.symbols[i], x[i, :2], color="w", ha="center", va="center", fontsize=8,
                zorder=x[i, 2] + 0.01,
            )  # fmt: skip
    ax.set_aspect("equal")
    ax.margins(0.15)
    ax.axis("off")


def _circle(center: np.ndarray, radius: float, color: np.ndarray, zorder: float):
    from matplotlib.patches import Circle

    return Circle(center, radius, facecolor=color, edgecolor="k", lw=0.5, zorder=zorder)


if __name__ == "__main__":
    main()
