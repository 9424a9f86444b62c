"""Model files: one safetensors file with everything that a prediction needs.

The document is validated against a schema, and every tensor against the sizes that the document
implies, before anything is built. Nothing that the file names is imported, opened or executed here;
weights that it names are opened later if `qualms.features.weights` allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from ase.data import chemical_symbols
from pydantic import Field

from qualms.atomistic.baseline import Baseline
from qualms.atomistic.fitted import Fitted, ProjectedVariance, Provenance, Record
from qualms.atomistic.settings import Settings
from qualms.calibration.base import Calibration
from qualms.calibration.conformal import Conformal
from qualms.calibration.fitting import build_calibration
from qualms.errors import InputError, QualmsError
from qualms.features.learned import Backbone, LearnedDocument
from qualms.features.soap import SoapDocument
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
PROTOCOL = 9

_Share = Annotated[float, Field(ge=0, le=1)]
_Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Positive = Annotated[float, Field(ge=1e-100, le=LARGEST)]
#: Factor of features or kernels.
_Factor = Annotated[float, Field(ge=1e-30, le=1e30)]
#: Smallest diagonal element of a Cholesky factor relative to the largest.
_LEAST = 1e-12


class CalibrationDocument(Document):
    """Method and parameters of a calibration."""

    method: str
    parameters: dict[str, float | int]


class ModelDocument(Document):
    """Everything in a model file that is not a tensor."""

    settings: Settings
    species: tuple[int, ...] = Field(min_length=1)
    baseline: str
    features: SoapDocument | LearnedDocument
    kernel_scale: _Factor
    pp_intercept: _Number
    pp_noise: _Positive | None
    pp_target_variance: _Positive | None
    calibrations: dict[str, dict[str, CalibrationDocument]]
    isotropy: dict[str, _Share]
    species_factors: dict[str, dict[str, Annotated[float, Field(ge=1e-6, le=1e6)]]]
    conformal: tuple[str, ...]  #: quantities that have conformal intervals
    training_novelty: tuple[_Share, _Share]
    largest_ensemble_std: float = Field(ge=0, le=LARGEST)
    record: Record
    provenance: Provenance


def write_model(path: str | Path, fitted: Fitted, *, force: bool) -> None:
    """Write a model, completely or not at all."""
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
            quantity: {
                name: CalibrationDocument(method=c.method, parameters=c.parameters())
                for name, c in calibrations.items()
            }
            for quantity, calibrations in fitted.calibrations.items()
        },
        isotropy=dict(fitted.isotropy),
        species_factors={name: dict(f) for name, f in fitted.species_factors.items()},
        conformal=tuple(fitted.conformal),
        training_novelty=fitted.training_novelty,
        largest_ensemble_std=fitted.largest_ensemble_std,
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
        "membership": fitted.membership,
    }
    for quantity, conformal in fitted.conformal.items():
        pair = conformal.scores, conformal.probabilities
        tensors[f"conformal_{quantity}"] = np.stack(pair, axis=1)
    if fitted.pp_variance is not None:
        rows = np.tril_indices(len(fitted.representatives))
        tensors["pp_whitening"] = fitted.pp_variance.whitening[rows]
        tensors["pp_posterior"] = fitted.pp_variance.posterior[rows]
    return tensors


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
        update = {"representation": backbone.given(representation)}
        settings = document.settings.model_copy(update=update)
        document = document.model_copy(update={"settings": settings})
    try:
        sizes = {
            "n_subsampled": document.settings.n_subsampled,
            "n_members": document.settings.n_subsampled + document.settings.n_drawn,
            "species": len(document.species),
            "rows": document.record.quantities["energy"].n_rows,
        }
        sizes = check_tensors(tensors, _expected(document), path=path, sizes=sizes)
        fitted = _build(document, tensors, sizes["r"])
        if (d := fitted.representation.n_features) != sizes["d"]:
            raise ValueError(f"{sizes['d']} features instead of {d}")
    except StorageError:
        raise
    except (QualmsError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise StorageError(path, f"inconsistent parts ({error})") from error
    return fitted


def _expected(document: ModelDocument) -> dict[str, TensorSpec]:
    expected = document.features.tensors() | {
        "representatives": TensorSpec("f", ("r", "d")),
        "origins": TensorSpec("i", ("r", 2)),
        "weights": TensorSpec("f", ("r", "n_members")),
        "intercepts": TensorSpec("f", ("n_members",)),
        "pp_weights": TensorSpec("f", ("r",)),
        "baseline": TensorSpec("f", ("species",)),
        "baseline_members": TensorSpec("f", ("species", "n_members")),
        "baseline_span": TensorSpec("f", ("span", "species")),
        "membership": TensorSpec("u", ("rows", "n_subsampled")),
    }
    for quantity in document.conformal:
        expected[f"conformal_{quantity}"] = TensorSpec("f", (f"n_{quantity}", 2))
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
    if "energy" not in document.calibrations or not set(document.calibrations) <= quantities:
        raise ValueError(f"calibrations of {', '.join(document.calibrations)}")
    of_atoms = {"forces"} | ({"energy"} if document.settings.per_atom else set())
    if not set(document.species_factors) <= of_atoms:
        raise ValueError(f"factors of species of {', '.join(document.species_factors)}")
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
            quantity: _calibrations(document, documents)
            for quantity, documents in document.calibrations.items()
        },
        isotropy=document.isotropy,
        species_factors=document.species_factors,
        conformal={name: _conformal(tensors[f"conformal_{name}"]) for name in document.conformal},
        pp_variance=_variance(document, tensors, r),
        membership=tensors["membership"],
        training_novelty=document.training_novelty,
        largest_ensemble_std=document.largest_ensemble_std,
        record=document.record,
        provenance=document.provenance,
    )


def _calibrations(
    document: ModelDocument, documents: Mapping[str, CalibrationDocument]
) -> dict[str, Calibration]:
    calibrations = {
        name: build_calibration(c.method, c.parameters) for name, c in documents.items()
    }
    if document.settings.calibration not in calibrations:
        raise ValueError(f"no calibration {document.settings.calibration}")
    typical = np.array([document.largest_ensemble_std or 1.0])
    for name, calibration in calibrations.items():
        with np.errstate(all="ignore"):
            std = float(calibration.std(typical, max(document.settings.n_members, 3))[0])
        if not 0 <= std < np.inf:
            raise ValueError(f"calibration {name} gives a standard deviation of {std}")
    return calibrations


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
