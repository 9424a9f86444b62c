"""A trained model in words."""

from __future__ import annotations

from qualms.atomistic.fitted import Fitted
from qualms.atomistic.hypers import Compression
from qualms.atomistic.model_file import Provenance, Record
from qualms.atomistic.plan import format_time
from qualms.atomistic.structures import symbols_of
from qualms.core.calibration import Calibration
from qualms.errors import counted

_METHODS = {"pca": "PCA", "pairs": "PCA of pairs of species", "fps": "FPS", "cur": "CUR"}


def describe(fitted: Fitted, record: Record, provenance: Provenance) -> str:
    """Return what a model is and what it learned, a line for each subject."""
    lines = {
        "target": _target(fitted),
        "trained on": _data(record, fitted.per_atom),
        "elements": symbols_of(fitted.representation.species),
        "representation": _representation(fitted),
        "representatives": f"{record.effective_rank} of {fitted.settings.n_representatives} "
        f"asked for, by {fitted.settings.selection}",
        "noise": f"σ = {record.noise:.4g} {units_of(fitted)}".rstrip()
        + f" ({record.noise / record.target_std:.1e} of the spread of the target)",
        "baseline": fitted.baseline.name,
        "members": _members(fitted, record),
        "internal error": _errors(fitted, record),
        "calibration": _calibration(fitted.calibration),
        **_forces(fitted, record),
        "time": format_time(sum(record.seconds.values())),
        "made": f"{provenance.created} by qualms {provenance.packages['qualms']}, "
        f"data {provenance.data_digest[:12]}",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def units_of(fitted: Fitted) -> str:
    """Return the units of errors: per atom if the target is extensive."""
    units = fitted.settings.units
    if fitted.settings.kind != "extensive":
        return units
    return f"{units}/atom" if units else "per atom"


def _target(fitted: Fitted) -> str:
    settings = fitted.settings
    units = f" in {settings.units}" if settings.units else ""
    of = f" of {symbols_of(settings.species)}" if settings.species else ""
    return f"{settings.target}{units} ({settings.kind}{of})"


def _data(record: Record, per_atom: bool) -> str:
    rows = f"{record.n_rows} atoms of " if per_atom else ""
    text = f"{rows}{record.n_structures} structures, {record.n_environments} environments"
    skipped = [
        f"{n} {what}"
        for n, what in (
            (record.n_unlabelled, "unlabelled skipped"),
            (record.n_isolated, "isolated atoms"),
            (record.n_duplicates, "duplicates"),
        )
        if n
    ]
    return f"{text} ({', '.join(skipped)})" if skipped else text


def _representation(fitted: Fitted) -> str:
    representation = fitted.representation
    soap = representation.soap
    cutoffs = " + ".join(f"{scale.cutoff:g}" for scale in soap.scales)
    text = f"SOAP by {soap.resolved_engine}, cutoff {cutoffs} Å, ζ = {soap.exponent:g}"
    if not representation.projections:
        return f"{text}, {representation.n_features} features"
    raw = sum(p.matrix.shape[0] for p in representation.projections)
    error = max(p.kernel_error for p in representation.projections)
    standard = "pairs" if fitted.settings.has_forces else "pca"
    method = soap.compression.method if isinstance(soap.compression, Compression) else standard
    kept = f"{raw} → {representation.n_features} features by {_METHODS[method]}"
    return f"{text}, {kept} (kernel ± {error:.1e})"


def _members(fitted: Fitted, record: Record) -> str:
    settings = fitted.settings
    how = "bootstrap" if settings.replace else f"sub-samples of {settings.subsample:g}"
    return f"{settings.n_members}, {how} ({record.solver})"


def _errors(fitted: Fitted, record: Record) -> str:
    if record.rmse is None or record.mae is None:
        return "not known: the members agree to rounding, or none was without a row"
    return (
        f"RMSE {record.rmse:.4g}, MAE {record.mae:.4g} {units_of(fitted)}".rstrip()
        + f" ({record.n_internal} rows, each by members that had not seen it)"
    )


def forces_units_of(fitted: Fitted) -> str:
    """Return the units of forces."""
    return f"{fitted.settings.units}/Å" if fitted.settings.units else "per Å"


def stress_units_of(fitted: Fitted) -> str:
    """Return the units of stresses."""
    return f"{fitted.settings.units}/Å³" if fitted.settings.units else "per Å³"


def _forces(fitted: Fitted, record: Record) -> dict[str, str]:
    """Return lines about forces and stresses, if they were learned."""
    settings, units = fitted.settings, forces_units_of(fitted)
    if not settings.mechanical:
        return {}
    what = "forces" if settings.forces else "stresses"
    parts = [f"{record.n_force_rows} components" if settings.forces else ""]
    of = "of stresses" if settings.forces else "components"
    parts += [f"{record.n_virial_rows} {of}" if settings.stress else ""]
    if settings.forces and record.n_without_forces:
        parts.append(f"{record.n_without_forces} structures without")
    if settings.stress and record.n_without_stress:
        parts.append(f"{record.n_without_stress} without a stress")
    lines = {what: ", ".join(part for part in parts if part)}
    noises = [] if record.forces_noise is None else [f"{record.forces_noise:.4g} {units}"]
    if record.virial_noise is not None:
        noises.append(f"{record.virial_noise:.4g} {units_of(fitted)} of virials")
    lines[what] += f"; σ = {', '.join(noises)}" if noises else ""
    of_forces = (record.forces_rmse, record.forces_mae, record.forces_internal)
    of_stress = (record.stress_rmse, record.stress_mae, record.stress_internal)
    return {
        **lines,
        **_derived("forces'", *of_forces, units, fitted.forces_calibration),
        **_derived("stress'", *of_stress, stress_units_of(fitted), fitted.stress_calibration),
    }


def _derived(
    whose: str,
    rmse: float | None,
    mae: float | None,
    n_structures: int,
    units: str,
    own: Calibration | None,
) -> dict[str, str]:
    """Return lines about errors and error bars of forces, or of stresses."""
    lines = {}
    if rmse is not None:
        lines[f"{whose} error"] = f"RMSE {rmse:.4g}, MAE {mae:.4g} {units} (internal)"
    if own is not None:
        lines[f"{whose} bars"] = _calibration(own, n_structures)
    return lines


def _calibration(calibration: Calibration, n_structures: int = 0) -> str:
    """Describe a calibration; components of one structure are several rows."""
    rows = f"{calibration.n_points} rows"
    if n_structures:
        rows = f"{calibration.n_points} components of {counted(n_structures, 'structure')}"
    return (
        f"{calibration.method}, α = {_short(calibration.alpha)}, γ = {_short(calibration.gamma)} "
        f"({rows})"
    )


def _short(value: float) -> str:
    """Write a number to three decimals, or if it is small to three digits."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2e}"
