"""The pages: their code runs, prints what they show, and they build without a warning."""

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ase.io
import numpy as np
import pytest
from atomistic_fixtures import ENERGY, copies, qualms, truth
from threadpoolctl import threadpool_limits
from typer.main import get_command

from qualms import AtomisticModel
from qualms.cli.app import app
from qualms.data import qm9

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))]
#: Commands that take longer than a test may: they are parsed, not run.
LONG = ("demo", "reproduce")
#: What commands in the pages may begin with, apart from qualms itself.
OTHERS = ("make", "pip", "python")
#: What training commands printed, and the files that they made.
TRAINED = {}


# --- what the pages contain ---


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its lines, and where it is."""

    language: str
    text: str
    line: int
    follows_code: bool  # whether nothing but blank lines parts it from the block before


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    found, end = [], 0
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 2
        adjacent = bool(found) and not text[end : match.start()].strip()
        found.append(Block(match[1], match[2], line, adjacent))
        end = match.end()
    return found


def commands(block):
    """Return the commands of a block, without comments, as lists of words."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def with_blocks(*languages):
    return [page for page in PAGES if any(b.language in languages for b in blocks(page))]


# --- what the pages show is what happens ---


def parse(words):
    """Fail if the command line has no such command or option."""
    group = get_command(app)
    with group.make_context("qualms", [], resilient_parsing=True) as context:
        command, arguments = group, words[1:]
        while hasattr(command, "commands"):
            verb, *arguments = arguments
            assert verb in command.commands, f"there is no `{shlex.join(words)}`"
            command = command.commands[verb]
        command.make_context(verb, arguments, parent=context)


def run_command(words):
    if words[0] != "qualms":
        assert words[0] in OTHERS, f"what is {words[0]}?"
        if words[0] == "make":
            targets = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", targets, re.MULTILINE) for target in words[1:])
        if words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).exists()
        return ""
    parse(words)
    if words[1] in LONG:
        return ""
    return train(shlex.join(words[1:])) if words[1] == "train" else run(shlex.join(words[1:]))


def run(command):
    ended = qualms(command)
    assert ended.code == 0, f"{command}: {ended.err}"
    return ended.out


def train(command):
    """Several pages train the same model, of the same data: once is enough."""
    if command not in TRAINED:
        before = set(Path().iterdir())
        printed = run(command)
        made = [path for path in Path().iterdir() if path not in before]
        TRAINED[command] = printed, {path: path.read_bytes() for path in made}
    printed, files = TRAINED[command]
    for path, content in files.items():
        path.write_bytes(content)
    return printed


def run_python(block, page, namespace):
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def assert_same_output(shown, printed):
    """Words are the same, up to "…"; numbers nearly, since processors round differently."""
    if shown.endswith("…\n"):
        shown = shown.removesuffix("…\n")
        printed = "".join(printed.splitlines(keepends=True)[: len(shown.splitlines())])
    number = r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?"
    assert re.sub(number, "#", shown).split() == re.sub(number, "#", printed).split(), printed
    for a, b in zip(re.findall(number, shown), re.findall(number, printed), strict=True):
        assert float(a) == pytest.approx(float(b), rel=0.1, abs=0.03), printed


@pytest.fixture
def workshop(molecules, tmp_path, monkeypatch):
    """A directory with the files that the pages speak of, small."""
    frames = copies(molecules)
    rng = np.random.default_rng(0)
    for atoms in frames:
        atoms.info = {"energy": atoms.info[ENERGY]}
    for atoms in frames[80:]:  # a committee has predicted these, somewhere else
        width = rng.uniform(0.05, 0.2)
        atoms.info["energy_ensemble"] = rng.normal(
            rng.normal(atoms.info["energy"], width), width, 8
        )
        atoms.info["REF_energy"] = atoms.info["energy"]
    for name, part in (
        ("data.xyz", frames[:80]),
        ("new.xyz", frames[80:110]),
        ("predictions.xyz", frames[110:150]),
        ("test.xyz", frames[150:]),
    ):
        ase.io.write(tmp_path / name, part, format="extxyz")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    # Starting other processes takes longer than these molecules do.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    with threadpool_limits(1):
        yield


@pytest.mark.parametrize("page", with_blocks("python", "sh"))
def test_what_a_page_shows_is_what_happens(page, workshop):
    namespace, printed = {"__name__": "page"}, ""
    for block in blocks(page):
        if block.language == "python":
            printed = run_python(block, page, namespace)
        elif block.language == "sh":
            printed = [run_command(words) for words in commands(block)][-1]
        elif block.language == "text" and block.follows_code and printed:
            assert_same_output(block.text, printed)


def test_code_fits_into_the_page():
    for page in PAGES[1:]:
        for block in blocks(page):
            if block.language in ("python", "sh"):
                assert max(map(len, block.text.splitlines())) <= 92, f"{page}:{block.line}"


def test_the_pages_use_every_command():
    used = {
        words[1]
        for page in PAGES
        for block in blocks(page)
        if block.language == "sh"
        for words in commands(block)
        if words[0] == "qualms"
    }
    assert used == set(get_command(app).commands)


def test_an_option_that_does_not_exist_is_found():
    with pytest.raises(Exception, match="nonsense"):
        parse(shlex.split("qualms predict model.safetensors new.xyz -o out.xyz --nonsense"))
    with pytest.raises(AssertionError, match="dance"):
        parse(["qualms", "dance"])


# --- what the pages have measured ---


def table_after(page, heading):
    """Return the rows of the first table after some words, as lists of cells."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text[text.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 1 :])
    return [[cell.strip().replace("−", "-") for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.slow
def test_the_table_of_the_demo_is_what_the_demo_prints(tmp_path):
    ended = qualms(f"demo --json --output {tmp_path / 'demo'}")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)["log_likelihood"]
    columns = ("Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "shrinkage")
    for size, *shown in table_after("docs/calibration.md", "## On molecules"):
        computed = [found[size][column] for column in columns]
        assert [float(value) for value in shown] == pytest.approx(computed, abs=0.02)


@pytest.mark.slow
def test_what_is_gained_by_choosing():
    page = "docs/next-structures.md"
    namespace = {"np": np}
    source = next(block.text for block in blocks(page) if "def choose_batch" in block.text)
    exec(source[: source.index("\n\n\n")], namespace)
    molecules, errors = qm9(), []

    def trained(frames, seed, n_members):
        model = AtomisticModel(
            ENERGY, n_representatives=300, n_members=n_members, seed=seed, threads=1
        )
        return model.fit(frames)

    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(molecules))
        labelled, candidates, test = (
            [molecules[i] for i in order[some]]
            for some in (slice(200), slice(200, 1400), slice(1400, 2400))
        )
        prediction = trained(labelled, seed, 64).predict(candidates)
        sizes = np.array([len(atoms) for atoms in test])
        chosen = [
            [],
            range(50),
            np.argsort(-prediction.std)[:50],
            namespace["choose_batch"](prediction, 50),
        ]
        for some in chosen:
            model = trained(labelled + [candidates[i] for i in some], seed, 16)
            z = 1000 * (truth(test) - model.predict_mean(test)) / sizes
            errors.append([np.sqrt(np.mean(z**2)), np.mean(np.abs(z))])
    means = np.mean(np.reshape(errors, (5, 4, 2)), axis=0)
    shown = [[float(cell) for cell in row[1:]] for row in table_after(page, "How much is gained")]
    np.testing.assert_allclose(means, shown, rtol=0.05)


def test_the_reference_has_every_module_of_the_core():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    core = ROOT / "src" / "qualms" / "core"
    names = {path.stem for path in core.glob("*.py")} | {
        path.parent.name for path in core.glob("*/__init__.py")
    }
    for name in names - {"__init__", "checks", "typing"}:
        if not name.startswith("_"):
            assert f"qualms.core.{name}\n" in text, name


# --- the site ---


class Links(HTMLParser):
    """Collects the identifiers of a page, what it links to, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "source") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(given["href"])


#: As in the Makefile.
OPTIONS = ["-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    pytest.importorskip("furo", reason="the extra `docs` is not installed")
    directory = tmp_path_factory.mktemp("docs")
    built = subprocess.run(
        [sys.executable, *OPTIONS, "-d", directory / "doctrees", DOCS, directory / "html"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert built.returncode == 0, built.stderr
    return directory / "html"


def test_the_site_builds_without_warnings_and_its_links_resolve(site):
    pages = {path.resolve(): Links(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            leads_to = (path.parent / unquote(target.path)).resolve() if target.path else path
            assert leads_to.exists(), f"{path.name}: {link}"
            if target.fragment and leads_to in pages:
                assert unquote(target.fragment) in pages[leads_to].ids, f"{path.name}: {link}"


def test_the_site_opens_without_a_network(site):
    for path in site.rglob("*.html"):
        for source in Links(path).loaded:
            assert not urlsplit(source).netloc, f"{path.name} loads {source}"


def leaves(group, prefix=""):
    """Yield the commands that do something, with their names joined by hyphens."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name}-")
        else:
            yield prefix + name, command


def test_every_command_and_option_is_in_the_reference(site):
    text = (site / "commands.html").read_text(encoding="utf-8")
    for name, command in leaves(get_command(app)):
        assert f'id="qualms-{name}"' in text
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert option in text, f"{name} {option}"
