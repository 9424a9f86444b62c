"""The code blocks of README and docs run, and so do the examples that are fast."""

import contextlib
import doctest
import importlib.util
import io
import os
import pydoc
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import ase.io
import numpy as np
import pytest
from atomistic_fixtures import labelled_dimers
from PIL import Image
from threadpoolctl import threadpool_limits

import qualms
from qualms import prediction
from qualms.cli import main
from qualms.data import qm9

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
#: Commands that take longer than a test may: only their arguments are parsed.
LONG = {"demo", "serve"}
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")
#: Output and files of commands that several pages run on the same input.
CACHE = {}


# --- code blocks ---


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in pattern.finditer(text)]


def commands(block):
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_command(words):
    """Run a command in this process. Commands of other programs are not run."""
    if words[0] != "qualms":
        return
    if words[1] in LONG:
        words = [*words, "--help"]
    output = io.StringIO()
    with patch("sys.argv", words), contextlib.redirect_stdout(output):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    assert not code, shlex.join(words)


def train_once(words):
    """Run a command, or copy its files if another page has run it on the same data."""
    key = (*words, Path(words[2]).read_bytes())
    if key not in CACHE:
        before = set(Path().iterdir())
        run_command(words)
        CACHE[key] = {path: path.read_bytes() for path in set(Path().iterdir()) - before}
    for path, content in CACHE[key].items():
        path.write_bytes(content)


def run_python(block, page, namespace):
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def assert_same_numbers(shown, printed):
    """Numbers of a documented output agree, up to the sampling error of other processors."""
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    for expected, number in pairs:
        assert float(number) == pytest.approx(float(expected), rel=0.1, abs=0.03), printed


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Write the files that the pages refer to, with few molecules."""
    directory = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    molecules = qm9(n=190)
    for atoms in molecules:
        atoms.info = {"energy": atoms.info["atomization_energy"]}
    for atoms in molecules[80:150]:  # with predictions of an ensemble
        width = rng.uniform(0.05, 0.2)
        mean = rng.normal(atoms.info["energy"], width)
        atoms.info["energy_ensemble"] = rng.normal(mean, width, 8)
        atoms.info["REF_energy"] = atoms.info["energy"]
    parts = {"data": (0, 80), "new": (80, 110), "predictions": (110, 150), "test": (150, 190)}
    for name, (start, stop) in parts.items():
        ase.io.write(directory / f"{name}.xyz", molecules[start:stop], format="extxyz")

    ase.io.write(directory / "mine.xyz", labelled_dimers(48), format="extxyz")
    for atoms in molecules:
        near = np.exp(-((atoms.get_all_distances() / 2) ** 2)) @ (atoms.numbers - 1.0)
        atoms.info, atoms.arrays["shielding"] = {}, 30.0 - near
    ase.io.write(directory / "shieldings.xyz", molecules[:60], format="extxyz")
    for atoms in molecules:
        atoms.arrays["REF_shielding"] = atoms.arrays.pop("shielding")
    ase.io.write(directory / "crystals.xyz", molecules[60:80], format="extxyz")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def workplace(files, tmp_path, monkeypatch):
    """An empty directory with these files, and one thread."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    # Starting worker processes takes longer than these molecules.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    with threadpool_limits(1):
        yield tmp_path


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language in ("python", "sh") for b in blocks(p))]
)
def test_code_blocks(page, workplace):
    package = {"docs/pretrained.md": "sevenn", "docs/learning.md": "tblite"}.get(page)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    namespace, printed, previous = {"__name__": "page"}, "", ""
    for block in blocks(page):
        if block.language == "python":
            printed = run_python(block, page, namespace)
        elif block.language == "sh":
            for words in commands(block):
                (train_once if words[:2] == ["qualms", "train"] else run_command)(words)
        elif block.language == "text" and previous == "python":
            assert_same_numbers(block.text, printed)
        previous = block.language


def test_docstrings():
    for module in (qualms, prediction):
        assert doctest.testmod(module).failed == 0


# --- links and names ---


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_names_in_the_table_of_equations():
    text = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"`(qualms\.[\w.]+)`", text))):
        assert pydoc.locate(name) is not None, name


def test_figures_of_the_readme_are_those_of_the_benchmarks():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for row in (
        r"\| 130831 \| in memory \|[^|]+\|[^|]+\| (\d+) \|[^|]+\| (\d+) \(",
        r"\| 130831 \| from a file \|[^|]+\|[^|]+\| (\d+) \|[^|]+\| (\d+) \(",
        r"\| 1308310 \| \d+ \| (\d+) \|[^|]+\| (\d+) \(",
    ):
        seconds, memory = map(int, re.search(row, results).groups())
        time, size = f"{seconds / 60:.0f} minutes", f"{memory / 1024:.1f} GiB"
        assert re.search(rf"{time}( of CPU time)? and {size}", readme)


# --- examples ---


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_any_regressor(capsys):
    load("any_regressor").main()
    before, after = (int(n) for n in re.findall(r"(\d+)% ", capsys.readouterr().out))
    assert before < 40
    assert 63 <= after <= 77


def test_example_vibrations(tmp_path):
    example = load("vibrations")
    z = []
    for seed in range(2):
        reference, predicted = example.run(n_members=8, seed=seed)
        z.append((reference - predicted.mean) / predicted.std)
        np.testing.assert_allclose(predicted.mean, reference, rtol=0.05)
    # Ten correlated errors: uncertainties of half or twice the correct size would fail.
    assert 0.4 < np.sqrt(np.mean(np.square(z))) < 1.8
    assert_drawn(example.draw, reference, predicted, tmp_path / "figure.png")


def test_example_equation_of_state(tmp_path):
    example = load("equation_of_state")
    energies, predicted, reference, reference_energies = example.run()
    assert reference == pytest.approx([3.59, 133], rel=0.02)
    np.testing.assert_array_less(np.abs(predicted.mean - reference), 3 * predicted.std)
    # Errors at neighbouring volumes cancel.
    differences = energies[1:] - energies[:-1]
    independent = np.hypot(energies.std[1:], energies.std[:-1])
    assert np.median(differences.std / independent) < 0.75
    figure = tmp_path / "figure.png"
    assert_drawn(example.draw, energies, predicted, reference, reference_energies, figure)


def assert_drawn(draw, *arguments):
    draw(*arguments)
    with Image.open(arguments[-1]) as image:
        assert len(np.unique(np.asarray(image.convert("L")))) > 10
