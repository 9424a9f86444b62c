"""The committed results and their page: what is promised is kept, or said to be missed."""

import re
from pathlib import Path

import numpy as np
import pytest
from reproduce_fixtures import MEMBERS

from qualms.reproduce.over_seeds import full_model, likelihoods, sub_samples, written
from qualms.reproduce.page import make_page
from qualms.reproduce.published import CSD, QM9, SIZES, published
from qualms.reproduce.results import read_results
from qualms.reproduce.targets import WITHIN, shrinkage_targets, student_targets

DOCS = Path(__file__).parents[1] / "docs"
ORDER = ("qm9", "csd-atoms", "csd-crystals")
#: The target is that shrinkage be at least equal to N-L. It is missed at some sizes, as the page
#: says, by up to so much in the mean over seeds: 0.0021 ± 0.0010 with half of the atoms, where
#: points are absent from half as many members as a new one. At the largest size four parameters are
#: fitted to 4,200 points, which alone costs 4/(2 · 4,200) = 0.0005, and the two of N-L to 5,000.
#: This is a deviation from the target, not the target.
DEVIATION = 0.0025


def committed():
    """Results in the order of the page; they are all there."""
    return [read_results(DOCS / "reproduction" / f"{name}.json") for name in ORDER]


def test_the_committed_page_is_made_of_the_committed_results():
    page = make_page(committed(), figures="reproduction/")
    assert (DOCS / "reproduction.md").read_text(encoding="utf-8") == page
    shown = set(re.findall(r"^:::\{figure\} reproduction/(.*)$", page, re.MULTILINE))
    assert shown == {path.name for path in (DOCS / "reproduction").glob("*.png")}


@pytest.mark.parametrize("results", committed(), ids=lambda results: results.name)
def test_the_committed_results_keep_what_is_promised(results):
    """Internal calibration is as good as that on a validation set, at every size."""
    assert results.scale == "paper"
    assert all(seed.n_train >= 19_500 for seed in results.seeds)
    for target in student_targets(results):
        assert abs(np.mean(target.differences)) <= WITHIN, target
    for seed in results.seeds:
        for scheme in seed.schemes:
            found = {c: scheme.columns[c].scores["log_likelihood"] for c in MEMBERS}
            # Of a single division, internal calibration may well be the better one.
            assert found["student"] - found["CV"] >= -WITHIN
    shrinkage = shrinkage_targets(results)
    for target in shrinkage:
        assert np.mean(target.differences) >= -DEVIATION, target
    # Where the target itself is missed, the page says so.
    missed = [t for t in shrinkage if t.missed]
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    section = page.split(f"## {results.title}\n")[1].split("\n## ")[0]
    assert f"shrinkage is met at {len(shrinkage) - len(missed)} of {len(shrinkage)}" in section or (
        not missed and f"shrinkage is met at each of the {len(shrinkage)} sizes" in section
    )


def test_calibration_md_says_what_the_committed_results_say():
    """Shrinkage is not the best of each row: it is N-L to a few thousandths, above or below it."""
    text = " ".join((DOCS / "calibration.md").read_text(encoding="utf-8").split())
    assert "agrees with N-L to a few thousandths, above it at some sizes and below it at" in text
    *others, crystals = (
        [np.mean(t.differences) for t in shrinkage_targets(results)] for results in committed()
    )
    gains = np.concatenate(others)
    assert max(np.abs(gains)) <= DEVIATION
    assert min(gains) < 0 < max(gains)
    assert round(max(crystals), 3) == 0.005


@pytest.mark.parametrize("results", committed()[:2], ids=lambda results: results.name)
def test_the_paper_s_columns_come_out_again_but_for_a_constant(results):
    """Features and noise differ from the paper's, and crystals; what is left is one number."""
    table = {"qm9": QM9, "csd-atoms": CSD}[results.name]
    for column in ("CV", "N-L"):
        found = likelihoods(results, column, full_model).mean(axis=0)
        printed = [published(table, n, column) for n in SIZES]
        assert np.ptp(found - printed) < 0.04, (column, found - printed)


def test_the_committed_results_of_qm9_reach_their_targets():
    for seed in committed()[0].seeds:
        columns = [scheme.columns for scheme in seed.schemes]
        assert min(c["student"].scores["mae"] for c in columns) < 1.5e-3
        scaled = [s.columns["CV"].scores["log_likelihood"] for s in sub_samples(seed)]
        assert max(scaled) >= 4.95


def test_the_committed_results_of_qm9_keep_to_their_time_and_memory():
    """Every seed of which it is known: 20 minutes by the clock, 10 GB."""
    seeds = committed()[0].seeds
    memory = [seed.memory for seed in seeds if seed.memory]
    assert all(used < 10e9 for used in memory)
    minutes = {seed.seed: seed.wall / 60 for seed in seeds if seed.wall is not None}
    if not minutes:
        pytest.skip("no committed seed says how long it took by the clock")
    assert all(each < 20 for each in minutes.values()), minutes


def test_the_committed_results_of_shieldings_reach_their_targets():
    results = committed()[1]
    for seed in results.seeds:
        assert seed.process["Raw"].scores["rmse"] < 0.30
    # As in the paper, about the full model.
    assert likelihoods(results, "N-L", full_model).mean(axis=0).max() >= -0.10


def test_the_page_quotes_the_run_with_one_cutoff():
    earlier = read_results(DOCS / "reproduction" / "one-cutoff" / "csd-atoms.json")
    assert [scale["cutoff"] for scale in earlier.representation["scales"]] == [6.0]
    found = likelihoods(earlier, "N-L", full_model)
    quoted = written(found[:, found.mean(axis=0).argmax()], ".3f")
    page = " ".join((DOCS / "reproduction.md").read_text(encoding="utf-8").split())
    assert f"its best N-L was {quoted}, over two divisions of the data" in page


def test_the_readme_says_what_the_committed_results_say():
    found = committed()
    text = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    best = [likelihoods(r, "CV", full_model).mean(axis=0).max() for r in found[:2]]
    assert f"QM9 reach {best[0]:.2f} where the paper has 4.68" in text
    assert f"divided over atoms, −{-best[1]:.2f} where it has −0.38" in text
    differences = [t.differences for r in found for t in student_targets(r)]
    mean, single = re.search(
        r"to (\d\.\d{3}) in the mean .* and to (\d\.\d{3}) with", text
    ).groups()
    assert max(abs(np.mean(d)) for d in differences) <= float(mean)
    assert max(np.abs(d).max() for d in differences) <= float(single)


def test_the_page_says_what_predicting_the_mean_of_the_members_costs():
    page = " ".join((DOCS / "reproduction.md").read_text(encoding="utf-8").split())
    said = page.split("RMSE above that of the full model, by size: ")[1]
    for results, name in zip(committed(), ("QM9", "over atoms", "over crystals"), strict=True):
        shares = said.split(f"{name} ")[1].split(";")[0].split(".")[0].split(", ")
        for i, share in enumerate(shares):
            ratios = [
                sub_samples(seed)[i].columns["Raw"].scores["rmse"]
                / seed.process["Raw"].scores["rmse"]
                for seed in results.seeds
            ]
            assert float(share.rstrip("%")) == pytest.approx(100 * (np.mean(ratios) - 1), abs=0.6)
        assert len(shares) == len(results.sizes)
