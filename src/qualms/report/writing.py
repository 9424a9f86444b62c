"""Reports as files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from qualms.errors import InputError
from qualms.report.html import render
from qualms.report.judged import Judged
from qualms.report.page import Page, make_page
from qualms.storage.files import AnyPath, atomic_output, check_output

#: What the data of the map are called, after the name of the page.
MAP_SUFFIX = ".chemiscope.json.gz"


def check_report(path: AnyPath, *, force: bool = False) -> tuple[Path, Path]:
    """Refuse a report that could not be written, before the work starts.

    Returns
    -------
    tuple of two Paths
        The page, and the data of its map, which is written if there is a map.
    """
    page = Path(path)
    if page.suffix.lower() not in (".html", ".htm"):
        raise InputError("path", path, "a name that ends in .html")
    data = page.with_name(page.stem + MAP_SUFFIX)
    return check_output(page, force=force), check_output(data, force=force)


def write_report(
    judged: Judged,
    path: AnyPath,
    *,
    force: bool = False,
    n_worst: int = 20,
    max_structures: int = 1000,
    seed: int = 0,
) -> tuple[Path, ...]:
    """Judge predictions in one HTML file that opens anywhere, without a network.

    It holds a verdict, scores with confidence intervals before and after calibration, figures, the
    worst predictions and, with the extra ``qualms[report]``, an interactive map of the structures.

    Parameters
    ----------
    judged : Judged
        Predictions, truth and structures.
    path : path
        The file to write, ``.html``. The data of the map are written beside it, as
        ``NAME.chemiscope.json.gz``, for the chemiscope of notebooks and of the web.
    force : bool
        Whether existing files may be replaced.
    n_worst : int
        How many of the worst predictions are listed.
    max_structures : int
        How many structures the map may hold; of more, it shows the worst and a random sample.
    seed : int
        Of that sample, and of the resamples for confidence intervals.

    Returns
    -------
    tuple of Paths
        The files written. The same input gives the same bytes.
    """
    check_report(path, force=force)
    page = make_page(judged, n_worst=n_worst, max_structures=max_structures, seed=seed)
    return write_page(page, path, force=force)


def write_page(page: Page, path: AnyPath, *, force: bool = False) -> tuple[Path, ...]:
    """Write a page, and the data of its map if it has one: see `write_report`."""
    html_path, data_path = check_report(path, force=force)
    text = render(page).encode("utf-8")
    with ExitStack() as stack:
        stack.enter_context(atomic_output(html_path, force=force)).write(text)
        if page.map is None:
            return (html_path,)
        stack.enter_context(atomic_output(data_path, force=force)).write(page.map.compressed())
    return html_path, data_path
