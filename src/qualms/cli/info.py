"""``qualms info``: what a model file holds."""

from __future__ import annotations

from qualms.atomistic.model import AtomisticModel
from qualms.cli._common import Json, Model, Quiet, Terminal
from qualms.cli.train import summary_document


def info(model: Model, quiet: Quiet = False, as_json: Json = False) -> None:
    """Show what a model is, what it was trained on, and how it was calibrated."""
    loaded = AtomisticModel.load(model)
    Terminal(quiet=quiet, as_json=as_json).result(
        loaded.summary(), document=summary_document(loaded)
    )
