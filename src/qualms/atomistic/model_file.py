"""Model files: one safetensors file with everything that a prediction needs.

The document is validated against a schema, and every tensor against the sizes that the document
implies, before anything is built. Nothing that the file names is imported, opened or executed here;
weights that it names are opened later if `qualms.features.learned` allows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from ase.data import atomic_numbers, chemical_symbols
from pydantic import Field

from qualms.arrays import Float64Array
from qualms.atomistic.baseline import Baseline
from qualms.atomistic.fitted import Fitted, ProjectedVariance, Provenance, Record
from qualms.atomistic.forces import kernel_terms
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET
from qualms.atomistic.settings import Settings
from qualms.calibration.conformal import Conformal
from qualms.calibration.methods import build_calibration
from qualms.calibration.points import CalibrationData
from qualms.calibration.vectors import QuantityCalibration
from qualms.errors import InputError, QualmsError
from qualms.features import AnyDocument
from qualms.features.learned import Backbone
from qualms.io.tensors import (
    LARGEST,
    Document,
    StorageError,
    TensorSpec,
    check_tensors,
    read_tensors,
    write_tensors,
)

FORMAT = "qualms model"
#: Raised whenever the meaning of a file changes.
PROTOCOL = 10

_Share = Annotated[float, Field(ge=0, le=1)]
_Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Positive = Annotated[float, Field(ge=1e-100, le=LARGEST)]
#: Factor of features or kernels.
_Factor = Annotated[float, Field(ge=1e-30, le=1e30)]
#: Smallest diagonal element of a Cholesky factor relative to the largest.
_LEAST = 1e-12


class ModelCalibrationDocument(Document):
    """Method, parameters and factors of the calibration of a quantity."""

    method: str
    parameters: dict[str, float | int]
    isotropy: _Share
    elements: dict[str, Annotated[float, Field(ge=1e-6, le=1e6)]]
    is_conformal: bool  #: whether it has conformal intervals


class PointsDocument(Document):
    """Columns of the tensor of the out-of-bag points of a quantity."""

    columns: tuple[str, ...] = Field(min_length=1)
    centre: _Share


class ModelDocument(Document):
    """Everything in a model file that is not a tensor."""

    settings: Settings
    species: tuple[int, ...] = Field(min_length=1)
    baseline: str
    features: AnyDocument
    kernel_scale: _Factor
    pp_intercept: _Number
    pp_noise: _Positive | None
    pp_target_variance: _Positive | None
    calibrations: dict[str, ModelCalibrationDocument]
    points: dict[str, PointsDocument]
    training_novelty: tuple[_Share, _Share]
    element_novelty: dict[int, Annotated[float, Field(ge=1e-12, le=1)]] = Field(
        default_factory=dict
    )
    largest_ensemble_std: float = Field(ge=0, le=LARGEST)
    std_limit: Annotated[float, Field(ge=0, le=LARGEST)] | None = None
    largest_size: tuple[int, int] | None = None
    record: Record
    provenance: Provenance


def write_model(path: str | Path, fitted: Fitted, *, force: bool) -> None:
    """Write a model, completely or not at all.

    Parameters
    ----------
    path : path-like
    fitted : Fitted
    force : bool
        Whether a file that exists is replaced.
    """
    features, tensors = fitted.representation.stored
    document = ModelDocument(
        settings=fitted.settings,
        species=fitted.representation.species,
        baseline=fitted.baseline.name,
        features=features,
        kernel_scale=fitted.kernel_scale,
        pp_intercept=fitted.pp_intercept,
        pp_noise=fitted.pp_variance.noise_variance if fitted.pp_variance else None,
        pp_target_variance=fitted.pp_variance.variance if fitted.pp_variance else None,
        calibrations={
            quantity: ModelCalibrationDocument(
                method=of.calibration.method,
                parameters=of.calibration.parameters(),
                isotropy=of.isotropy,
                elements=dict(of.elements),
                is_conformal=of.conformal is not None,
            )
            for quantity, of in fitted.calibrations.items()
        },
        points={
            quantity: PointsDocument(columns=tuple(_columns(points)), centre=points.centre)
            for quantity, points in fitted.points.items()
        },
        training_novelty=fitted.training_novelty,
        element_novelty=dict(fitted.element_novelty),
        largest_ensemble_std=fitted.largest_ensemble_std,
        std_limit=fitted.std_limit,
        largest_size=fitted.largest_size,
        record=fitted.record,
        provenance=fitted.provenance,
    )
    write_tensors(
        path, _tensors(fitted) | tensors, document, format=FORMAT, version=PROTOCOL, force=force
    )


def _tensors(fitted: Fitted) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "representatives": fitted.representatives,
        "origins": fitted.origins,
        "weights": fitted.weights,
        "intercepts": fitted.intercepts,
        "pp_weights": fitted.pp_weights,
        "baseline": fitted.baseline.full,
        "baseline_members": fitted.baseline.members,
        "baseline_span": fitted.baseline.span,
    }
    for quantity, of in fitted.calibrations.items():
        if of.conformal is not None:
            pair = of.conformal.scores, of.conformal.probabilities
            tensors[f"conformal_{quantity}"] = np.stack(pair, axis=1)
    for quantity, points in fitted.points.items():
        tensors[f"points_{quantity}"] = np.stack([*_columns(points).values()], axis=1)
    if fitted.pp_variance is not None:
        rows = np.tril_indices(len(fitted.representatives))
        tensors["pp_whitening"] = fitted.pp_variance.whitening[rows]
        tensors["pp_posterior"] = fitted.pp_variance.posterior[rows]
    return tensors


#: Out-of-bag points: arrays that all have, and that some have.
_REQUIRED = ("residuals", "ensemble_std", "n_members", "groups", "structure")
_OPTIONAL = ("posterior_std", "novelty_std")
#: Those that points of components have.
_OF_COMPONENTS = ("component_std", "multiplicity")
#: Columns of integers; elements are atomic numbers.
_INTEGERS = ("n_members", "groups", "structure", "element")


def _columns(points: CalibrationData) -> dict[str, Float64Array]:
    """Return the arrays of out-of-bag points by name, and the atomic numbers of elements."""
    arrays = {name: getattr(points, name) for name in (*_REQUIRED, *_OPTIONAL, *_OF_COMPONENTS)}
    columns = {k: np.asarray(v, dtype=np.float64) for k, v in arrays.items() if v is not None}
    if points.element is not None:
        numbers = [atomic_numbers[str(symbol)] for symbol in points.element]
        columns["element"] = np.array(numbers, dtype=np.float64)
    return columns


def read_model(path: str | Path, representation: object | None = None) -> Fitted:
    """Read a model; a `StorageError` states what is wrong with the file.

    The weights of a network, or the object that computes features, may be given.
    """
    tensors, document = read_tensors(path, ModelDocument, format=FORMAT, version=PROTOCOL)
    if representation is not None:
        backbone = document.settings.representation
        if not isinstance(backbone, Backbone):
            raise InputError(
                f"{path} has features of SOAP, which need no weights and no object. Leave out "
                "`representation`.",
                parameter="representation",
            )
        update = {"representation": backbone.with_weights(representation)}
        settings = document.settings.model_copy(update=update)
        document = document.model_copy(update={"settings": settings})
    try:
        document = _with_drawn(document, tensors)
        sizes = {
            "n_subsampled": document.settings.n_subsampled,
            "n_members": document.settings.n_subsampled + document.settings.n_drawn,
            "species": len(document.species),
        }
        sizes = check_tensors(tensors, _expected(document), path=path, sizes=sizes)
        fitted = _build(document, tensors, sizes["r"])
        if (d := fitted.representation.n_features) != sizes["d"]:
            raise ValueError(f"{sizes['d']} features instead of {d}")
        if fitted.has_label_basis:
            terms = kernel_terms(fitted.representation, fitted.representatives)
            packed = sum(term.packed_size for term in terms)
            if packed != sizes["packed"] or not all(term.is_square for term in terms):
                raise ValueError(f"{sizes['packed']} weights instead of {packed}")
    except StorageError:
        raise
    except (QualmsError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise StorageError(path, f"inconsistent parts ({error})") from error
    return fitted


def _with_drawn(document: ModelDocument, tensors: dict[str, Any]) -> ModelDocument:
    """Return the document with the number of posterior members, which once had another default."""
    settings, shape = document.settings, tensors["weights"].shape
    n = shape[1] - settings.n_subsampled if len(shape) == 2 else 0
    if settings.n_posterior is not None or n == settings.n_drawn or not 2 <= n <= 10_000:
        return document
    settings = settings.model_copy(update={"n_posterior": n})
    return document.model_copy(update={"settings": settings})


def _expected(document: ModelDocument) -> dict[str, TensorSpec]:
    functions = "packed" if document.settings.basis == "labels" else "r"
    expected = document.features.tensors() | {
        "representatives": TensorSpec("f", ("r", "d")),
        "origins": TensorSpec("i", ("r", 2)),
        "weights": TensorSpec("f", (functions, "n_members")),
        "intercepts": TensorSpec("f", ("n_members",)),
        "pp_weights": TensorSpec("f", (functions,)),
        "baseline": TensorSpec("f", ("species",)),
        "baseline_members": TensorSpec("f", ("species", "n_members")),
        "baseline_span": TensorSpec("f", ("span", "species")),
    }
    for quantity, of in document.calibrations.items():
        if of.is_conformal:
            expected[f"conformal_{quantity}"] = TensorSpec("f", (f"n_{quantity}", 2))
    for quantity, points in document.points.items():
        shape = f"points_{quantity}", len(points.columns)
        expected[f"points_{quantity}"] = TensorSpec("f", shape)
    if document.pp_noise is not None:
        for name in ("pp_whitening", "pp_posterior"):
            expected[name] = TensorSpec("f", ("triangle",))
    return expected


def _build(document: ModelDocument, tensors: dict[str, Any], r: int) -> Fitted:
    species = sorted({z for z in document.species if 0 < z < len(chemical_symbols)})
    if [*document.species] != species:
        raise ValueError(f"species {document.species}")
    features = document.settings.features
    representation = features.build(document.species, document.features, tensors)
    of_baseline = (tensors[f"baseline{part}"] for part in ("", "_members", "_span"))
    quantities = set(document.settings.keys)
    _check_record(document.record, quantities)
    if TARGET not in document.calibrations or not set(document.calibrations) <= quantities:
        raise ValueError(f"calibrations of {', '.join(document.calibrations)}")
    if not set(document.points) <= set(document.calibrations):
        raise ValueError(f"points of {', '.join(document.points)}")
    if document.element_novelty and set(document.element_novelty) != set(species):
        raise ValueError(f"limits of novelty of elements {[*document.element_novelty]}")
    of_atoms = {name for name in quantities if KINDS[name].of_atoms}
    of_atoms |= {TARGET} if document.settings.per_atom else set()
    for quantity, of in document.calibrations.items():
        if of.elements and quantity not in of_atoms:
            raise ValueError(f"factors of elements of {quantity}")
    return Fitted(
        settings=document.settings,
        representation=representation,
        representatives=tensors["representatives"],
        origins=tensors["origins"],
        kernel_scale=document.kernel_scale,
        weights=tensors["weights"],
        intercepts=tensors["intercepts"],
        pp_weights=tensors["pp_weights"],
        pp_intercept=document.pp_intercept,
        baseline=Baseline(document.baseline, document.species, *of_baseline),
        calibrations={
            quantity: _calibration(document, of, tensors.get(f"conformal_{quantity}"))
            for quantity, of in document.calibrations.items()
        },
        points={
            quantity: _points(quantity, of, tensors[f"points_{quantity}"])
            for quantity, of in document.points.items()
        },
        pp_variance=_variance(document, tensors, r),
        training_novelty=document.training_novelty,
        element_novelty=document.element_novelty,
        largest_ensemble_std=document.largest_ensemble_std,
        std_limit=document.std_limit,
        largest_size=document.largest_size,
        record=document.record,
        provenance=document.provenance,
    )


def _check_record(record: Record, quantities: set[str]) -> None:
    """Reject a record that no training of these quantities has written."""
    if TARGET not in record.quantities or not set(record.quantities) <= quantities:
        raise ValueError(f"a record of {', '.join(record.quantities)}")
    errors = record.size_curve.values()
    if not record.target_std > 0 or not all(error > 0 for error in errors) or len(errors) == 1:
        raise ValueError("a record without a standard deviation, or with errors that are not > 0")


def _calibration(
    document: ModelDocument, of: ModelCalibrationDocument, conformal: Any
) -> QuantityCalibration:
    calibration, settings = build_calibration(of.method, of.parameters), document.settings
    if calibration.n_subsampled != (settings.n_subsampled if settings.n_drawn else 0):
        raise ValueError(f"a calibration of {calibration.n_subsampled} subsampled members")
    typical = np.array([document.largest_ensemble_std or 1.0])
    with np.errstate(all="ignore"):
        std = float(calibration.std(typical, max(settings.n_members, 3))[0])
    if not 0 <= std < np.inf:
        raise ValueError(f"calibration {of.method} gives a standard deviation of {std}")
    scores = _conformal(conformal) if of.is_conformal else None
    return QuantityCalibration(calibration, of.isotropy, of.elements, scores)


def _points(quantity: str, of: PointsDocument, table: Any) -> CalibrationData:
    columns = dict(zip(of.columns, table.T, strict=True))
    required = {*_REQUIRED, *(_OF_COMPONENTS if quantity in DERIVATIVES else ())}
    allowed = {*required, *_OPTIONAL, "element"}
    is_unique = len(columns) == len(of.columns)
    if not required <= {*columns} <= allowed or not is_unique or not len(table):
        raise ValueError(f"out-of-bag points with {', '.join(columns)}")
    arrays: dict[str, Any] = {name: np.ascontiguousarray(v) for name, v in columns.items()}
    if any(np.any(v < 0) for name, v in arrays.items() if name != "residuals"):
        raise ValueError("out-of-bag points with negative values")
    if not np.all(arrays["ensemble_std"] > 0) or np.any(arrays["n_members"] < 2):
        raise ValueError("out-of-bag points without an ensemble standard deviation")
    if not np.all(arrays.get("multiplicity", 1.0) > 0):
        raise ValueError("components that are not in their tensors")
    for name in arrays.keys() & _INTEGERS:
        if not np.all((arrays[name] % 1 == 0) & (arrays[name] < 2**53)):
            raise ValueError(f"out-of-bag points with {name} that are no integers")
        arrays[name] = arrays[name].astype(np.intp)
    if "element" in arrays:
        z = arrays["element"]
        if z.min() < 1 or z.max() >= len(chemical_symbols):
            raise ValueError("out-of-bag points of atomic numbers that are no elements")
        arrays["element"] = np.array(chemical_symbols)[z]
    return CalibrationData(weights=np.ones(len(table)), centre=of.centre, **arrays)


def _conformal(pairs: Any) -> Conformal:
    scores, probabilities = pairs.T
    if not len(pairs) or scores[0] < 0 or np.any(np.diff(pairs, axis=0) < 0):
        raise ValueError("conformal scores that are not sorted")
    if not 0 < probabilities[0] <= probabilities[-1] < 1:
        raise ValueError("conformal probabilities outside of 0 to 1")
    return Conformal(scores, probabilities)


def _variance(document: ModelDocument, tensors: dict[str, Any], r: int) -> ProjectedVariance | None:
    if document.pp_noise is None or document.pp_target_variance is None:
        return None
    factors = []
    for name in ("pp_whitening", "pp_posterior"):
        if tensors[name].size != r * (r + 1) // 2:
            raise ValueError(f"{name} has {tensors[name].size} elements")
        factor = np.zeros((r, r), dtype=tensors[name].dtype)
        factor[np.tril_indices(r)] = tensors[name]
        if np.any(np.diag(factor) <= _LEAST * np.diag(factor).max()):
            raise ValueError(f"{name} is not a Cholesky factor")
        factors.append(factor)
    return ProjectedVariance(factors[0], factors[1], document.pp_noise, document.pp_target_variance)
