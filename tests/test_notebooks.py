"""Objects as notebooks show them, and bars of progress."""

import io
import pydoc
from html.parser import HTMLParser

import ase.io
import numpy as np
import pandas as pd
import pytest
from checks import rejects
from rich.console import Console
from test_cli import qualms

from qualms import AtomisticModel, Prediction, score
from qualms.ase import Calculator
from qualms.progress import Bars, Stages


class Cells(HTMLParser):
    """The cells of a table, and whether all tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.cells.append(data)


def test_tables_of_predictions():
    p = Prediction([[1.0, 1.2, 1.1], [2.0, 2.4, 2.2]])
    table = p.to_pandas()
    pd.testing.assert_frame_equal(table, pd.DataFrame({"mean": p.mean, "std": p.std}))
    several = Prediction(np.random.default_rng(0).normal(size=(4, 3, 8)))
    table = several.to_pandas()
    assert table.loc[(2, 1), "std"] == several.std[2, 1]
    single = p[0].to_pandas()
    assert single["mean"].to_list() == [pytest.approx(1.1)]


def test_predictions_are_formatted():
    p = Prediction([[1.0, 1.2, 1.1], [2.0, 2.4, 2.2]])
    assert f"{p[1]:.3f}" == "2.200 ± 0.200"
    assert f"{p[1]:8.1e}" == " 2.2e+00 ±  2.0e-01"
    assert f"{p[1]}" == str(p[1])
    assert f"{p}" == str(p)


def test_predictions_in_html():
    p = Prediction(np.random.default_rng(0).normal(size=(30, 8)))
    cells = Cells(p._repr_html_())
    assert not cells.open
    assert cells.cells[:2] == ["mean", "std"]
    assert " ± ".join(cells.cells[3:5]) == str(p[0])
    assert len(cells.cells) < 40
    for other in (p[0], Prediction(np.ones((0, 4))), p[:3]):
        assert not Cells(other._repr_html_()).open


def test_models_and_scores_in_html(energy_model):
    cells = Cells(energy_model._repr_html_())
    assert not cells.open
    text = energy_model.summary()
    assert all(cell in text for cell in cells.cells)
    hostile = AtomisticModel("<script>alert(1)</script>")
    assert "<script" not in hostile._repr_html_()
    scores = score(np.zeros(3), Prediction(mean=np.ones(3), std=np.ones(3)))
    cells = Cells(scores._repr_html_())
    assert cells.cells[cells.cells.index("rmse") + 1] == "1"


def test_scores_are_those_of_the_command(energy_model, molecules, tmp_path, monkeypatch):
    frames = molecules[120:140]
    monkeypatch.chdir(tmp_path)
    energy_model.save("m.safetensors")
    ase.io.write("test.xyz", frames)
    options = {"units": "meV", "per": "structure"}
    document = qualms("evaluate m.safetensors test.xyz --in meV --per structure --json").document
    expected = next(row for row in document["scores"] if row["name"] == "sources (out-of-bag)")
    for test in (frames, "test.xyz"):
        for name, value in energy_model.score(test, **options).as_dict().items():
            # Ranks of standard deviations that are nearly the same depend on rounding.
            tolerance = {"abs": 0.02} if name == "spearman" else {"rel": 1e-5}
            assert value == pytest.approx(expected[name], **tolerance), name
    with rejects("quantity"):
        energy_model.score(frames, quantity="forces")


def test_a_single_structure_is_predicted(energy_model, molecules):
    single, several = energy_model.predict(molecules[0]), energy_model.predict(molecules[:1])
    assert single.shape == ()
    np.testing.assert_allclose(single.members, several.members[0])
    assert "±" in f"{single:.3f}"


def test_help_of_the_calculator_is_about_its_parameters():
    text = pydoc.plain(pydoc.render_doc(Calculator))
    assert text.index("watch : Watch") < text.index("Methods defined here")
    assert "restart" not in text[: text.index("Methods inherited")]


def test_bars_do_not_stack():
    """Once a stage has ended, its bar is not drawn again."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    stages, before = Stages(Bars(console)), 0
    for name in ("Features", "Kernel", "Noise"):
        with stages.stage(name, 2) as advance:
            advance(1)
        drawn = out.getvalue()[before:]
        assert name in drawn
        assert not any(other in drawn for other in ("Features", "Kernel", "Noise") if other != name)
        before = len(out.getvalue())
    with stages.stage("Outer", 2) as advance:
        with stages.stage("Inner", 2):
            pass
        advance(2)
    assert set(stages.seconds) == {"Features", "Kernel", "Noise", "Outer", "Inner"}
