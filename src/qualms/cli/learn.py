"""``qualms learn``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from qualms.cli.cluster import open_workers
from qualms.cli.options import Cluster, ClusterConfig, Json, Quiet, read_yaml
from qualms.cli.terminal import Terminal
from qualms.errors import InputError, counted

if TYPE_CHECKING:
    from qualms.active import LearnSettings, Round

#: Exit code if structures wait for labels that are computed by hand.
WAITING = 3


def learn(
    config: Annotated[
        Path,
        Argument(metavar="FILE", help="YAML file, as `qualms template learn` prints it."),
    ],
    pages: Annotated[
        bool, Option(help="Write an HTML page for each round into the directory.")
    ] = True,
    cluster: Cluster = None,
    cluster_config: ClusterConfig = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms learn``."""
    from qualms.active import MissingLabelsError
    from qualms.active import learn as run
    from qualms.report.learning import write_round

    terminal = Terminal(quiet=quiet, as_json=as_json)
    settings = _settings_of(config)
    last: Round | None = None
    with open_workers(cluster, cluster_config, terminal) as executor:
        try:
            for last in run(settings, executor=executor):
                if pages:
                    page = settings.folder / f"round-{last.number:03d}" / "round.html"
                    write_round(page, last, force=True)
        except MissingLabelsError as waiting:
            terminal.result(str(waiting), document={"waiting": str(waiting.path)})
            raise typer.Exit(WAITING) from None
        except InputError as error:
            error.args = (f"{config}: {error}",)
            raise
    assert last is not None, "a loop has a round"
    model = settings.folder / f"round-{last.number:03d}" / "model.safetensors"
    sentence = f"{last.end} {counted(last.record['bought'], 'label')} bought"
    if last.failed:
        sentence += f", {len(last.failed)} of them failed: {settings.folder / 'failed.xyz'}"
    terminal.result(
        f"{sentence}. Model: {model}",
        document={
            "model": str(model),
            "end": last.end,
            "rounds": last.records,
            "failed": [
                {"id": atoms.info["learn_id"], "reason": atoms.info["learn_reason"]}
                for atoms in last.failed
            ],
        },
    )


def _settings_of(config: Path) -> LearnSettings:
    """Return the settings of a file; its relative paths are relative to the working directory."""
    from qualms.active import make_learn_settings

    entries: dict[str, Any] = read_yaml(config, "FILE")
    try:
        return make_learn_settings(entries)
    except InputError as error:
        error.args = (f"{config}: {error}".replace("`", ""),)
        raise
