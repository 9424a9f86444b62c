"""`qualms reproduce qm9` with the archive that QM9 was published as: what it leaves out of it."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from atomistic_fixtures import qualms

from qualms.atomistic.training import Resources
from qualms.cli import reproduce as command
from qualms.data import HARTREE_TO_EV, qm9
from qualms.data.qm9 import ENERGIES
from qualms.errors import InputError
from qualms.progress import Stages
from qualms.reproduce import problems, session, shift
from qualms.reproduce.page import make_page
from qualms.reproduce.problems import qm9_problem, qm9_settings
from qualms.reproduce.results import read_results

ARCHIVE, LISTED = "dsgdb9nsd.xyz.tar.bz2", "uncharacterized.txt"
QM9 = f"reproduce qm9 --data {ARCHIVE} --scale small --threads 1 -o out"


def as_published(atoms):
    """A molecule in QM9's dialect of XYZ."""
    energies = [atoms.info[name] / HARTREE_TO_EV for name in ENERGIES]
    scalars = [0.0] * 9 + energies + [0.0]
    rows = zip(atoms.symbols, atoms.positions, strict=True)
    lines = [
        f"{len(atoms)}",
        " ".join(["gdb", str(atoms.info["gdb9_index"]), *(f"{x:.8f}" for x in scalars)]),
        *(f"{symbol} {x:.8f} {y:.8f} {z:.8f} 0.0" for symbol, (x, y, z) in rows),
        "0.0\nC C\nInChI=1S",
    ]
    return "\n".join(lines)


@pytest.fixture
def left_out(tmp_path, monkeypatch):
    """Archive and list of a current directory; the molecules that the list names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(problems.DIVISORS, "small", 100)
    # Half of them so small that there are enough to train on far from home.
    by_size = sorted(qm9(), key=lambda atoms: np.count_nonzero(atoms.numbers > 1))
    chosen = [*by_size[:165], *by_size[-165:]]
    molecules = sorted(chosen, key=lambda atoms: atoms.info["gdb9_index"])
    with tarfile.open(ARCHIVE, "w:bz2") as archive:
        for i, atoms in enumerate(molecules):
            text = as_published(atoms).encode("ascii")
            member = tarfile.TarInfo(f"dsgdb9nsd_{i:06d}.xyz")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    listed = [atoms.info["gdb9_index"] for atoms in molecules[::11]]
    Path(LISTED).write_text("Index  SMILES\n" + "".join(f"{i:8d}  C  CC  1.0\n" for i in listed))
    return set(listed)


def indices(*parts):
    return {atoms.info["gdb9_index"] for part in parts for atoms in part}


def test_an_archive_comes_with_the_list_of_what_to_leave_out(left_out, monkeypatch):
    monkeypatch.setattr(command, "qm9_problem", lambda *args: pytest.fail("the work has started"))
    ended = qualms(QM9)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert ARCHIVE in ended.err
    assert "--uncharacterized FILE" in ended.err
    assert not Path("out").exists()
    for function in (qm9_problem, lambda *args: shift.qm9_shift(*args, None, None)):
        with pytest.raises(InputError, match="3,054"):
            function(ARCHIVE, "small")


def test_a_list_that_cannot_be_read_is_refused(left_out):
    ended = qualms(f"{QM9} --uncharacterized nowhere.txt")
    assert ended.code == 2
    assert "nowhere.txt" in ended.err


def test_only_characterised_molecules_are_drawn(left_out):
    problem = qm9_problem(ARCHIVE, "small", 3, uncharacterized=LISTED)
    drawn = indices(problem.train, problem.validation, problem.test)
    assert len(drawn) == 300  # all that are left: each of the others would have been drawn
    assert not drawn & left_out
    assert (problem.source, problem.left_out) == (ARCHIVE, LISTED)


def test_only_characterised_molecules_are_trained_on_and_predicted_far_from_home(
    left_out, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        shift, "_shifted", lambda on, train, sets, *args: seen.append((train, *sets.values()))
    )
    means = shift.Means(Resources(1), Stages(), Path("kernels"), pytest.fail)
    settings = qm9_settings("small")
    shift.qm9_shift(ARCHIVE, "small", settings, means, uncharacterized=LISTED)
    assert not indices(*seen[0]) & left_out
    assert len(indices(*seen[0])) == 200  # 150 small ones, and 50 of nine heavy atoms


def test_the_command_leaves_them_out_everywhere_and_says_so(left_out, monkeypatch):
    monkeypatch.setattr(session, "draw_figures", lambda *args: [])
    given = []
    qm9_shift = command.qm9_shift

    def watched(*args, **kwargs):
        given.append(kwargs)
        return qm9_shift(*args, **kwargs)

    monkeypatch.setattr(command, "qm9_shift", watched)
    ended = qualms(f"{QM9} --uncharacterized {LISTED} --shift --discard-kernels")
    assert ended.code == 0, ended.err
    assert "Warning" not in ended.err
    assert given == [{"uncharacterized": Path(LISTED)}]
    results = read_results("out/qm9.json")
    assert results.left_out == LISTED
    assert f"points from {ARCHIVE} without {LISTED};" in make_page([results])
    assert results.seeds[0].n_train == 200
