"""Out-of-bag points: errors of a model on labels that it has not seen, and its calibration.

The points are stored with the model. Whatever is said about its errors is computed from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from ase.data import chemical_symbols

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.fitted import n_leading
from qualms.atomistic.label_checks import check_copies, find_outliers, warn_of_outliers
from qualms.atomistic.quantities import KINDS, TARGET, Quantity
from qualms.atomistic.settings import Settings
from qualms.calibration.choice import fit_best
from qualms.calibration.methods import MIN_POINTS, MODEL_METHODS, NoCalibration, with_enough_points
from qualms.calibration.points import (
    CalibrationData,
    FullModelData,
    calibration_data,
    leave_groups_out,
)
from qualms.calibration.vectors import MULTIPLICITY, QuantityCalibration, calibrate_points
from qualms.errors import CalibrationError, ExactFitError, QualmsWarning, counted
from qualms.gp.ensemble import MIN_ABSENT, Residuals, fit_centre, out_of_bag_prediction
from qualms.gp.sparse_gp import leave_out, novelty_without_own

if TYPE_CHECKING:
    from qualms.atomistic.training import SparseModel

#: Components on which members agree to this share of the largest label, or to this number, are zero
#: by symmetry.
_ROUNDING, _TINY = 1e-10, 1e-12
#: Out-of-bag structures from which no warning is needed.
_WELL = 10


@dataclass(frozen=True)
class OutOfBagRows:
    """Predictions of the rows of a quantity that are kept, by members and the full model."""

    quantity: Quantity
    members: Float64Array  #: (n, S): of all members
    absent: BoolArray  #: (n, S): whether the training set of the member lacks the row
    groups: IntArray  #: (n,): rows that are left out together
    full: FullModelData | None  #: without each group; None if it is not needed

    @property
    def used(self) -> BoolArray:
        """Which rows (n,) enough members are without; all if there are no members."""
        n_members = self.absent.shape[1]
        enough: BoolArray = self.absent.sum(axis=1) >= (MIN_ABSENT if n_members else 0)
        return enough


def left_out_errors(model: SparseModel, name: str, n_rows: float) -> tuple[Float64Array, IntArray]:
    """Return errors of the full model without the group of a row, and the groups.

    Of some groups that have labels of a quantity, with about so many rows; with all
    representatives.
    """
    kept, full = model.rows.kept, model.full
    codes = np.unique(kept.groups, return_inverse=True)[1]
    of_rows = codes[kept.rows[name]]
    groups = of_rows[np.sort(np.unique(of_rows, return_index=True)[1])]  # random: block by block
    n = int(np.searchsorted(np.cumsum(np.bincount(codes)[groups]), n_rows)) + 1
    some = np.flatnonzero(np.isin(codes, groups[:n]))
    found = leave_out(
        full.process,
        kept.Phi[some],
        full.y[some],
        sample_weight=full.weight[some],
        groups=codes[some],
    )
    of_quantity = np.isin(some, kept.rows[name])
    return found.residuals[of_quantity, 0] * model.scale, codes[some[of_quantity]]


def predict_out_of_bag(
    model: SparseModel, settings: Settings, members: Mapping[str, Float64Array]
) -> dict[str, OutOfBagRows]:
    """Return predictions of kept rows by members (n, S) of each quantity, and the full model."""
    rows, found = model.rows, {}
    full = None
    if settings.centre != "members" or settings.n_drawn:
        full = _leave_all_out(model, settings)
    for name, quantity in rows.sample.quantities.items():
        of_quantity = None if full is None else full.some(quantity.rows)
        if of_quantity is not None and (
            name != TARGET or settings.has_forces or not settings.keep_pp
        ):
            of_quantity = replace(of_quantity, novelty_std=None)  # not known, or not of predictions
        absent = rows.kept.draw.counts[quantity.rows] == 0
        groups = rows.kept.groups[quantity.rows]
        found[name] = OutOfBagRows(quantity, members[name], absent, groups, of_quantity)
    return found


def _leave_all_out(model: SparseModel, settings: Settings) -> FullModelData:
    """Return the full model without each group of rows that are kept, and its representatives."""
    rows, kept = model.rows, model.rows.kept
    owners, whitening = _owners(model), rows.points.whitening
    # Novelty is known for rows of the target alone; it is zero elsewhere.
    q2, n, m = np.zeros(len(kept.Phi)), len(rows.k_xx), n_leading(kept.Phi.shape[1])
    q2[:n] = novelty_without_own(kept.Phi[:n], rows.k_xx, whitening, kept.groups[:n], owners, m)
    drawn = settings.n_drawn > 0
    return leave_groups_out(model.full, kept, whitening, owners, np.sqrt(q2), drawn)[0]


def _owners(model: SparseModel) -> IntArray:
    """Return the group, among those of kept rows, of each representative; −1 for none."""
    rows, found = model.rows, model.rows.points.environments
    structures = rows.sample.groups[rows.sample.quantities[TARGET].structure]
    n = len(rows.sample.y)
    if np.array_equal(structures, rows.kept.groups[:n]):
        return found.groups
    # Single atoms are left out.
    sample, centers = rows.sample, rows.sample.centers or []
    source = np.repeat(sample.source, sample.environments)
    row_of = dict(
        zip(
            zip(source.tolist(), np.concatenate(centers).tolist(), strict=True),
            range(n),
            strict=True,
        )
    )
    return np.array([row_of.get((int(s), int(a)), -1) for s, a in found.origins], dtype=np.intp)


def choose_centre(found: Mapping[str, OutOfBagRows], settings: Settings) -> float:
    """Return the share λ of the ensemble mean in the prediction, given or of smallest error."""
    n_members = settings.n_subsampled
    if not n_members or settings.centre == "full":
        return 0.0
    if settings.centre != "auto":
        return 1.0 if settings.centre == "members" else float(settings.centre)
    residuals = []
    for of in found.values():
        assert of.full is not None, "needed for a blend"
        used, mean, std, n_absent = out_of_bag_prediction(of.members, of.absent)
        if len(np.unique(of.quantity.structure[used])) >= MIN_POINTS:
            z = of.full.residuals_with_own[used], of.quantity.y[used] - mean
            of_members = Residuals(*z, std, n_absent, of.groups[used])
            residuals.append(of_members.mostly(of.full.without_representatives[used]))
    return fit_centre(residuals, n_members)


# --- points ---------------------------------------------------------------------------------------


def collect_points(name: str, of: OutOfBagRows, centre: float, source: IntArray) -> CalibrationData:
    """Return the out-of-bag points of a quantity.

    Components of vectors that are zero by symmetry are left out. Structures have the numbers
    `source` among those that were given.
    """
    quantity = of.quantity
    if of.full is not None:
        of = replace(of, full=replace(of.full, centre=centre))
    points = _points(of) if not KINDS[name].is_derivative else _components(of)
    assert points.rows is not None
    element = None
    if quantity.species is not None:
        element = np.array(chemical_symbols)[quantity.species[points.rows]]
    structure = source[quantity.structure[points.rows]]
    return replace(points, structure=structure, element=element, rows=None)


def _points(of: OutOfBagRows, y: Float64Array | None = None) -> CalibrationData:
    """Return points: of the members and the full model, or of one of the two."""
    if of.full is not None and not of.absent.shape[1]:
        return of.full.alone(of.groups)
    y = of.quantity.y if y is None else y
    return calibration_data(y, of.members, of.absent, full=of.full, groups=of.groups)


def _components(of: OutOfBagRows) -> CalibrationData:
    """Return points of components of forces or stresses, with the uncertainties of the vectors."""
    quantity, full = of.quantity, of.full
    some, factor = np.flatnonzero(asymmetric(of)), quantity.factor
    chosen = OutOfBagRows(
        quantity,
        (of.members * factor[:, None])[some],
        of.absent[some],
        of.groups[some],
        None if full is None else full.some(some).scaled(factor[some]),
    )
    points = _points(chosen, (quantity.y * factor)[some])
    used = some[points.rows]
    ensemble_std = np.zeros(len(quantity.y))
    if of.absent.shape[1]:
        found = out_of_bag_prediction(of.members, of.absent)
        ensemble_std[found.used] = found.std
    elif full is not None:
        ensemble_std = full.posterior_std
    p = None
    if full is not None and points.posterior_std is not None:
        p = (_pooled(quantity, full.posterior_std) * factor)[used]
    assert quantity.multiplicity is not None
    n_components = 6 if np.any(quantity.multiplicity > 1) else 3
    return replace(
        points,
        rows=used,
        ensemble_std=(_pooled(quantity, ensemble_std) * factor)[used],
        posterior_std=p,
        component_std=points.ensemble_std,
        multiplicity=quantity.multiplicity[used] / MULTIPLICITY[n_components].mean(),
    )


def asymmetric(of: OutOfBagRows) -> BoolArray:
    """Return which components (n,) are not zero by symmetry; all, if all seem to be."""
    if of.members.shape[1] or of.full is None:
        apart = not_zero_by_symmetry(of.quantity.y, of.members)
    else:
        p = of.full.posterior_std
        # A variance of zero, to rounding, has this standard deviation.
        apart = p > _ROUNDING**0.5 * p.max(initial=0.0)
    return apart if apart.any() else np.ones(len(apart), dtype=bool)


def not_zero_by_symmetry(y: Float64Array, members: Float64Array) -> BoolArray:
    """Return which components (n,) members (n, N_R) do not agree on to rounding."""
    largest = float(np.abs(y).max(initial=0.0))
    return np.asarray(np.ptp(members, axis=1) > max(_ROUNDING * largest, _TINY))


def _pooled(quantity: Quantity, std: Float64Array) -> Float64Array:
    """Return the standard deviation of whole vectors, over known components, for their rows."""
    assert quantity.vector is not None
    assert quantity.multiplicity is not None
    w, vector = quantity.multiplicity, quantity.vector
    squares = np.bincount(vector, w * std**2) / np.maximum(np.bincount(vector, w), 1.0)
    return np.asarray(np.sqrt(squares)[vector])


# --- calibration ----------------------------------------------------------------------------------


def calibrate_quantities(
    found: Mapping[str, OutOfBagRows],
    settings: Settings,
    centre: float,
    source: IntArray,
    *,
    is_constant: bool,
) -> tuple[dict[str, CalibrationData], dict[str, QuantityCalibration], str]:
    """Return out-of-bag points and calibration of each quantity, and the method.

    A target without errors is not calibrated; nor are forces, or stresses, of too few structures,
    for which the factor of the energy is used.
    """
    n = {"n_subsampled": settings.n_subsampled, "n_posterior": settings.n_drawn}
    target = found[TARGET]
    available = int(np.count_nonzero(target.used))
    method = with_enough_points(settings.calibration, available)
    points: dict[str, CalibrationData] = {}
    calibrations: dict[str, QuantityCalibration] = {}
    for name, of in found.items():
        if KINDS[name].is_derivative:
            n_structures = len(np.unique(of.quantity.structure[asymmetric(of) & of.used]))
            n_available = len(np.unique(target.quantity.structure[target.used]))
            if _too_few(name, n_structures, n_available, method):
                continue
            try:
                points[name] = collect_points(name, of, centre, source)
                calibrations[name] = calibrate_points(points[name], method, **n)
            except CalibrationError as error:
                points.pop(name, None)
                if method != "none":
                    _warn(f"{name}: {error} The factor that calibrates energies is used.")
            continue
        try:
            if is_constant:
                raise _ConstantTargetError
            points[name] = collect_points(name, of, centre, source)
            if method == "auto":
                method = fit_best(points[name], MODEL_METHODS).method
            calibrations[name] = calibrate_points(points[name], method, **n)
        except CalibrationError as error:
            points.pop(name, None)
            if isinstance(error, _ConstantTargetError):
                _warn(
                    "All targets are the same: there is nothing to learn, and the uncertainty is 0."
                )
            elif method != "none" and not isinstance(error, ExactFitError):
                remedy = "A model with `uncertainty='posterior'` needs no subsamples."
                raise CalibrationError(f"{error} {remedy}") from None
            else:
                _warn(f"{error} The ensemble standard deviation is not calibrated.")
            of_kinds = n["n_subsampled"] if n["n_posterior"] else 0
            calibrations[name] = QuantityCalibration(NoCalibration(n_subsampled=of_kinds))
            method = "none" if method == "auto" else method
    return points, calibrations, method


class _ConstantTargetError(CalibrationError):
    """All targets are the same."""


def _too_few(name: str, n: int, available: int, method: str) -> bool:
    """Return whether n out-of-bag structures are too few for a calibration, with a warning."""
    least = KINDS[name].least
    too_few = n < min(least, available)
    if method != "none" and n < min(_WELL, available):
        effect = "the calibration is poorly determined."
        if too_few:
            effect = f"{least} are needed to calibrate; the factor of energies is used."
        _warn(f"{name}: {counted(n, 'out-of-bag structure')}; {effect}")
    return too_few


def largest_std(points: CalibrationData | None, settings: Settings) -> float:
    """Return the largest standard deviation of all members of an out-of-bag point."""
    if points is None:
        return 0.0
    if not settings.n_subsampled or points.posterior_std is None:
        return float(points.ensemble_std.max())
    n, k = settings.n_subsampled - 1, max(settings.n_drawn - 1, 0)
    squares = n * points.ensemble_std**2 + k * points.posterior_std**2
    return float(np.sqrt(squares.max() / (settings.n_subsampled + settings.n_drawn - 1)))


def check_labels(
    found: Mapping[str, OutOfBagRows], copies: IntArray, source: IntArray, *, per_atom: bool
) -> None:
    """List structures whose labels are far from their out-of-bag predictions.

    Where too few members are without a row, the full model without it is used. Structures of the
    same number among `copies` (n,) are duplicates.
    """
    for name, of in found.items():
        quantity = of.quantity
        residuals, std = np.full((2, len(quantity.y)), np.nan)
        if of.full is not None:
            residuals, std = of.full.residuals.copy(), of.full.posterior_std.copy()
        if of.absent.shape[1]:
            used, mean, ensemble_std, _ = out_of_bag_prediction(of.members, of.absent)
            residuals[used], std[used] = quantity.y[used] - mean, ensemble_std
        rows = np.flatnonzero(np.isfinite(residuals))
        points = quantity.y[rows], residuals[rows], std[rows], quantity.structure[rows]
        warn_of_outliers(name, find_outliers(*points, copies), source)
        if name == TARGET and not per_atom:
            check_copies(*points[:2], copies[points[3]], source[points[3]])


def _warn(text: str) -> None:
    warnings.warn(text, QualmsWarning, stacklevel=2)
