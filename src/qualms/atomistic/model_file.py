"""Model files: one safetensors file with everything that a prediction needs.

The document is validated against a schema, and every tensor against the sizes that the document
implies, before anything is built. Nothing in the file is ever executed.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from ase.data import chemical_symbols
from pydantic import Field

from qualms.atomistic.baseline import Baseline
from qualms.atomistic.fitted import Fitted, ProjectedVariance
from qualms.atomistic.settings import Settings
from qualms.atomistic.training import Outcome
from qualms.atomistic.training_set import TrainingSet
from qualms.calibration.base import Calibration
from qualms.calibration.fitting import build_calibration
from qualms.errors import QualmsError
from qualms.features.compression import Projection
from qualms.features.soap import Representation
from qualms.io.tensors import (
    Document,
    StorageError,
    TensorSpec,
    check_tensors,
    read_document,
    read_tensors,
    write_tensors,
)
from qualms.progress import Stages

FORMAT = "qualms model"
#: Raised whenever the meaning of a file changes; older files stay readable.
PROTOCOL = 3

_PACKAGES = ("qualms", "numpy", "scipy", "ase", "dscribe", "featomic", "safetensors")


class Provenance(Document):
    """Where a model comes from.

    Attributes
    ----------
    created : str
        Date and time, UTC.
    python, packages
        Versions.
    data_digest : str
        Of structures and labels.
    """

    created: str
    python: str
    packages: dict[str, str]
    data_digest: str


class Record(Document):
    """What is known of the training.

    Attributes
    ----------
    n_structures, n_rows, n_environments : int
        Labelled structures, labels, and environments.
    n_unlabelled, n_isolated, n_duplicates : int
    n_internal : int
        Rows that enough members had not seen.
    rmse, mae : float, optional
        Of these rows, by the members that had not seen them, in the units of the target; per atom
        if it is extensive.
    effective_rank : int
    noise : float
        Standard deviation σ of the noise, same units.
    target_std : float
        Standard deviation of the targets less the baseline, same units.
    solver : str
        How the members were solved.
    seconds : dict
        Time of each stage.
    n_force_rows, n_virial_rows, n_without_forces, n_without_stress : int
        Components of forces and of virials that were learned, and structures without either.
    forces_rmse, forces_mae, forces_noise : float, optional
        As those of the energy, of components of forces.
    stress_rmse, stress_mae : float, optional
        The same of components of stresses.
    virial_noise : float, optional
        That of virials, Vσ per atom, in the units of the energy.
    forces_internal, stress_internal : int
        Structures that forces, and stresses, were calibrated on.
    """

    n_structures: int
    n_rows: int
    n_environments: int
    n_unlabelled: int
    n_isolated: int
    n_duplicates: int
    n_internal: int
    rmse: float | None
    mae: float | None
    effective_rank: int
    noise: float
    target_std: float
    solver: str
    seconds: dict[str, float]
    n_force_rows: int = 0
    n_virial_rows: int = 0
    n_without_forces: int = 0
    forces_rmse: float | None = None
    forces_mae: float | None = None
    forces_noise: float | None = None
    n_without_stress: int = 0
    stress_rmse: float | None = None
    stress_mae: float | None = None
    virial_noise: float | None = None
    forces_internal: int = 0
    stress_internal: int = 0


_Share = Annotated[float, Field(ge=0, le=1)]


class CalibrationDocument(Document):
    """Method and parameters of a calibration."""

    method: str
    parameters: dict[str, float | int]


class ModelDocument(Document):
    """Everything in a model file that is not a tensor."""

    settings: Settings
    species: tuple[int, ...] = Field(min_length=1)
    baseline: str
    n_projections: int = Field(ge=0, le=16)
    kernel_errors: tuple[float, ...]
    feature_scale: float = Field(gt=0)
    kernel_scale: float = Field(gt=0)
    pp_intercept: float
    pp_noise: float | None = Field(gt=0)
    pp_target_variance: float | None = Field(gt=0)
    calibrations: dict[str, CalibrationDocument]
    forces_calibrations: dict[str, CalibrationDocument] = Field(default_factory=dict)
    stress_calibrations: dict[str, CalibrationDocument] = Field(default_factory=dict)
    training_novelty: tuple[_Share, _Share]
    training_spread: float = Field(ge=0)
    record: Record
    provenance: Provenance


def make_provenance(digest: str) -> Provenance:
    """Return versions and date of now."""
    return Provenance(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
        data_digest=digest,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def write_model(
    path: str | Path, fitted: Fitted, record: Record, provenance: Provenance, *, force: bool
) -> None:
    """Write a model, completely or not at all."""
    document = ModelDocument(
        settings=fitted.settings,
        species=fitted.representation.species,
        baseline=fitted.baseline.name,
        n_projections=len(fitted.representation.projections),
        kernel_errors=tuple(p.kernel_error for p in fitted.representation.projections),
        feature_scale=fitted.representation.feature_scale,
        kernel_scale=fitted.kernel_scale,
        pp_intercept=fitted.pp_intercept,
        pp_noise=fitted.pp_variance.noise_variance if fitted.pp_variance else None,
        pp_target_variance=fitted.pp_variance.variance if fitted.pp_variance else None,
        calibrations=_documents(fitted.calibrations),
        forces_calibrations=_documents(fitted.forces_calibrations),
        stress_calibrations=_documents(fitted.stress_calibrations),
        training_novelty=fitted.training_novelty,
        training_spread=fitted.training_spread,
        record=record,
        provenance=provenance,
    )
    write_tensors(path, _tensors(fitted), document, format=FORMAT, version=PROTOCOL, force=force)


def _documents(calibrations: Mapping[str, Calibration]) -> dict[str, CalibrationDocument]:
    return {
        name: CalibrationDocument(method=c.method, parameters=c.parameters())
        for name, c in calibrations.items()
    }


def _tensors(fitted: Fitted) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "representatives": fitted.representatives,
        "origins": fitted.origins,
        "weights": fitted.weights,
        "intercepts": fitted.intercepts,
        "pp_weights": fitted.pp_weights,
        "baseline": fitted.baseline.full,
        "baseline_members": fitted.baseline.members,
        "membership": fitted.membership,
    }
    for s, projection in enumerate(fitted.representation.projections):
        tensors[f"projection_{s}"] = projection.matrix
    if fitted.pp_variance is not None:
        rows = np.tril_indices(len(fitted.representatives))
        tensors["pp_whitening"] = fitted.pp_variance.whitening[rows]
        tensors["pp_posterior"] = fitted.pp_variance.posterior[rows]
    return tensors


def read_model_document(path: str | Path) -> ModelDocument:
    """Read only the description of a model."""
    return read_document(path, ModelDocument, format=FORMAT, version=PROTOCOL)


def read_model(path: str | Path) -> tuple[Fitted, Record, Provenance]:
    """Read a model; a `StorageError` says what is wrong with the file."""
    tensors, document = read_tensors(path, ModelDocument, format=FORMAT, version=PROTOCOL)
    sizes = check_tensors(tensors, _expected(document), path=path, sizes=_sizes(document))
    try:
        fitted = _build(document, tensors, sizes["r"])
        _check_representation(fitted.representation, sizes["d"])
    except (QualmsError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise StorageError(path, f"the parts do not belong together ({error})") from error
    return fitted, document.record, document.provenance


def _check_representation(representation: Representation, n_features: int) -> None:
    """Refuse tensors that are not those of the hyper-parameters."""
    plain = Representation(representation.soap, representation.species)
    raw = tuple(projection.matrix.shape[0] for projection in representation.projections)
    if raw not in ((), plain.widths):
        raise ValueError(f"projections of {raw} features instead of {plain.widths}")
    if representation.n_features != n_features:
        raise ValueError(f"{n_features} features instead of {representation.n_features}")


def _sizes(document: ModelDocument) -> dict[str, int]:
    return {
        "n_members": document.settings.n_members,
        "species": len(document.species),
        "rows": document.record.n_rows,
    }


def _expected(document: ModelDocument) -> dict[str, TensorSpec]:
    expected = {
        "representatives": TensorSpec("f", ("r", "d")),
        "origins": TensorSpec("i", ("r", 2)),
        "weights": TensorSpec("f", ("r", "n_members")),
        "intercepts": TensorSpec("f", ("n_members",)),
        "pp_weights": TensorSpec("f", ("r",)),
        "baseline": TensorSpec("f", ("species",)),
        "baseline_members": TensorSpec("f", ("species", "n_members")),
        "membership": TensorSpec("u", ("rows", "n_members")),
    }
    for s in range(document.n_projections):
        expected[f"projection_{s}"] = TensorSpec("f", (f"D{s}", f"q{s}"))
    if document.pp_noise is not None:
        for name in ("pp_whitening", "pp_posterior"):
            expected[name] = TensorSpec("f", ("triangle",))
    return expected


def _build(document: ModelDocument, tensors: dict[str, Any], r: int) -> Fitted:
    pairs = zip(range(document.n_projections), document.kernel_errors, strict=True)
    projections = tuple(Projection(tensors[f"projection_{s}"], error) for s, error in pairs)
    elements = range(1, len(chemical_symbols))
    if not set(document.species) <= set(elements) or list(document.species) != sorted(
        set(document.species)
    ):
        raise ValueError(f"species {document.species}")
    return Fitted(
        settings=document.settings,
        representation=Representation(
            document.settings.representation,
            document.species,
            projections,
            document.feature_scale,
            precise=document.settings.mechanical,
        ),
        representatives=tensors["representatives"],
        origins=tensors["origins"],
        kernel_scale=document.kernel_scale,
        weights=tensors["weights"],
        intercepts=tensors["intercepts"],
        pp_weights=tensors["pp_weights"],
        pp_intercept=document.pp_intercept,
        baseline=Baseline(
            document.baseline, document.species, tensors["baseline"], tensors["baseline_members"]
        ),
        calibrations=_calibrations(document, document.calibrations),
        forces_calibrations=_calibrations(document, document.forces_calibrations, optional=True),
        stress_calibrations=_calibrations(document, document.stress_calibrations, optional=True),
        pp_variance=_variance(document, tensors, r),
        membership=tensors["membership"],
        training_novelty=document.training_novelty,
        training_spread=document.training_spread,
    )


def _calibrations(
    document: ModelDocument,
    documents: Mapping[str, CalibrationDocument],
    *,
    optional: bool = False,
) -> dict[str, Calibration]:
    if optional and not documents:
        return {}
    calibrations = {
        name: build_calibration(c.method, c.parameters) for name, c in documents.items()
    }
    if document.settings.calibration not in calibrations:
        raise ValueError(f"no calibration {document.settings.calibration}")
    typical = np.array([document.training_spread or 1.0])
    for name, calibration in calibrations.items():
        with np.errstate(all="ignore"):
            std = float(calibration.std(typical, document.settings.n_members)[0])
        if not 0 <= std < np.inf:
            raise ValueError(f"calibration {name} gives an error bar of {std}")
    return calibrations


def _variance(document: ModelDocument, tensors: dict[str, Any], r: int) -> ProjectedVariance | None:
    if document.pp_noise is None or document.pp_target_variance is None:
        return None
    factors = []
    for name in ("pp_whitening", "pp_posterior"):
        if tensors[name].size != r * (r + 1) // 2:
            raise ValueError(f"{name} has {tensors[name].size} elements")
        factor = np.zeros((r, r), dtype=tensors[name].dtype)
        factor[np.tril_indices(r)] = tensors[name]
        if np.any(np.diag(factor) <= 0):
            raise ValueError(f"{name} is not a Cholesky factor")
        factors.append(factor)
    return ProjectedVariance(factors[0], factors[1], document.pp_noise, document.pp_target_variance)


# What is kept of a training run besides the model.
def make_record(data: TrainingSet, outcome: Outcome, stages: Stages) -> Record:
    """Return sizes, errors and times of a training run."""
    internal = outcome.internal
    z = None if internal is None else internal.residuals
    return Record(
        n_structures=len(data.frames),
        n_rows=len(data.y),
        n_environments=data.n_environments,
        n_unlabelled=data.n_unlabelled,
        n_isolated=data.n_isolated,
        n_duplicates=data.n_duplicates,
        n_internal=0 if z is None else len(z),
        rmse=None if z is None else float(np.sqrt(np.mean(z**2))),
        mae=None if z is None else float(np.mean(np.abs(z))),
        effective_rank=len(outcome.fitted.representatives),
        noise=float(np.sqrt(outcome.full.noise_variance[0])),
        target_std=outcome.target_std,
        solver=outcome.solution,
        seconds=dict(stages.seconds),
        **_of_forces(data, outcome),
    )


def _of_forces(data: TrainingSet, outcome: Outcome) -> dict[str, Any]:
    labels, noise = data.mechanics, outcome.joint_noise
    if labels is None or noise is None:
        return {}
    n_virial_rows = int(np.count_nonzero(labels.is_virial))
    n_force_rows = len(labels.y) - n_virial_rows
    found: dict[str, Any] = {
        "n_force_rows": n_force_rows,
        "n_virial_rows": n_virial_rows,
        "n_without_forces": labels.n_without,
        "n_without_stress": labels.n_without_virial,
        "forces_noise": float(np.sqrt(noise.forces)) if n_force_rows else None,
        "virial_noise": None if noise.virials is None else float(np.sqrt(noise.virials)),
    }
    for name, of in (("forces", outcome.of_forces), ("stress", outcome.of_stress)):
        if of.internal is not None:
            z = of.internal.residuals
            found[f"{name}_rmse"] = float(np.sqrt(np.mean(z**2)))
            found[f"{name}_mae"] = float(np.mean(np.abs(z)))
            found[f"{name}_internal"] = of.n_structures
    return found
