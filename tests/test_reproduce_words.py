"""The page of a reproduction: what it says of made-up results, and what its figures show."""

import re
from pathlib import Path

import numpy as np
import pytest
from atomistic_fixtures import qualms
from reproduce_fixtures import MEMBERS, made_column, made_results, made_seed

from benchmarks import bench_presets
from qualms.features.hypers import make_soap
from qualms.report import figures as conditional
from qualms.reproduce import divisions, pictures, size_picture
from qualms.reproduce.divisions import comparison_of_divisions
from qualms.reproduce.facts import asked_for, differing, facts
from qualms.reproduce.markdown import keep_links
from qualms.reproduce.over_seeds import VERDICTS
from qualms.reproduce.page import make_page
from qualms.reproduce.problems import csd_settings
from qualms.reproduce.published import COLUMNS, QM9, SIZES, published
from qualms.reproduce.results import Shift, Shifted, read_results, write_results
from qualms.reproduce.shift_page import shift_parts
from qualms.reproduce.tables import beside_the_paper
from qualms.reproduce.targets import internal_against_validation, shrinkage_targets, student_targets
from qualms.reproduce.texts import CAPTIONS, MODEL_SELECTION

ROOT = Path(__file__).parents[1]
ORDER = ("qm9", "csd-atoms", "csd-crystals")


def with_gains(*by_seed):
    """Results whose student − CV and shrinkage − N-L are given, by seed and size."""
    seeds = []
    for i, (student, shrinkage) in enumerate(by_seed):
        columns = {"CV": [float(i)] * 3, "N-L": [float(i)] * 3}
        columns |= {"student": [i + g for g in student]}
        columns |= {"shrinkage": [i + g for g in shrinkage]}
        seeds.append(made_seed(i, columns))
    return made_results(*seeds)


# --- tables ---


def test_what_differs_from_the_paper_is_said_in_numbers():
    by_column = {c: [published(QM9, n, c) + 0.5 for n in SIZES] for c in COLUMNS}
    by_column["Int."][-1] += 0.2
    text = beside_the_paper(made_results(made_seed(0, by_column, sizes=SIZES)))
    assert "CV +0.500 to +0.500, N-L +0.500 to +0.500, Int. +0.500 to +0.700" in text
    assert "nearly the same at every size" in text
    by_column["CV"][0] -= 0.6
    text = beside_the_paper(made_results(made_seed(0, by_column, sizes=SIZES)))
    assert "CV −0.100 to +0.500" in text
    assert "nearly the same" not in text
    assert beside_the_paper(made_results(made_seed())) == ""  # other sizes
    assert beside_the_paper(made_results(made_seed(), name="csd-crystals")) == ""


# --- targets ---


def test_targets_of_one_seed_say_so():
    results = with_gains(([0.001, -0.004, 0.006], [0.001, 0.0, -0.001]))
    student = [t.verdict for t in student_targets(results)]
    # Within is on both sides: above CV by more than 0.005 is missed, too.
    assert student == ["met (one seed)", "met (one seed)", "missed (one seed)"]
    shrinkage = [t.verdict for t in shrinkage_targets(results)]
    assert shrinkage == ["met (one seed)", "met (one seed)", "missed (one seed)"]
    text = internal_against_validation(results)
    assert "| 100 | 100 | 0 | +0.0060 | missed (one seed) | −0.0010 | missed (one seed) |" in text
    assert "student is met at 2 of 3 sizes and missed at: n = 100, +0.0060, missed (one" in text
    assert "shrinkage is met at 2 of 3 sizes and missed at: n = 100, −0.0010, missed (one" in text


def test_targets_of_several_seeds_have_paired_errors():
    results = with_gains(
        ([0.004, 0.007, -0.007], [0.001, -0.003, -0.003]),
        ([-0.005, 0.004, -0.008], [0.003, 0.001, -0.005]),
    )
    student = [t.verdict for t in student_targets(results)]
    # −0.0005 ± 0.0045 may be 0.005, and so may 0.0055 ± 0.0015; −0.0075 ± 0.0005 is not.
    assert student == [f"{word}, not surely" for word in ("met", "missed")] + ["missed"]
    shrinkage = [t.verdict for t in shrinkage_targets(results)]
    assert shrinkage == ["met", "missed, not surely", "missed"]
    text = internal_against_validation(results)
    assert "n = 50, +0.0055 ± 0.0015, missed, not surely" in text
    assert "n = 100, −0.0040 ± 0.0010, missed." in text
    # Four parameters, 100 points; two, 50.
    assert "at n = 100, 0.0200 for the 4 of shrinkage and 0.0200 for the 2 of N-L" in text


def test_targets_that_are_met_say_by_how_little():
    text = internal_against_validation(with_gains(([0.001, -0.004, 0.0], [0.002, 0.001, 0.003])))
    assert "student is met at each of the 3 sizes; it is closest to being missed at n = 50" in text
    assert "with −0.0040, met (one seed)." in text
    assert "closest to being missed at n = 50, with +0.0010, met (one seed)." in text
    assert "missed at:" not in text
    assert "k/2n" not in text


# --- facts and divisions ---


def test_fewer_representatives_than_asked_for_are_explained():
    enough = made_results(made_seed(), name="csd-crystals")
    assert asked_for(enough).n_representatives == 10_000
    assert "asked for" not in facts(enough)
    fewer = made_results(
        *(made_seed(i, n_representatives=n) for i, n in enumerate((8389, 8401))),
        name="csd-crystals",
    )
    text = facts(fewer)
    assert "Of the 10,000 representatives asked for, 8,389 to 8,401 are used." in text
    assert "dropped when the kernel is whitened" in text
    # Nobody can choose more than there are.
    few = made_results(made_seed(n_environments=9, n_representatives=9), name="csd-crystals")
    assert "asked for" not in facts(few)
    assert asked_for(few.model_copy(update={"scale": "small"})).n_representatives == 1_000
    assert asked_for(made_results(made_seed())).n_representatives == 5_000


def both_divisions(rmse=(0.3, 0.6), n_representatives=(10_000, 8_389)):
    found = []
    for name, error, n in zip(ORDER[1:], rmse, n_representatives, strict=True):
        process = {c: made_column(scores={"rmse": error}) for c in ("Raw", "CV", "N-L")}
        seed = made_seed(n_representatives=n, process={}).model_copy(update={"process": process})
        found.append(made_results(seed, name=name))
    return found


def test_divisions_differ_in_more_than_the_division():
    text = "\n\n".join(comparison_of_divisions(both_divisions()))
    assert "| RMSE, GPR PP | 0.300 | 0.600 |" in text
    assert "the error is 2.0 times that on new atoms of known ones" in text
    assert "lose ln(2.0) = 0.69" in text
    assert "two models" in text
    assert "| cutoff | 4 Å; 7 Å | 5 Å |" in text
    assert "| Gaussians | 0.3 Å; 0.5 Å | 0.3 Å |" in text
    assert "| radial scaling | 3 Å, m = 4 | 2 Å, m = 4 |" in text
    assert "| representatives used | 10,000 | 8,389 |" in text
    assert "| basis |" not in text  # the same for both
    assert "the factor would be about 1.7 with the preset on both sides." in text
    assert "Fewer of them are left" in text


def test_divisions_of_the_same_model_are_not_called_two():
    atoms, crystals = both_divisions(n_representatives=(10_000, 10_000))
    same = crystals.model_copy(update={"representation": atoms.representation})
    assert differing(atoms, same) == []
    text = "\n\n".join(comparison_of_divisions([atoms, same]))
    assert "two models" not in text
    assert "2.0 times" in text
    fewer, _ = both_divisions(n_representatives=(9_000, 10_000))
    assert differing(fewer, same) == [["representatives used", "9,000", "10,000"]]
    text = "\n\n".join(comparison_of_divisions([fewer, same]))
    assert "two models" in text
    assert "benchmarks" not in text
    assert "Fewer of them are left" not in text


def test_what_was_not_compared_in_the_benchmarks_is_not_quoted():
    found = both_divisions()
    other = make_soap("nmr", cutoff=4.5).model_dump(mode="json")
    found[0] = found[0].model_copy(update={"representation": other})
    text = "\n\n".join(comparison_of_divisions(found))
    assert "| cutoff | 4.5 Å | 5 Å |" in text
    assert "benchmarks" not in text


def test_divisions_of_several_seeds_have_standard_errors():
    found = []
    for name in ORDER[1:]:
        seeds = [made_seed(i, {"CV": [0.1 * i, 0.2, 0.0]}, process={"CV": 0.1 * i}) for i in (0, 1)]
        found.append(made_results(*seeds, name=name))
    text = "\n\n".join(comparison_of_divisions(found))
    assert "| GPR PP, CV | 0.050 ± 0.050 | 0.050 ± 0.050 |" in text
    assert "| CV | 0.200 ± 0.000 |" in text


def test_one_division_is_not_compared():
    assert comparison_of_divisions(both_divisions()[:1]) == []


def recorded(section):
    """Rows of a section of the recorded benchmarks: numbers by representation, of each table."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    tables = []
    for part in body.split("\n### ")[1:]:
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:1] == "|"]
        tables.append({row[0]: [float(x.rstrip("%")) for x in row[1:]] for row in rows[2:]})
    return tables


def test_the_page_quotes_the_recorded_benchmarks():
    """RMSE, MAE, log likelihood, coverage, seconds: what is typed is what was recorded."""
    molecules, crystals = recorded("presets")
    siblings, new = recorded("siblings")
    own = f"nmr, {bench_presets.OWN}"
    used = make_soap("nmr", **bench_presets.TOGETHER[bench_presets.OWN])
    assert used == csd_settings("atoms", "paper").representation
    assert (siblings["nmr"][0], siblings[own][0]) == (divisions.PRESET_RMSE, divisions.OWN_RMSE)
    assert (new["nmr"][0], new[own][0]) == (divisions.NEW_PRESET_RMSE, divisions.NEW_OWN_RMSE)
    assert siblings[own][0] == min(row[0] for row in siblings.values())
    words = " ".join(MODEL_SELECTION.split())
    for score in (siblings[own][0], siblings["nmr"][0]):
        assert f"{score:.3f} ppm" in words
    for name in ("organic", *(f"organic, {c}" for c in QUOTED)):
        assert f"{molecules[name][1]:.3f} meV/atom" in words, name
        assert f"{molecules[name][2]:.3f}" in words, name
    for name in ("nmr", "nmr, cutoff 6 Å"):
        assert f"{crystals[name][0]:.3f} ppm" in words, name
        assert f"{crystals[name][2]:.3f}".replace("-", "−") in words, name
    # All that is better by MAE or log likelihood is named, and nothing else is.
    better = {
        name
        for name, row in molecules.items()
        if row[1] < molecules["organic"][1] or row[2] > molecules["organic"][2]
    }
    assert better == {f"organic, {c}" for c in QUOTED}
    best = [n for n, row in crystals.items() if row[0] < crystals["nmr"][0]]
    assert best == ["nmr, cutoff 6 Å"]


#: Changes of the preset organic that are better than it by some score, as the page says.
QUOTED = ("cutoff 4 Å", "cutoff 6 Å", "8 radial functions, l ≤ 7", "3 Å and 5 Å")


# --- far from home ---


def test_where_error_bars_are_too_small_is_said():
    """Errors at home as σ says, elsewhere twice as large."""

    def shifted(label, factor):
        scores = {"rmse": 0.5 * factor, "sharpness": 0.5}
        bins = [(0.1 * i, 0.1 * i * factor) for i in range(1, 11)]
        columns = {n: made_column(scores=scores, bins=bins) for n in ("Raw", "Int.", "student")}
        return Shifted(label=label, n=1000, flagged=0.25, bias=0.0, columns=columns)

    sets = [shifted("at home", 1.0), shifted("elsewhere", 2.0)]
    shift = Shift(trained_on="small molecules", n_train=500, sets=sets, seconds=1.0)
    parts = shift_parts([made_results(made_seed(), shift=shift)], "figures/")
    text = "\n\n".join(parts)
    assert "500 labels of small molecules" in text
    home, elsewhere = (next(p for p in parts if f"**{s.label}**" in p) for s in sets)
    assert "σ is right" in home
    assert "too small" not in home
    assert "σ is too small by a factor of 2.00" in elsewhere
    assert "figures/qm9-shift.png" in text
    assert shift_parts([made_results(made_seed())], "") == []


# --- figures ---


def test_captions_say_what_figures_show():
    levels = ", ".join(f"{level:g}" for level in pictures.LEVELS)
    page = make_page([made_results(made_seed())], figures="figures/")
    captions = dict(re.findall(r"figures/qm9-(\w+)\.png\n:alt: (.*)\n", page))
    assert set(captions) == {*pictures.PANELS.values(), "sizes"}
    assert page.count(f"Contours are at {levels} per unit of ln ε") == 1
    assert "GPR PP has no panel\nwith internal calibration" in page
    for ending, has_process in (("linear", True), ("power", True), ("student", False)):
        assert ("GPR PP" in captions[ending]) == has_process
    assert not any("the same" in caption for caption in CAPTIONS.values())
    assert max(map(len, captions.values())) < 160
    assert len(set(captions.values())) == len(captions)


def test_panels_have_the_contours_that_captions_state(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    std = np.exp(rng.normal(size=2000))
    y = std * rng.normal(size=2000)
    members = std[:, None] * rng.normal(size=(2000, 8))
    drawn = []
    contours = conditional._draw_contours
    monkeypatch.setattr(
        conditional,
        "_draw_contours",
        lambda ax, density, levels, kwargs: (
            drawn.append(tuple(levels)),
            contours(ax, density, levels, kwargs),
        ),
    )
    panels = {"n = 9": pictures.Drawn(y, np.zeros(2000), std, members)}
    pictures._draw_panels(tmp_path / "panels.png", panels, "eV")
    assert drawn == [pictures.LEVELS] * 2


def test_estimators_that_agree_do_not_hide_each_other(tmp_path, drawn):
    columns = {name: [1.0, 2.0, 3.0] for name in MEMBERS} | {"Raw": [1.0, 2.0, -9.0]}
    size_picture.draw_sizes(tmp_path / "sizes.png", made_results(made_seed(0, columns)))
    about_full_model, ax = drawn[0].axes
    paper = [line.get_label() for line in about_full_model.lines]
    assert [name for name in MEMBERS if name in paper] == list(COLUMNS)
    lines = {line.get_label(): line for line in ax.lines if line.get_label() in MEMBERS}
    assert set(lines) == set(MEMBERS)
    places = {tuple(line.get_xdata()) for line in lines.values()}
    assert len(places) == len(MEMBERS)
    for validated, internal in (("CV", "student"), ("N-L", "shrinkage")):
        assert lines[validated].get_fillstyle() == "none"
        assert lines[internal].get_fillstyle() == "full"
        assert lines[validated].get_markersize() > 2 * lines[internal].get_markersize()
        assert lines[validated].get_zorder() < lines[internal].get_zorder()
    looks = {(line.get_marker(), line.get_color()) for line in lines.values()}
    assert len(looks) == len(MEMBERS)


def test_values_below_the_axes_are_written_where_nothing_crosses_them(tmp_path, drawn):
    """Raw and Int. far below at the last size, with large errors: one above the other, on white."""
    seeds = []
    for i in (0, 1):
        columns = {name: [1.0, 2.0, 3.0] for name in MEMBERS}
        columns |= {"Raw": [1.0, 2.0, -9.0 - i], "Int.": [1.0, 1.0 + i, -5.0]}
        seeds.append(made_seed(i, columns, bootstrap=dict.fromkeys(MEMBERS, 3.0)))
    size_picture.draw_sizes(tmp_path / "sizes.png", made_results(*seeds))
    figure = drawn[0]
    figure.canvas.draw()
    _, ax = figure.axes
    texts = [t for t in ax.texts if t.get_text().startswith("−")]
    assert [t.get_text() for t in texts] == ["−9.50", "−5.00"]
    boxes = [t.get_window_extent() for t in texts]
    assert not boxes[0].overlaps(boxes[1])
    bars = [c for c in ax.collections if hasattr(c, "get_segments")]
    assert len(bars) > 0
    for text in texts:
        assert text.get_bbox_patch().get_facecolor()[:3] == (1.0, 1.0, 1.0)
        assert all(text.get_zorder() > bar.get_zorder() for bar in bars)
        assert all(
            text.get_zorder() > line.get_zorder() for line in ax.lines if len(line.get_xdata()) > 1
        )


# --- the page ---


@pytest.fixture
def found():
    """Results of two seeds, of every problem."""
    return [made_results(made_seed(0), made_seed(1), name=name) for name in ORDER]


def test_the_page_has_no_gaps(found, tmp_path):
    page = make_page(found[:1], figures="")
    assert "nan" not in page
    assert "None" not in page
    assert "](" in page
    assert sum(page.count(f"| {word} |") for word in VERDICTS) == 10
    everything = make_page(found)
    assert sum(everything.count(f"| {word} |") for word in VERDICTS) == 10 + 9 + 9
    assert everything.count("## What changes over crystals") == 1


def test_pages_of_files_are_those_of_what_was_found(found, tmp_path):
    """Through the file and the command, nothing is lost but digits that are not printed."""
    for results in found:
        write_results(tmp_path / f"{results.name}.json", results)
    files = " ".join(str(tmp_path / f"{name}.json") for name in ORDER)
    ended = qualms(f"reproduce page {files} -o {tmp_path / 'page.md'}")
    assert ended.code == 0, ended.err
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page == keep_links(make_page(found), tmp_path)
    again = read_results(tmp_path / "qm9.json")
    write_results(tmp_path / "again.json", again)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "qm9.json").read_bytes()


def test_only_pages_that_are_there_are_linked(tmp_path):
    text = "[theory](theory.md), [a part](theory.md#part), [all](equations.md), ![](a.png)"
    assert keep_links(text, tmp_path) == "theory, a part, all, ![](a.png)"
    (tmp_path / "theory.md").touch()
    assert keep_links(text, tmp_path) == text.replace("[all](equations.md)", "all")
    assert keep_links(MODEL_SELECTION, tmp_path).count("](") == 0
