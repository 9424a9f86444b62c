"""``qualms info``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from qualms.cli.options import Json, Model, Quiet
from qualms.cli.terminal import Terminal


def info(
    model: Model,
    calibrations: Annotated[
        bool,
        Option("--calibrations", help="Compare all calibration methods on the out-of-bag points."),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms info``."""
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.model_file import read_model
    from qualms.cli.train import summary_document
    from qualms.report.tables import Table

    loaded = AtomisticModel.from_fitted(read_model(model))  # needs no weights of a network
    document, parts = summary_document(loaded), []
    if calibrations:
        records = loaded.fitted.compare_calibrations()
        document["out_of_bag"] = records
        rows = [
            [
                f"{loaded.settings.keys[str(record['quantity'])]}, {record['method']}",
                f"{record['log_likelihood']:.3f}",
                f"{record['coverage_68']:.1%}",
                f"{record['coverage_95']:.1%}",
                str(record["parameters"]),
            ]
            for record in records
        ]
        headers = ["calibration", "log likelihood", "within σ", "within 1.96 σ", "parameters"]
        parts.append(
            Table(headers, rows) if rows else "The model has no out-of-bag points to compare on."
        )
    Terminal(quiet=quiet, as_json=as_json).result(loaded.summary(), *parts, document=document)
