"""Tables of calibrations: which method, and which factor for which group."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from qualms.core.calibration import Comparison, GroupedCalibration
from qualms.report.tables import new_table


def comparison_table(comparison: Comparison, *, title: str = "") -> Table:
    """Show how likely points left out are under each method, the best first.

    Parameters
    ----------
    comparison : Comparison
        From `qualms.core.calibration.cross_validate`.
    title : str
        Heading of the table.
    """
    note = "LL: log likelihood per point left out. behind: ± standard error."
    table = new_table(title, f"{note}\nΔAIC, ΔBIC: if points were independent.")
    table.add_column("method", no_wrap=True)
    for header in ("LL", "behind", "ΔAIC", "ΔBIC", "α", "γ"):
        table.add_column(header, justify="right", no_wrap=True)
    best = comparison.candidates[0].calibration
    for candidate in comparison.candidates:
        one = candidate.calibration
        behind = f"{candidate.behind:.4f} ± {candidate.standard_error:.4f}"
        table.add_row(
            one.method,
            f"{candidate.log_likelihood:.4f}",
            "" if one is best else behind,
            f"{one.aic - best.aic:+.1f}",
            f"{one.bic - best.bic:+.1f}",
            f"{one.alpha:.4g}",
            f"{one.gamma:.3f}",
        )
    for method, why in comparison.failures.items():
        table.add_row(method, Text(why.split(";")[0].split(". ")[0]))
    return table


def comparison_records(comparison: Comparison) -> list[dict[str, float | str]]:
    """Return the numbers of `comparison_table` as records that JSON can hold."""
    return [
        {
            "method": candidate.calibration.method,
            "log_likelihood": candidate.log_likelihood,
            "behind": candidate.behind,
            "standard_error": candidate.standard_error,
            "aic": candidate.calibration.aic,
            "bic": candidate.calibration.bic,
        }
        for candidate in comparison.candidates
    ]


def factor_table(grouped: GroupedCalibration, by: str, *, title: str = "") -> Table:
    """Show the factor of each group on top of the calibration of all points.

    Parameters
    ----------
    grouped : GroupedCalibration
    by : str
        What the groups are values of.
    title : str
        Heading of the table.
    """
    table = new_table(title, "factor: σ → factor · σ; alone: what its own points would say.")
    table.add_column(Text(by), no_wrap=True)
    for header in ("points", "alone", "factor"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, group in sorted(grouped.groups.items()):
        table.add_row(Text(name), str(group.n_points), f"{group.alone:.3f}", f"{group.factor:.3f}")
    return table
