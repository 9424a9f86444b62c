"""``qualms serve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qualms.cli.evaluate import OPTIONS, evaluate_files
from qualms.cli.options import Quiet, baseline_of, with_options
from qualms.cli.terminal import Terminal
from qualms.errors import InputError, warn
from qualms.serve import LOCAL

if TYPE_CHECKING:
    from collections.abc import Sequence

_OF_MODELS = ("confirm_baseline", "baseline_key", "weights")
_UNUSED = ("skip_unknown_species", "skip_failed", "cluster", "cluster_config")


@with_options({name: option for name, option in OPTIONS.items() if name not in _UNUSED})
def serve(
    files: Annotated[
        list[Path],
        Argument(
            metavar="MODEL… | PREDICTIONS… | FOLDER…",
            help="Model files (.safetensors); or predictions of any program with reference values, "
            "as for `qualms report`; or folders with reports (.html).",
        ),
    ],
    port: Annotated[
        int | None,
        Option(
            "--port",
            min=0,
            max=65535,
            help="Port; by default 8000, or any that is free if that is in use.",
        ),
    ] = None,
    host: Annotated[
        str,
        Option(
            "--host",
            help="Address to serve. Others than 127.0.0.1 let other machines reach the page, "
            "without encryption.",
        ),
    ] = "127.0.0.1",
    browser: Annotated[
        bool, Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
    training: Annotated[
        list[Path] | None,
        Option(
            "--training",
            help="File that the model was trained on, so that similar training environments are "
            "shown. Repeat it for several files, in the order of the training.",
        ),
    ] = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run ``qualms serve``."""
    try:
        from qualms.serve.app import Files
        from qualms.serve.app import serve as run
    except ImportError as error:
        raise InputError(
            f"`qualms serve` needs {error.name}, which is not installed: pip install "
            "'qualms[serve]'.",
            parameter="serve",
        ) from error
    from qualms.io.files import check_input

    terminal = Terminal(quiet=quiet)
    is_model = [path.suffix == ".safetensors" for path in files]
    if not any(is_model):
        given = next((name for name in (*_OF_MODELS, "threads") if options[name]), None)
        given = "training" if training else given
        if given is not None:
            option = f"--{given.replace('_', '-')}"
            raise InputError(f"{option} is for models; {files[0]} is none.", parameter=option)
        served = Files(reports=_reports(files, terminal, options))
    elif all(is_model):
        for path in [*files, *(training or ())]:
            check_input(path)
        served = Files(
            models=_named(files),
            training=tuple(training or ()),
            threads=options["threads"],
            baseline=baseline_of(options["confirm_baseline"], options["baseline_key"]),
            weights=options["weights"],
        )
    else:
        other = files[is_model.index(False)]
        raise InputError(
            f"{other} is not a model: choose structures in the page.", parameter="files"
        )
    if host not in LOCAL:
        warn(
            f"Everybody who reaches {host} and knows the token can use the page; it is not "
            "encrypted."
        )

    def announce(url: str) -> None:
        terminal.result(url, document={"url": url})
        terminal.info("Ctrl-C ends it.")
        if browser:
            import threading
            import webbrowser

            # A browser of the terminal would make the server wait for its end.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    try:
        run(served, host=host, port=port, announce=announce)
    except KeyboardInterrupt:  # the usual end
        terminal.info("Ended.")


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Return files by name, or by path where names are the same."""
    names = [path.name for path in paths]
    return {
        str(path) if names.count(name) > 1 else name: path
        for name, path in zip(names, paths, strict=True)
    }


def _reports(
    files: Sequence[Path], terminal: Terminal, options: dict[str, Any]
) -> dict[str, str | Path]:
    """Return the reports of folders, or the report on predictions."""
    if any(path.is_dir() for path in files):
        found = [
            page
            for path in files
            for page in (sorted(path.glob("*.html")) if path.is_dir() else [path])
        ]
        if not found:
            raise InputError(f"{files[0]} has no report (.html).", parameter="files")
        return dict(_named(found))
    from qualms.report.report import make_report

    unused = dict.fromkeys((*_OF_MODELS, *_UNUSED, "threads"))
    evaluated = evaluate_files(files, terminal, **{**options, **unused})
    title = ", ".join(path.name for path in files)
    target = next(iter(evaluated.evaluations.values())).target
    report = make_report(
        evaluated.evaluations,
        title=f"{target}: {title}",
        facts=evaluated.facts,
        remarks=evaluated.remarks,
    )
    return {title: report.page}
