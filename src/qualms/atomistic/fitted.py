"""A trained model: representatives, weights of all members, baseline, calibrations, record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from ase.data import chemical_symbols
from pydantic import Field

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import Baseline
from qualms.atomistic.extrapolation import ROUNDING
from qualms.atomistic.kernel_rows import Basis
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.settings import Settings
from qualms.calibration.choice import fit_best
from qualms.calibration.members import source_members, with_equal_members
from qualms.calibration.methods import MODEL_METHODS, Calibration
from qualms.calibration.points import CalibrationData
from qualms.calibration.vectors import QuantityCalibration, calibrate_points
from qualms.errors import CalibrationError
from qualms.features.base import Representation
from qualms.gp.sparse_gp import (
    cholesky_whiten,
    novelty_variance,
    posterior_rows,
    posterior_variance,
)
from qualms.io.tensors import Document
from qualms.metrics import gaussian_log_density
from qualms.prediction import Prediction

#: Share of the variance of labels that must be explained.
LEAST_EXPLAINED = 0.5


def n_leading(r: int) -> int:
    """Return the number of representatives, of r, that novelty is measured with: the first.

    All would cost as much as the kernel. The log likelihood of ¹H shieldings with 5000 of them is
    −0.48 with the first 1000, −0.45 with 2000 and −0.44 with all.
    """
    return min(max(1000, 2 * r // 5), r)


@dataclass(frozen=True)
class ProjectedVariance:
    """What σ_PP of Eq. (3), Musil et al. 2019, needs.

    The factors are float32 if the kernel rows have no more digits than that.
    """

    whitening: FloatArray  #: (r, r): lower Cholesky factor of K_MM
    posterior: FloatArray  #: (r, r): lower Cholesky factor of A = ΦᵀΦ + σ²
    noise_variance: float  #: σ² relative to `variance`
    variance: float  #: Var[y] of the targets, less the baseline

    def std(self, K_XM: Float64Array, k_xx: Float64Array) -> Float64Array:
        """Return σ_PP for kernel rows (n, r) and prior variances (n,): (n,)."""
        return np.asarray(np.sqrt(sum(self.parts(K_XM, k_xx)) + self.noise_variance_of_target))

    @property
    def noise_variance_of_target(self) -> float:
        """σ² in the units of the target, squared."""
        return self.noise_variance * self.variance

    def parts(self, K_XM: Float64Array, k_xx: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return p² and q², the parts of σ_PP² − σ² for kernel rows (n, r): (n,) each."""
        p2, q2 = np.empty(len(K_XM)), np.empty(len(K_XM))
        whitening, posterior = self._exact
        for start in range(0, len(K_XM), 1024):  # of limited memory
            part = slice(start, start + 1024)
            Phi = cholesky_whiten(whitening, K_XM[part].T).T
            p2[part] = posterior_variance(Phi, posterior, self.noise_variance)
            q2[part] = novelty_variance(Phi, k_xx[part])
        return p2 * self.variance, q2 * self.variance

    def rows(self, K_XM: Float64Array) -> Float64Array:
        """Return rows of the posterior for kernel rows, see `posterior_rows`: (n, r)."""
        whitening, posterior = self._exact
        Phi = cholesky_whiten(whitening, K_XM.T).T
        rows = posterior_rows(Phi, posterior, self.noise_variance)
        return np.asarray(np.sqrt(self.variance) * rows)

    def novelty_std(self, K_XM: Float64Array, k_xx: Float64Array) -> Float64Array:
        """Return q of the leading representatives for kernel rows (n, r): (n,)."""
        m = n_leading(K_XM.shape[1])
        Phi = cholesky_whiten(self._exact[0][:m, :m], K_XM[:, :m].T).T
        return np.sqrt(novelty_variance(Phi, k_xx) * self.variance)

    @cached_property
    def _exact(self) -> tuple[Float64Array, Float64Array]:
        return self.whitening.astype(np.float64), self.posterior.astype(np.float64)


class QuantityRecord(Document):
    """Numbers of labels of one quantity, and errors of out-of-bag points."""

    n_rows: int  #: labels: structures, atoms, or components
    n_without: int  #: structures, or atoms of an atomic property, without a label
    n_out_of_bag: int  #: rows that enough members were trained without
    n_out_of_bag_structures: int
    rmse: float | None  #: of out-of-bag points, in the units of the quantity (energies per atom)
    mae: float | None
    noise: float  #: standard deviation σ of the noise; that of stresses for virials per atom
    #: standard deviation of the labels of these points, less the baseline; None in earlier versions
    spread: float | None = Field(default=None, ge=0)

    @property
    def explained(self) -> float | None:
        """Share of the variance of the labels, less the baseline, that is explained out of bag."""
        if self.rmse is None or not self.spread:
            return None
        return 1 - (self.rmse / self.spread) ** 2

    def doubt(self, name: str) -> str:
        """Return a text if there is no basis for uncertainties elsewhere; or an empty one."""
        explained = self.explained
        if explained is None or explained >= LEAST_EXPLAINED:
            return ""
        share = f"{explained:.0%} of their variance is" if explained > 0 else "nothing is"
        return (
            f"{name}: out-of-bag errors (RMSE {self.rmse:.3g}) are close to the standard deviation "
            f"of the labels without the baseline ({self.spread:.3g}): {share} explained. Outside "
            "the training set, uncertainties mean nothing."
        )


class Record(Document):
    """Data and stages of a training run."""

    n_structures: int
    n_environments: int
    n_isolated: int  #: isolated atoms, which are not learned from
    n_duplicates: int
    #: frames of a group, at most, if trajectories were recognised
    block_length: int = Field(default=1, ge=1)
    #: charge and spin of all structures, where they are not the default; None if there are several
    state: dict[str, float | str] | None = None
    quantities: dict[str, QuantityRecord]
    centre: float  #: share λ of the mean of subsampled members in the prediction
    preset: str = ""  #: the representation, if it was chosen, and why
    effective_rank: int  #: representatives that are linearly independent
    #: out-of-bag error for several numbers of representatives, if the number was chosen
    size_curve: dict[int, float] = Field(default_factory=dict)
    size_limit: str = ""  #: what limits the number, if it was chosen: effort, memory, …
    target_std: float  #: standard deviation of the targets less the baseline
    seconds: dict[str, float]  #: time of each stage


def describe_size(
    n: int, curve: Mapping[int, float], limit: str, settings: Settings, quantity: str
) -> str:
    """Return a text on the number of representatives that was chosen by errors of a quantity.

    Parameters
    ----------
    n : int
        Number of representatives.
    curve : mapping of int to float
        Typical out-of-bag error for each number of representatives, increasing.
    limit : str
        What limits the number: "effort", or words for the text.
    settings : Settings
    quantity : str
    """
    limit = f'effort="{settings.effort}"' if limit == "effort" else limit
    if n not in curve:
        return f"{n:,} (limited by {limit})"
    units = settings.noise_units_of(quantity)
    others = "; ".join(f"{m:,}: {error:.3g}" for m, error in curve.items() if m != n)
    text = f"{n:,} (typical out-of-bag error {curve[n]:.3g} {units}; {others}"
    *_, half, last = curve
    if n < last:
        return f"{text})"
    return f"{text}; limited by {limit}: the last doubling saved {1 - curve[n] / curve[half]:.0%})"


class Provenance(Document):
    """Date (UTC), versions of Python and packages, and a digest of structures and labels."""

    created: str
    python: str
    packages: dict[str, str]
    data_digest: str


@dataclass(frozen=True)
class Fitted:
    """Everything a prediction needs."""

    settings: Settings
    representation: Representation
    representatives: FloatArray  #: (r, d); if labels are the basis, novelty alone depends on them
    origins: IntArray  #: (r, 2): structure, as given to ``fit``, and atom of each representative
    kernel_scale: float  #: factor of Eq. (17), Musil et al. 2019
    #: (r, N_R): of each member, in the units of the target (per atom): first the subsampled ones,
    #: then those drawn from the posterior. Both have the weights of the prediction as their mean.
    #: If labels are the basis, (p, N_R), of packed squares of features.
    weights: Float64Array
    intercepts: Float64Array  #: (N_R,)
    pp_weights: Float64Array  #: (r,): kernel weights of the full projected process
    pp_intercept: float
    baseline: Baseline
    calibrations: Mapping[str, QuantityCalibration]  #: of the target, and perhaps derivatives
    points: Mapping[str, CalibrationData]  #: out-of-bag points that these were fitted to
    pp_variance: ProjectedVariance | None
    #: largest and mean novelty of the environments of a structure, its own representatives not
    #: counted, beyond which it is an extrapolation; the largest of any element
    training_novelty: tuple[float, float]
    largest_ensemble_std: float  #: largest ensemble standard deviation of an out-of-bag point
    record: Record
    provenance: Provenance
    #: p of posterior members, or ŝ if there are none, beyond which a structure is an extrapolation;
    #: None in models of earlier versions, in which it is the largest ensemble standard deviation
    std_limit: float | None = None
    #: novelty of an environment of each element beyond which a structure is an extrapolation; empty
    #: in models of earlier versions, in which it is the same for all
    element_novelty: Mapping[int, float] = field(default_factory=dict)
    #: atoms of the largest molecule trained on, and of that with most atoms other than hydrogen
    largest_size: tuple[int, int] | None = None

    @property
    def has_label_basis(self) -> bool:
        """Whether labels span the model, so that weights belong to packed squares of features."""
        return self.settings.basis == "labels"

    @property
    def per_atom(self) -> bool:
        """Whether the target belongs to atoms."""
        return self.settings.per_atom

    @property
    def n_members(self) -> int:
        """Number of members of a calibrated prediction."""
        return int(source_members(self.calibration, self.intercepts).shape[-1])

    @cached_property
    def _calibrations(self) -> dict[str, Calibration]:
        """The calibration of each quantity, with equally many members."""
        equal = with_equal_members(
            [of.calibration for of in self.calibrations.values()], len(self.intercepts)
        )
        return dict(zip(self.calibrations, equal, strict=True))

    @property
    def calibration(self) -> Calibration:
        """The calibration of the target."""
        return self._calibrations[TARGET]

    def calibration_of(self, quantity: str) -> Calibration | None:
        """Return the calibration of a quantity, if it has one of its own."""
        return self._calibrations.get(quantity)

    def calibrated(
        self,
        quantity: str,
        members: Float64Array,
        *,
        numbers: IntArray | None = None,
        novelty_std: Float64Array | None = None,
        factors: Float64Array | None = None,
    ) -> Prediction:
        """Return the calibrated prediction of a quantity.

        Parameters
        ----------
        quantity : str
        members : (n, N_R) or (n, k, N_R) array
            Before calibration; of scalars, or of vectors, which are transformed as a whole.
        numbers : (n,) array of int, optional
            Atomic numbers, if the quantity belongs to atoms: σ has factors of elements.
        novelty_std : (n,) array, optional
            q of each point.
        factors : (n,) array, optional
            Factors by which the target was calibrated, for quantities that have no calibration of
            their own.
        """
        raw, of = Prediction(members), self.calibrations.get(quantity)
        if of is None:
            assert factors is not None, "of the target"
            return raw.scaled(self.calibration, factors)
        of_elements = None
        if numbers is not None:
            of_elements = of.factors(np.array(chemical_symbols)[numbers])
        isotropy = of.isotropy if members.ndim == 3 else None
        options = {"novelty_std": novelty_std, "isotropy": isotropy, "factors": of_elements}
        return raw.calibrated(self._calibrations[quantity], of.conformal, **options)

    def with_calibration(self, method: str | None) -> Fitted:
        """Return the model with another calibration method, fitted to the out-of-bag points.

        "auto" is chosen by the points of the target. A `CalibrationError` is raised if the method
        cannot be fitted to these; other quantities to which it cannot be fitted have none.
        """
        name = "none" if method is None else method
        if TARGET not in self.points:
            raise CalibrationError(
                "The model has no out-of-bag points, to which a calibration could be fitted."
            )
        if name == "auto":
            name = fit_best(self.points[TARGET], MODEL_METHODS).method
        calibrations = {}
        for quantity in self.points:
            try:
                calibrations[quantity] = self._fit_calibration(quantity, name)
            except CalibrationError:
                if quantity == TARGET:
                    raise
        settings = self.settings.model_copy(update={"calibration": name})
        return replace(self, settings=settings, calibrations=calibrations)

    def _fit_calibration(self, quantity: str, method: str) -> QuantityCalibration:
        return calibrate_points(
            self.points[quantity],
            method,
            n_subsampled=self.settings.n_subsampled,
            n_posterior=self.settings.n_drawn,
        )

    def compare_calibrations(self) -> list[dict[str, float | str]]:
        """Return scores of all calibration methods on the out-of-bag points of each quantity.

        The log likelihood is that of Gaussians, in the units of the quantity. Points are those that
        the methods are fitted to.
        """
        records: list[dict[str, float | str]] = []
        for quantity, points in self.points.items():
            for method in MODEL_METHODS:
                with suppress(CalibrationError):
                    of = self._fit_calibration(quantity, method)
                    z, sigma = points.residuals, of.std_of(points)
                    record: dict[str, float | str] = {"quantity": quantity, "method": method}
                    record["log_likelihood"] = float(np.mean(gaussian_log_density(z, sigma)))
                    for level, factor in (("68", 1.0), ("95", 1.96)):
                        record[f"coverage_{level}"] = float(np.mean(np.abs(z) <= factor * sigma))
                    record["parameters"] = of.calibration.describe()
                    records.append(record)
        return records

    def novelty_std(
        self, K_XM: Float64Array, prior_variance: Callable[[], Float64Array]
    ) -> Float64Array | None:
        """Return q for kernel rows (n, r), if σ of the target depends on it: (n,).

        `prior_variance` returns the diagonal of K_XX.
        """
        if not self.calibration.needs_novelty or self.pp_variance is None:
            return None
        return self.pp_variance.novelty_std(K_XM, prior_variance())

    @cached_property
    def basis(self) -> Basis:
        """Kernel rows with the representatives."""
        # Column-major: the kernel takes columns of it again and again.
        X = self.representatives.astype(self.representation.basis_dtype, order="F", copy=False)
        return Basis(self.representation.kernel, X, self.kernel_scale, self.per_atom)

    def novelty_limits(self, numbers: IntArray) -> Float64Array:
        """Return the novelty beyond which environments of atoms (n,) are extrapolations: (n,).

        Parameters
        ----------
        numbers : (n,) array of int
            Atomic numbers at the centres.
        """
        common = self.training_novelty[0] + self.novelty_rounding
        return np.array([self.element_novelty.get(int(z), common) for z in numbers], dtype=float)

    @property
    def novelty_rounding(self) -> float:
        """What limits of novelty lack in files of earlier versions."""
        return ROUNDING if self.std_limit is None else 0.0

    def std_of_members(self, members: Float64Array) -> Float64Array:
        """Return the standard deviation of members (n, N_R) that `std_limit` is a limit of: (n,).

        p of posterior members, or ŝ if there are none.
        """
        drawn = self.std_limit is not None and self.settings.n_drawn > 1
        first = self.settings.n_subsampled if drawn else 0
        return np.asarray(members[:, first:].std(axis=1, ddof=1))

    def members(self, K_XM: Float64Array, design: Float64Array) -> Float64Array:
        """Return the prediction of each member, per atom if extensive: (n, N_R)."""
        return self.with_baseline(K_XM @ self.weights, design)

    def with_baseline(self, learned: Float64Array, design: Float64Array) -> Float64Array:
        """Add intercepts and baselines of the members to their kernel models: (n, N_R).

        Parameters
        ----------
        learned : (n, N_R) array
            Averages over structures, or values of atoms, by the kernel.
        design : (n, S) array
            Compositions, as in `qualms.atomistic.baseline.structure_design`, or elements of atoms.
        """
        return np.asarray(learned + self.intercepts + self.baseline.predict_members(design))

    def pp_mean(self, K_XM: Float64Array, design: Float64Array) -> Float64Array:
        """Return the mean of the full projected process: (n,)."""
        baseline = self.baseline.predict(design)
        return np.asarray(K_XM @ self.pp_weights + self.pp_intercept + baseline)
