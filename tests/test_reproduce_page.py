"""The page of a reproduction: its figures, its scale, its order, and the commands it names."""

import re
from pathlib import Path

import pytest
from atomistic_fixtures import contents, qualms
from reproduce_fixtures import made_shift, plain_seed, small_results

from qualms.errors import InputError
from qualms.reproduce.complete import check_together
from qualms.reproduce.introduction import commands
from qualms.reproduce.page import make_page
from qualms.reproduce.pictures import draw_figures
from qualms.reproduce.places import Workplace, check_page, other_results
from qualms.reproduce.problems import csd_settings
from qualms.reproduce.results import write_results
from qualms.reproduce.texts import TITLES

DOCS = Path(__file__).parents[1] / "docs"
PANELS = ("linear", "power", "student")
NAMES = ("qm9", "csd-atoms", "csd-crystals")


def complete(name="qm9", **update):
    machine = dict.fromkeys(("processor", "cores", "memory", "python"), "?")
    return small_results(plain_seed(), name=name, title=name, machine=machine, **update)


def linked(page):
    """Figures of a page."""
    return re.findall(r"^:::\{figure\} (\S+)$", page, re.MULTILINE)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A directory with nothing in it but the results of a run far from home."""
    monkeypatch.chdir(tmp_path)
    results = complete(shift=made_shift())
    Path("out").mkdir()
    write_results(Path("out/qm9.json"), results)
    return results


# --- figures ---


def test_every_figure_of_the_committed_page_is_there():
    figures = linked((DOCS / "reproduction.md").read_text(encoding="utf-8"))
    assert len(figures) >= 14
    assert [figure for figure in figures if not (DOCS / figure).is_file()] == []


def test_a_page_of_results_alone_has_the_figures_that_need_no_more(alone):
    ended = qualms("reproduce page out/qm9.json -o page.md")
    assert ended.code == 0, ended.err
    figures = linked(Path("page.md").read_text(encoding="utf-8"))
    there = {f"out/qm9-{ending}.png" for ending in ("sizes", "shift")}
    missing = {f"out/qm9-{ending}.png" for ending in PANELS}
    assert set(figures) == there | missing
    assert all(Path(figure).read_bytes().startswith(b"\x89PNG") for figure in there)
    (warning,) = [line for line in ended.err.splitlines() if line.startswith("Warning")]
    for figure in missing:
        assert not Path(figure).exists()
        assert Path(figure).name in warning
    assert "lead nowhere" in warning
    assert "sizes" not in warning


def test_panels_that_are_there_stay_and_figures_of_results_are_those_of_these(alone):
    for ending in (*PANELS, "sizes", "shift"):
        Path(f"out/qm9-{ending}.png").write_bytes(b"drawn before")
    before = contents("out")
    ended = qualms("reproduce page out/qm9.json -o page.md")
    assert (ended.code, ended.err) == (0, "")
    changed = {name for name, content in contents("out").items() if content != before[name]}
    assert {Path(name).name for name in changed} == {"qm9-sizes.png", "qm9-shift.png"}


def test_damaged_results_are_refused_before_anything_is_written(alone):
    """A representation that is none, and a seed that counts twice."""
    shift = alone.shift.model_copy(update={"representation": {"a": 1}})
    write_results(Path("out/qm9.json"), alone.model_copy(update={"shift": shift}))
    before = contents("out")
    ended = qualms("reproduce page out/qm9.json -o page.md")
    assert ended.code == 2
    assert "the representation of qm9, far from home" in ended.err
    twice = alone.model_copy(update={"seeds": [*alone.seeds, *alone.seeds]})
    write_results(Path("out/qm9.json"), twice)
    ended = qualms("reproduce page out/qm9.json -o page.md")
    assert ended.code == 2
    assert "seed 0 is there more than once" in ended.err
    assert set(contents("out")) == set(before)
    assert not Path("page.md").exists()


def test_a_run_without_its_predictions_draws_what_needs_none(alone):
    Path("out/qm9-power.png").write_bytes(b"drawn before")
    said = []
    drawn = draw_figures(alone, Workplace(Path("out")), said.append)
    assert [path.name for path in drawn] == ["qm9-sizes.png", "qm9-shift.png"]
    (warning,) = said
    assert "Links of the page to qm9-linear.png, qm9-student.png lead nowhere." in warning
    assert "qm9-power.png may be of an earlier run." in warning
    assert "the command that made the results with --force" in warning


# --- scales ---


def test_the_title_is_that_of_the_scale(tmp_path):
    first = (DOCS / "reproduction.md").read_text(encoding="utf-8").splitlines()[0]
    assert first == TITLES["paper"]
    small, paper = (make_page([complete(scale=scale)]) for scale in ("small", "paper"))
    assert paper.startswith(f"{first}\n")
    assert small.startswith("# The paper again, at a tenth of its scale\n")
    assert "full scale" not in small
    assert "on a tenth of as many points, with" in small
    for text in (small, paper):  # the next run may replace either
        page = tmp_path / "reproduction.md"
        page.write_text(text, encoding="utf-8")
        check_page(page, force=False)


@pytest.mark.parametrize(
    ("scale", "n", "other"),
    [
        ("small", "1,000 components (pca) if that pays", "2,000"),
        ("paper", "2,000 components (pca) of each cutoff", "1,000"),
    ],
)
def test_components_are_those_of_the_results(scale, n, other):
    soap = csd_settings("atoms", scale).representation.model_dump(mode="json")
    page = make_page([complete("csd-atoms", scale=scale, representation=soap)])
    assert f"shieldings divided over atoms: {n}." in page
    assert f"{other} components" not in page
    assert ("of the same 30,009" in page) == (scale == "paper")


def test_scales_are_not_mixed(alone):
    paper = complete("csd-atoms", scale="paper")
    with pytest.raises(InputError, match=r"qm9 of scale small, csd-atoms of scale paper"):
        check_together([alone, paper])
    write_results(Path("out/csd-atoms.json"), paper)
    write_results(Path("out/csd-crystals.json"), complete("csd-crystals"))
    ended = qualms("reproduce page out/qm9.json out/csd-atoms.json -o page.md")
    assert ended.code == 2
    assert "results of one scale" in ended.err
    assert not Path("page.md").exists()
    # A run leaves results of the other scale out of its page, and says so.
    said = []
    found = other_results(Path("out"), {"qm9": alone}, said.append)
    assert [results.name for results in found] == ["qm9", "csd-crystals"]
    assert said == [f"Not on the page: {Path('out/csd-atoms.json')}, which is of scale paper."]


def test_the_order_is_that_of_the_problems():
    found = [complete(name) for name in NAMES]
    page = make_page(found)
    assert make_page(found[::-1]) == page
    places = [page.index(f"\n## {name}\n") for name in NAMES]
    assert places == sorted(places)


# --- commands ---


def test_commands_are_those_that_made_the_results():
    seeds = [plain_seed(0), plain_seed(1)]
    qm9 = complete(source="subset", seeds=seeds)
    atoms, crystals = (complete(f"csd-{split}", source="c.xyz") for split in ("atoms", "crystals"))
    shift = made_shift(source="my relaxed.xyz")
    crystals = crystals.model_copy(update={"shift": shift})
    assert commands([qm9, atoms, crystals]) == [
        "pip install qualms",
        "qualms reproduce qm9 --scale small --seeds 2",
        "qualms reproduce csd --data c.xyz --relaxed 'my relaxed.xyz' --scale small",
        "qualms reproduce page qm9.json csd-atoms.json csd-crystals.json -o reproduction.md",
    ]
    # Other seeds, or a shift of the first division, take a command for each.
    apart = commands([atoms.model_copy(update={"seeds": seeds}), crystals])
    assert apart[1] == "qualms reproduce csd --data c.xyz --split atoms --scale small --seeds 2"
    assert " --split crystals " in apart[2]
    full = complete(scale="paper", source="qm9pack", shift=shift)
    assert commands([full])[:2] == [
        "pip install 'qualms[qm9]'",
        "qualms reproduce qm9 --shift",
    ]
    source, listed = "dsgdb9nsd.xyz.tar.bz2", "uncharacterized.txt"
    archive = complete(scale="paper", source=source, left_out=listed, seeds=seeds, shift=shift)
    assert commands([archive])[1] == (
        f"qualms reproduce qm9 --data {source} --uncharacterized {listed} \\\n    --seeds 2 --shift"
    )
