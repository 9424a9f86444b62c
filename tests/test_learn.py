"""The active-learning loop: what it does, and that it survives whatever happens to it."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from atomistic_fixtures import SMOOTH, labelled_alloys
from checks import rejects

from qualms import AtomisticModel, QualmsWarning
from qualms.active import MissingLabelsError, learn, loop, make_learn_settings
from qualms.active.loop import AUDIT, ID, KIND, REASON, ROUND, SELECTED
from qualms.atomistic.labels import find_label, voigt
from qualms.atomistic.structures import fingerprints, read_frames

MODEL = {
    "target": "energy",
    "forces": "force",
    "representation": SMOOTH,
    "n_representatives": 60,
    "n_members": 8,
    "calibration": "student",
    "threads": 1,
}
EXPLORE = {"walkers": 2, "temperatures": [300, 900], "time": 0.06, "timestep": 2, "interval": 2}


class Counting(Calculator):
    """EMT that writes a line for each calculation, and fails for some structures."""

    implemented_properties = ["energy", "forces", "stress"]  # noqa: RUF012

    def __init__(self, log="", fails=0, sleep=0.0, factor=1.0, shift=0.0):
        super().__init__()
        self.log, self.fails, self.sleep, self.factor = log, fails, sleep, factor
        self.shift = shift

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        time.sleep(self.sleep)
        other = EMT()  # a new one: its rounding depends on the structures before
        other.calculate(atoms.copy(), properties, all_changes)
        self.results = {name: other.results[name] for name in self.implemented_properties}
        for name in ("energy", "forces"):
            self.results[name] = self.factor * self.results[name]
        digits = int(1e6 * abs(self.results["energy"]))
        self.results["energy"] += self.shift * (digits % 2)
        if self.fails and digits % self.fails == 0:
            kind = digits // self.fails % 3
            if kind == 0:
                raise RuntimeError("did not converge")
            if kind == 1 and multiprocessing.parent_process() is not None:
                os._exit(1)
            self.results["forces"] = self.results["forces"] * (np.nan if kind == 1 else 1e6)
        if self.log:
            with open(self.log, "a") as file:
                file.write(fingerprints([atoms])[0].hex() + "\n")


def made_by_a_user(calculator, seed, n=20):
    """Structures that a user makes."""
    rng = np.random.default_rng(seed)
    assert "forces" in calculator.implemented_properties
    for atoms in labelled_alloys(n, seed=100 + seed):
        atoms.positions += 0.02 * rng.normal(size=atoms.positions.shape)
        yield atoms


def made_of_nothing(calculator, seed):
    """A mistake of a user."""
    return 7


def made_with_a_mistake(calculator, seed, n=1):
    """Another one."""
    yield from made_by_a_user(calculator, seed, n)
    raise RuntimeError("a mistake")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let calculators of this file be imported by their path, in other processes too."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def start(tmp_path, alloys):
    """A file with 16 labelled alloys."""
    path = tmp_path / "start.xyz"
    ase.io.write(path, alloys[:16], format="extxyz")
    return path


@pytest.fixture
def entries(start, tmp_path):
    """Entries of a configuration of a loop of a few seconds."""
    return {
        "start": str(start),
        "directory": str(tmp_path / "run"),
        "target_error": 1e-3,
        "budget": 12,
        "batch": 6,
        "audit": 0.34,
        "model": MODEL,
        "explore": EXPLORE,
        "label": {"calculator": "test_learn:Counting"},
    }


def with_(entries, **changes):
    """Entries with changes, also within sections."""
    new = dict(entries)
    for name, value in changes.items():
        is_section = isinstance(value, dict) and isinstance(entries.get(name), dict)
        new[name] = {**entries[name], **value} if is_section else value
    return new


def run(entries, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QualmsWarning)
        return list(learn(make_learn_settings(entries), **options))


def data(entries, name="data.xyz"):
    path = Path(entries["directory"]) / name
    return read_frames(path) if path.exists() and path.stat().st_size else []


def events(entries, kind):
    lines = (Path(entries["directory"]) / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def texts(entries):
    """Labels of a run, as they are in the file, by their identity."""
    return {
        atoms.info[ID]: (atoms.positions.tobytes(), atoms.get_forces().tobytes())
        if "forces" in (atoms.calc.results if atoms.calc else {})
        else (atoms.positions.tobytes(), atoms.arrays["force"].tobytes())
        for atoms in data(entries)
    }


# --- what it does ---


def test_the_budget_is_used_and_models_improve(entries, alloys):
    rounds = run(entries)
    assert [r.number for r in rounds] == [0, 1, 2]
    assert "budget" in rounds[-1].end
    assert [r.record["labels"] for r in rounds] == [16, 22, 28]
    bought = rounds[-1].bought
    # A third of each batch was drawn at random; labels are those of EMT, and none is twice.
    for number in (0, 1):
        kinds = [a.info[KIND] for a in bought if a.info[ROUND] == number]
        assert kinds == [AUDIT] * 3 + [SELECTED] * 3
    assert len(set(fingerprints(bought))) == 12
    for atoms in bought[:3]:
        copy = atoms.copy()
        copy.calc = EMT()
        np.testing.assert_allclose(atoms.arrays["force"], copy.get_forces(), atol=1e-10)
    # What was predicted before the label was known is what the model of the round predicts.
    first = bought[0].copy()
    predicted = rounds[0].model.predict(first, forces=True)
    np.testing.assert_allclose(first.arrays["learn_forces"], predicted.forces.mean, atol=1e-8)
    np.testing.assert_allclose(first.arrays["learn_forces_std"], predicted.forces.std, atol=1e-8)
    # The last model has learned from all of it, and from what walkers explored.
    again = AtomisticModel.load(Path(entries["directory"]) / "round-002" / "model.safetensors")
    assert again.record.n_structures == 28
    record = rounds[-1].record
    assert record["bound"] > record["estimate"] > 0
    assert record["picoseconds"] == pytest.approx(2 * 0.06)


def test_it_ends_when_the_bound_is_below_the_target(entries):
    entries = with_(entries, target_error=0.2, budget=60)
    last = run(entries)[-1]
    assert last.record["bound"] <= 0.2
    assert not last.stops
    assert last.record["bought"] < 60
    # The same command says so again, and a smaller target goes on, with what is there.
    n = len(data(entries))
    (again,) = run(entries)
    assert (again.end, again.number, len(data(entries))) == (last.end, last.number, n)
    further = run(with_(entries, target_error=1e-3, budget=n + 3))
    assert "budget" in further[-1].end
    assert len(data(entries)) == n + 3
    (changed,) = events(entries, "settings")
    assert any("target_error from 0.2 to 0.001" in text for text in changed["changes"])


def test_a_pool_is_used_up(entries, tmp_path):
    pool = tmp_path / "pool.xyz"
    others = labelled_alloys(9, seed=7)
    clashing = others[0].copy()
    clashing.positions[1] = clashing.positions[0] + 0.3
    ase.io.write(pool, [*others, ase.Atoms("Au", cell=[4.0] * 3, pbc=True), clashing])
    entries = with_(entries, budget=50, explore={"pool": str(pool)}, choose={"strategy": "target"})
    rounds = run(entries)
    assert "nothing left" in rounds[-1].end
    assert sorted(fingerprints(data(entries))) == sorted(fingerprints(others))
    assert any("Au" in a.info["learn_beyond"] for a in rounds[0].stops)


def test_structures_of_a_user(entries):
    explore = {"callable": "test_learn:made_by_a_user", "arguments": {"n": 8}}
    rounds = run(with_(entries, budget=4, batch=4, explore=explore))
    assert len(rounds) == 2
    assert rounds[0].record["explored"] == 8


@pytest.mark.parametrize("key", ["stress", "virtual"])
def test_stress_and_pressure(entries, start, key):
    frames = read_frames(start)
    for atoms in frames:
        xx, yy, zz, yz, xz, xy = atoms.info.pop("virtual")
        atoms.info[key] = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    ase.io.write(start, frames, format="extxyz")
    explore = {**EXPLORE, "pressure": 0.0, "time": 0.02}
    model = {**MODEL, "stress": key}
    entries = with_(entries, budget=3, batch=3, explore=explore, model=model)
    run(entries)
    atoms = data(entries)[0]
    copy = atoms.copy()
    copy.calc = EMT()
    stress = voigt(*find_label(atoms, key, False))
    np.testing.assert_allclose(stress, copy.get_stress(), atol=1e-8)  # digits of the file


def test_if_nothing_can_be_selected_audits_are_labelled(entries):
    with pytest.warns(QualmsWarning, match="audits"):
        found = next(learn(make_learn_settings(with_(entries, choose={"max_novelty": 1e-6}))))
    assert {atoms.info[KIND] for atoms in found.bought} == {AUDIT}


def test_random_labels_are_all_audits(entries):
    run(with_(entries, choose={"strategy": "random"}))
    assert {atoms.info[KIND] for atoms in data(entries)} == {AUDIT}


@pytest.mark.parametrize("how", ["processes", "executor"])
def test_labels_by_workers(entries, how, tmp_path):
    alone = with_(entries, directory=str(tmp_path / "alone"), budget=6)
    run(alone)
    entries = with_(entries, budget=6)
    if how == "processes":
        run(with_(entries, label={"workers": 2}))
    else:
        with ThreadPoolExecutor(3) as executor:
            run(entries, executor=executor)
    assert texts(entries) == texts(alone)


# --- failures ---


def test_failed_calculations_are_listed(entries, tmp_path):
    log = tmp_path / "log"
    label = {"arguments": {"fails": 3, "log": str(log)}, "compare": 0}
    entries = with_(entries, label=label, budget=18)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", QualmsWarning)
        last = list(learn(make_learn_settings(entries)))[-1]
    n_failed = len(last.failed)
    assert 2 <= n_failed <= 14
    assert len(last.bought) == 18 - n_failed  # they count
    assert {a.info[ID] for a in last.failed}.isdisjoint(a.info[ID] for a in last.bought)
    reasons = " ".join(str(a.info[REASON]) for a in last.failed)
    assert "converge" in reasons or "finite" in reasons or "max_force" in reasons
    assert sum("failed" in str(w.message) for w in caught) == n_failed
    # They are not tried again, in this run or another.
    before = log.read_text()
    run(entries)
    assert log.read_text() == before
    assert all(np.isfinite(a.arrays["force"]).all() for a in data(entries))


def test_a_worker_that_ends_is_the_failure_of_one_calculation(entries):
    label = {"arguments": {"fails": 2}, "compare": 0, "workers": 2}
    last = run(with_(entries, label=label))[-1]
    reasons = [str(atoms.info[REASON]) for atoms in last.failed]
    assert len(last.bought) + len(last.failed) == 12
    assert 0 < sum("process" in reason for reason in reasons) < len(reasons)
    attempts = [entry["id"] for entry in events(with_(entries), "computing")]
    assert max(attempts.count(identity) for identity in attempts) <= 2


def test_files_that_others_have_changed(entries):
    run(with_(entries, budget=3, batch=3))
    folder = Path(entries["directory"])
    for name in ("data.xyz", "events.jsonl"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(b"x" + content[1:])
        with rejects("directory"):
            run(with_(entries, budget=3, batch=3))
        (folder / name).write_bytes(content)


def test_nonsense_is_not_learned(entries):
    """Energies that are far from all that the model can mean."""
    label = {"arguments": {"shift": -1e3}, "compare": 0}
    last = run(with_(entries, label=label))[-1]
    assert 2 <= len(last.failed) <= 10
    assert all("max_energy" in str(a.info[REASON]) for a in last.failed)
    assert all(abs(find_label(a, "energy", False)[0]) < 100 for a in last.bought)


def test_if_all_calculations_fail_the_loop_stops(entries):
    entries = with_(entries, label={"arguments": {"shift": 0.0, "fails": 1}, "compare": 0})
    with rejects("label"):
        run(entries)
    assert len(data(entries, "failed.xyz")) == 6
    # When the cause is gone, the same command goes on.
    repaired = with_(entries, label={"arguments": {}})
    last = run(repaired)[-1]
    assert (len(last.bought), len(last.failed)) == (6, 6)


def test_structures_without_labels_are_left_out(entries, start, tmp_path):
    frames = read_frames(start)
    frames[3].arrays["force"][0, 0] = np.nan
    ase.io.write(tmp_path / "some.xyz", frames, format="extxyz")
    settings = make_learn_settings(with_(entries, start=str(tmp_path / "some.xyz"), budget=1))
    with pytest.warns(QualmsWarning, match="left out"):
        assert next(learn(settings)).record["labels"] == 15


def test_a_calculation_that_ends_its_process_is_not_started_for_ever(entries):
    entries = with_(entries, budget=3, batch=3)
    again = learn(make_learn_settings(entries))
    folder = Path(entries["directory"])
    run(with_(entries, label={"arguments": {"sleep": 0.0}}))
    # As if the process had ended during the second label, five times.
    lines = (folder / "events.jsonl").read_text().splitlines()
    attempt = next(line for line in lines if '"computing"' in line and '"r0s1"' in line)
    cut = [line for line in lines if json.loads(line).get("event") in ("begin", "compared")]
    (folder / "events.jsonl").write_text("\n".join([*cut, *[attempt] * 5]) + "\n")
    (folder / "data.xyz").unlink()
    for path in folder.glob("round-001/*"):
        path.unlink()
    (folder / "round-001").rmdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QualmsWarning)
        last = list(again)[-1]
    assert [a.info[ID] for a in last.failed] == ["r0s1"]
    assert "5 times" in last.failed[0].info[REASON]


def test_a_full_disk(entries, monkeypatch):
    write, left = os.write, [2000]

    def write_some(file, content):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = write(file, content[: left[0]])
        left[0] -= n
        return n

    entries = with_(entries, budget=6)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        left[0] = 9000
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            run(entries)
    before = len(data(entries))  # complete structures only
    assert before < 6
    run(entries)
    assert len(data(entries)) == len({a.info[ID] for a in data(entries)}) == 6


def test_what_a_machine_left_incomplete_is_removed(entries):
    run(with_(entries, budget=6))
    expected = texts(entries)
    folder = Path(entries["directory"])
    with (folder / "data.xyz").open("a") as file:
        file.write('4\nLattice="1 0 0 0 1 0 0 0 1" learn_id=r9s9 Prop')
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "labe')
    run(with_(entries, budget=6))
    assert texts(entries) == expected


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
from qualms.__main__ import run
sys.argv = ["qualms", "learn", sys.argv[1], "--no-pages", "--quiet"]
run()
"""


def killed_run(entries, config, rng, n_kills, limits):
    """Run the command, kill it at random moments, and return how often it was killed."""
    config.write_text(yaml.safe_dump(entries))
    command = [sys.executable, "-c", SCRIPT, str(config)]
    kills = 0
    while True:
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        if kills < n_kills:
            try:
                process.wait(rng.uniform(*limits))
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                process.communicate()
                continue
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
        return kills


def check_kills(entries, tmp_path, n_kills, limits, label):
    undisturbed = with_(entries, directory=str(tmp_path / "undisturbed"), label=label)
    start = time.perf_counter()
    assert not killed_run(undisturbed, tmp_path / "a.yaml", np.random.default_rng(0), 0, limits)
    span = time.perf_counter() - start
    log = tmp_path / "log"
    label = {**label, "arguments": {**label["arguments"], "log": str(log)}}
    entries = with_(entries, label=label)
    limits = (limits[0], max(span, limits[0] + 1))
    kills = killed_run(entries, tmp_path / "b.yaml", np.random.default_rng(1), n_kills, limits)
    assert kills
    assert texts(entries) == texts(undisturbed)
    # What was calculated to the end before a kill was kept: at most one label per kill is lost.
    lines = log.read_text().splitlines()
    assert len(lines) - len(set(lines)) <= kills
    assert not [*Path(entries["directory"]).rglob(".*.part*")] or kills


def test_a_killed_loop_goes_on(entries, tmp_path):
    label = {"arguments": {"sleep": 0.05}, "compare": 0, "calculator": "test_learn:Counting"}
    check_kills(with_(entries, budget=6), tmp_path, 2, (2.0, 5.0), label)


@pytest.mark.slow
def test_a_loop_that_is_killed_ten_times_goes_on(entries, tmp_path):
    label = {"arguments": {"sleep": 0.3}, "compare": 0, "calculator": "test_learn:Counting"}
    check_kills(with_(entries, budget=18), tmp_path, 10, (1.0, 6.0), label)


# --- labels by hand ---


def stored_once(store):
    """The method, which is interrupted when it is called again."""
    calls = []

    def interrupted(self, *arguments):
        if calls:
            raise KeyboardInterrupt
        calls.append(store(self, *arguments))

    return interrupted


def test_labels_by_hand(entries, tmp_path):
    entries = with_(entries, budget=6, batch=3, label=None)
    del entries["label"]
    folder = Path(entries["directory"])
    n_rounds = 0
    while True:
        try:
            rounds = run(entries)
            break
        except MissingLabelsError as error:
            asked = read_frames(error.path)
        with pytest.raises(MissingLabelsError):
            run(entries)  # nothing happens until they are there
        # In the first round, three of the start are compared.
        n_start = sum(str(atoms.info[ID]).startswith("start") for atoms in asked)
        assert (n_start, len(asked)) == ((3, 6) if n_rounds == 0 else (0, 3))
        answers = []
        for atoms in asked:
            copy = atoms.copy()
            copy.calc = EMT()
            copy.info = {} if n_rounds else dict(atoms.info)  # known by the geometry alone
            copy.info["energy"] = copy.get_potential_energy()
            copy.arrays["force"] = copy.get_forces()
            copy.calc = None
            copy.positions = copy.positions.round(5)
            answers.append(copy)
        if n_rounds == 0:  # a stranger among them
            wrong = answers[0].copy()
            wrong.positions += np.arange(3)
            ase.io.write(folder / "labelled.xyz", [*answers, wrong], format="extxyz")
            with rejects("label"):
                run(entries)
            other_units = [atoms.copy() for atoms in answers]
            without = [atoms.copy() for atoms in answers]
            for atoms, other in zip(without, other_units, strict=True):
                other.arrays["force"] *= 0.037
                del atoms.arrays["force"]
            for bad in (other_units, without):
                ase.io.write(folder / "labelled.xyz", bad, format="extxyz")
                with rejects("label"):
                    run(entries)
            assert not data(entries)
            assert not data(entries, "failed.xyz")
            # Killed when the first of three labels was stored.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop._Loop, "_store", stored_once(loop._Loop._store))
                ase.io.write(folder / "labelled.xyz", answers, format="extxyz")
                with pytest.raises(KeyboardInterrupt):
                    run(entries)
            assert len(data(entries)) == 1
        # The last is not computed in the second round.
        ase.io.write(folder / "labelled.xyz", answers[::-1][n_rounds:], format="extxyz")
        n_rounds += 1
    assert n_rounds == 2
    assert len(rounds[-1].bought) == 5
    assert len(rounds[-1].failed) == 1
    assert not (folder / "to_label.xyz").exists()
    assert not (folder / "labelled.xyz").exists()


# --- the command ---


def test_the_command(entries, tmp_path, monkeypatch, capsys, no_figures):
    from qualms.cli import main

    def qualms(*arguments):
        monkeypatch.setattr("sys.argv", ["qualms", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, capsys.readouterr()

    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(with_(entries, budget=6)))
    code, printed = qualms("learn", config, "--json")
    assert code == 0
    document = json.loads(printed.out)
    assert Path(document["model"]).exists()
    assert [r["round"] for r in document["rounds"]] == [0, 1]
    pages = sorted(Path(entries["directory"]).glob("*/round.html"))
    assert len(pages) == 2
    text = pages[-1].read_text()
    assert "Learning curve" in text
    assert 'id="map-data"' in text  # structures in the viewer
    # By hand, there is an exit code of its own.
    by_hand = with_(entries, directory=str(tmp_path / "by_hand"))
    del by_hand["label"]
    config.write_text(yaml.safe_dump(by_hand))
    code, printed = qualms("learn", config, "--json")
    assert code == 3
    assert Path(json.loads(printed.out)["waiting"]).exists()
    # Its template is a configuration, but for its files.
    code, printed = qualms("template", "learn")
    template = yaml.safe_load(printed.out)
    settings = make_learn_settings(template)
    assert settings == make_learn_settings(
        {name: template[name] for name in ("start", "directory", "target_error", "budget")}
    )
    assert qualms("template", "lern")[0] == 2


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"target_error": 0}, "target_error"),
        ({"audit": 0.05}, "audit"),
        ({"budget": 0}, "budget"),
        ({"tset": 1}, "tset"),
        ({"explore": {"walkers": 0}}, "explore"),
        ({"explore": {"temperature": 300}}, "explore"),
        ({"explore": {"pool": "a.xyz", "callable": "a:b"}}, "explore"),
        ({"explore": {"callable": "no path"}}, "explore"),
        ({"explore": {"callable": "test_learn:nothing"}}, "explore"),
        ({"explore": {"callable": "test_learn:made_of_nothing"}}, "explore"),
        ({"explore": {"callable": "test_learn:made_with_a_mistake"}}, "explore"),
        ({"explore": {"callable": "test_learn:made_by_a_user", "arguments": {"m": 1}}}, "explore"),
        ({"explore": {"structures": "gold.xyz"}}, "explore"),
        ({"explore": {"temperatures": []}}, "explore"),
        ({"explore": {"pressure": 1.0, "structures": "molecule.xyz"}}, "explore"),
        ({"explore": {"structures": "clashing.xyz"}}, "explore"),
        ({"explore": {"pool": "empty.xyz"}}, "path"),
        ({"explore": {"pool": "gold.xyz"}}, "explore"),
        ({"explore": {"pool": "missing.xyz"}}, "path"),
        ({"watch": {"forces": -1}}, "forces"),
        ({"choose": {"strategy": "best"}}, "choose"),
        ({"label": {"calculator": "tblite:GFN3"}}, "baseline"),
        ({"label": {"calculator": "nowhere:Calculator"}}, "label"),
        ({"label": {"calculator": "backbone"}}, "label"),
        ({"label": {"arguments": {"factor": 27.2}}}, "label"),
        ({"model": {"forces": None}}, "model"),
        ({"model": {"units": "meV"}}, "model"),
        ({"model": 3}, "model"),
        ({"model": {"target": "heat"}}, "start"),
        ({"start": "gold.xyz"}, "start"),
        ({"start": "three.xyz"}, "start"),
    ],
)
def test_bad_input(entries, changes, parameter, tmp_path, monkeypatch, alloys):
    monkeypatch.chdir(tmp_path)
    ase.io.write("molecule.xyz", ase.Atoms("CuAl", [[0, 0, 0], [0, 0, 2.4]]))
    clashing = alloys[0].copy()
    clashing.positions[1] = clashing.positions[0] + 0.2
    ase.io.write("clashing.xyz", clashing)
    ase.io.write("gold.xyz", ase.Atoms("Au2", [[0, 0, 0], [0, 0, 2.4]]))
    Path("empty.xyz").write_text("")
    ase.io.write("three.xyz", alloys[:3], format="extxyz")
    with rejects(parameter):
        run(with_(entries, **changes))
    assert not data(entries)


def test_limits_below_the_noise(entries):
    entries = with_(entries, budget=3, batch=3, watch={"forces": 1e-6, "upper": 1e9})
    entries["explore"] = {**EXPLORE, "walkers": 1}
    with pytest.warns(QualmsWarning, match="noise"):
        rounds = list(learn(make_learn_settings(entries)))
    assert all("learn_beyond" in atoms.info for atoms in rounds[0].explored)


def test_walkers_go_back(entries):
    """A limit that is exceeded soon stops walkers, which begin again where they were trusted."""
    entries = with_(entries, budget=3, batch=3, watch={"energy": "0.3 rmse", "upper": 1.0})
    first = run(entries)[0]
    assert first.record["stops"] == len(first.stops) > 0
    assert first.record["unstopped"] < first.record["picoseconds"]
    limit = 0.3 * first.model.record.quantities["energy"].rmse
    for atoms in first.explored:
        assert first.model.predict(atoms.copy()).std / len(atoms) <= limit
    for atoms in first.stops:
        assert "beyond the limit" in atoms.info["learn_beyond"]
    watch = {"energy": "0.001 rmse", "upper": 1.0}
    (only,) = run(with_(entries, watch=watch, directory=entries["directory"] + "2"))
    assert "where they start" in only.end


def test_two_loops_in_one_directory(entries):
    with ThreadPoolExecutor(1):
        first = learn(make_learn_settings(with_(entries, budget=6)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QualmsWarning)
            next(first)
            with rejects("directory"):
                run(entries)
            first.close()  # the lock ends with it
            run(with_(entries, budget=6))


def test_directories_of_something_else(entries, tmp_path, start):
    with rejects("directory"):
        run(with_(entries, directory=str(tmp_path)))
    with rejects("directory"):
        run(with_(entries, directory=str(start / "below")))
    run(with_(entries, budget=3, batch=3))
    other = tmp_path / "other.xyz"
    ase.io.write(other, labelled_alloys(20, seed=3), format="extxyz")
    with rejects("start"):
        run(with_(entries, start=str(other), budget=3))
