"""Small molecules, crystals and models that several tests share."""

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.morse import MorsePotential

from qualms import AtomisticModel
from qualms.atomistic import census, passes, training
from qualms.atomistic.census import take_census
from qualms.data import qm9
from qualms.execution import Workers
from qualms.progress import Stages

ENERGY = "atomization_energy"
#: A representation that takes no time, and is good enough.
SMALL = {"cutoff": 4.0, "n_radial": 3, "l_max": 3}


def labelled_molecules(n):
    """Molecules with energies, and with shifts of atoms that depend on their neighbours."""
    molecules = qm9(n=n)
    for atoms in molecules:
        near = np.exp(-atoms.get_all_distances())
        atoms.arrays["shift"] = near @ atoms.numbers - near.sum(axis=1) * atoms.numbers
    return molecules


def labelled_crystals(n, seed=0):
    """Rock salt of various volumes, its atoms displaced, with the energy of a pair potential."""
    rng = np.random.default_rng(seed)
    crystals = [bulk("NaCl", "rocksalt", a=a, cubic=False) for a in rng.uniform(5.0, 6.2, n)]
    for atoms in crystals:
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
        energy = 0.0
        for shift in np.ndindex(5, 5, 5):
            images = atoms.positions + (np.array(shift) - 2) @ atoms.cell.array
            r = np.linalg.norm(atoms.positions[:, None] - images, axis=2)
            energy += np.exp(-r[r > 0]).sum()
        atoms.info["energy"] = energy - 3.0 * len(atoms)
    return crystals


def organic_crystals(n, seed=0, shielding=None):
    """Boxes with a molecule each, atoms displaced; the shielding counts neighbours, or is given."""
    rng = np.random.default_rng(seed)
    frames = []
    molecules = [atoms for atoms in qm9(n=2 * n) if 9 not in atoms.numbers]
    for atoms in molecules[:n]:
        atoms = Atoms(atoms.numbers, atoms.positions, cell=[12.0] * 3, pbc=True)
        atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
        near = np.exp(-((atoms.get_all_distances() / 2) ** 2)) @ (atoms.numbers - 1.0)
        atoms.arrays["CS_total"] = 30.0 - near if shielding is None else shielding + 0 * near
        frames.append(atoms)
    return frames


def labelled_by_emt(atoms):
    """The structure with energy, stress (``virtual``) and forces (``force``) of EMT."""
    atoms.calc = EMT()
    atoms.info["energy"] = atoms.get_potential_energy()
    atoms.info["virtual"] = atoms.get_stress()
    atoms.arrays["force"] = atoms.get_forces()
    atoms.calc = None
    return atoms


def labelled_dimers(n, seed=0):
    """Water and OH, displaced, with energies and forces of a Morse potential."""
    rng = np.random.default_rng(seed)
    r = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0], [2.8, 0, 0], [3.2, 0.8, 0]])
    frames = []
    for _ in range(n):
        atoms = Atoms("OHHOH", r + 0.08 * rng.normal(size=r.shape))
        atoms.calc = MorsePotential(r0=1.4, epsilon=0.5, rho0=3.0)
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        atoms.calc = None
        atoms.info["energy"], atoms.arrays["forces"] = energy, forces
        frames.append(atoms)
    return frames


def make_model(target=ENERGY, kind="extensive", **settings):
    """A small model on one core."""
    small = {"representation": SMALL, "n_representatives": 100, "threads": 1}
    return AtomisticModel(target, kind, **(small | settings))


#: A smooth representation, whose features have derivatives.
SMOOTH = {"cutoff": 3.8, "n_radial": 3, "l_max": 2, "smoothing": 0.8}


def labelled_alloys(n=36, seed=0):
    """Small cells of Cu and Al, with energies, forces and stresses by EMT."""
    rng = np.random.default_rng(seed)
    frames = []
    for i in range(n):
        atoms = bulk("Cu", cubic=True)
        atoms.symbols[: 1 + i % 2] = "Al"
        atoms.set_cell(atoms.cell.array * (1 + 0.02 * rng.normal()), scale_atoms=True)
        atoms.positions += rng.normal(scale=0.08, size=(4, 3))
        frames.append(labelled_by_emt(atoms))
    return frames


def make_force_model(**settings):
    """A small model of energies and forces of alloys."""
    given = {"representation": SMOOTH, "n_representatives": 60, "n_members": 8, "forces": "force"}
    return make_model("energy", **(given | settings))


def problem_of(frames, settings, groups=None):
    """The training problem of some structures."""
    return training.resolve(settings, take_census(frames, settings, groups), Workers(), 1)


def membership(frames, model, groups=None):
    """How often each row of the target is in each member: (N, S), in the order of the frames."""
    problem = problem_of(frames, model.settings, groups)
    structure, counts = problem.data.quantities["energy"].structure, problem.draw.counts
    order = np.argsort(problem.data.source[structure], kind="stable")
    return (counts if problem.draws_atoms else counts[structure])[order]


def rows_of(problem):
    """Kernel rows of a problem."""
    workers, stages = Workers(), Stages()
    features = passes.fit_features(problem, stages)
    points, whitening, cache = passes.pick_representatives(problem, features, workers, stages)
    functions = points
    if problem.settings.basis == "labels":
        functions, whitening = passes.combine_labels(problem, features, workers, stages)
    return passes.sum_rows(problem, features, points, functions, whitening, cache, workers, stages)


def set_constant(monkeypatch, name, value):
    """Set a constant of the training in each module that has it."""
    for module in (census, passes, training):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)


def copies(frames):
    """Structures that a test may change."""
    return [atoms.copy() for atoms in frames]


def reference_values(frames, key=ENERGY):
    return np.array([atoms.info[key] for atoms in frames])


def same_predictions(a, b, frames):
    """Two models predict the same, to a millionth of σ."""
    first, second = a.predict(frames), b.predict(frames)
    pairs = [
        (first.members, second.members),
        (first.uncalibrated.members, second.uncalibrated.members),
    ]
    if a.settings.keep_pp:
        pairs.append((a.predict_pp(frames), b.predict_pp(frames)))
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * first.std.min())
    np.testing.assert_array_equal(a.predict(frames).extrapolates, b.predict(frames).extrapolates)
