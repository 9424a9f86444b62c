"""``qualms info``."""

from __future__ import annotations

from qualms.cli._common import Json, Model, Quiet, Terminal


def info(model: Model, quiet: Quiet = False, as_json: Json = False) -> None:
    """Run ``qualms info``."""
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.model_file import read_model
    from qualms.cli.train import summary_document

    loaded = AtomisticModel.from_fitted(read_model(model))  # needs no weights of a network
    Terminal(quiet=quiet, as_json=as_json).result(
        loaded.summary(), document=summary_document(loaded)
    )
