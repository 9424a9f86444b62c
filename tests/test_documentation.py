"""What the README and the examples show is what happens."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qualms
from qualms import prediction

ROOT = Path(__file__).parents[1]


def run_example(name):
    return subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / name],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_docstring_examples():
    for module in (qualms, prediction):
        assert doctest.testmod(module).failed == 0


def test_any_regressor_shows_the_coverage_before_and_after():
    output = run_example("any_regressor.py")
    before, after = (int(n) for n in re.findall(r"(\d+)% ", output))
    assert before < 40
    assert 63 <= after <= 77


def test_the_regression_example_prints_the_table():
    output = run_example("regression.py")
    rows = re.findall(r"^0\.\d+ +(.*)$", output, re.MULTILINE)
    table = [[float(v) for v in row.split()] for row in rows]
    assert len(table) == 5
    for raw, cv, _, internal, _, student, shrinkage in table:
        assert student > raw - 0.01
        assert student >= internal - 0.01
        # Internal calibration is as good as that on a validation set.
        assert student > cv - 0.02
        assert shrinkage > cv - 0.02


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_every_function_and_test_of_the_equation_map_exists():
    text = (ROOT / "docs" / "equations.md").read_text()
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))
    for file in re.findall(r"(test_\w+\.py)", text):
        assert (ROOT / "tests" / file).exists()
    for name in re.findall(r"::(\w+)", text):
        assert f"def {name}(" in tests
    sources = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    for name in re.findall(r"`\w+\.(?:\w+\.)?(\w+)", text):
        if name not in ("core", "atomistic", "py"):
            assert re.search(rf"(def|class) {name}\b", sources), name


def included():
    """Parts of recorded benchmarks that pages include: the page, and where they begin and end."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        parts = r'benchmarks/RESULTS\.md\n:start-after: "(.*)"\n:end-before: "(.*)"'
        found += [(page.name, *ends) for ends in re.findall(parts, text)]
    return found


@pytest.mark.parametrize(("page", "begin", "end"), included())
def test_pages_include_one_table_that_was_recorded(page, begin, end):
    recorded = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert recorded.count(begin) == 1
    part = recorded.split(begin)[1].split(end)[0]
    assert end in recorded.split(begin)[1]
    assert part.count("|---|") >= 1
    assert "\n## " not in part  # nothing of another benchmark


def test_tables_of_benchmarks_are_included():
    assert {page for page, _, _ in included()} >= {"differences.md", "forces.md", "simulation.md"}
