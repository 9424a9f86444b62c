"""Hyper-parameters of the SOAP representation, by name and by hand.

They are pydantic models: validated when made, and written into the model file as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qualms.errors import InputError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RadialScaling(_Frozen):
    """Weight u(r) = c / (c + (r/r₀)^m) of a neighbour at distance r: near ones matter more.

    Willatt, Musil & Ceriotti, Phys. Chem. Chem. Phys. 20, 29661 (2018).

    Attributes
    ----------
    scale : float
        r₀ in Å.
    exponent : float
        m.
    rate : float
        c.
    """

    scale: Positive = 2.0
    exponent: Positive = 6.0
    rate: Positive = 1.0


class Scale(_Frozen):
    """The environment of an atom, out to one cutoff. Eqs. (14)–(16), Musil et al. 2019.

    Attributes
    ----------
    cutoff : float
        r_cut in Å.
    smoothing : float, optional
        Width in Å over which f_cut of Eq. (16) falls to zero. Without it neighbours fade with the
        radial basis functions.
    gaussian_width : float
        Standard deviation in Å of the Gaussians g.
    n_radial, l_max : int
        Number of radial functions R_n, and largest l.
    radial_basis : {"gto", "polynomial"}
    radial_scaling : RadialScaling, optional
    center_weight : float
        Weight of the atom at the centre.
    weight : float
        Of this scale in a sum over several.
    """

    cutoff: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 5.0
    smoothing: Positive | None = None
    gaussian_width: Positive = 0.3
    n_radial: Annotated[int, Field(ge=1, le=100)] = 6
    l_max: Annotated[int, Field(ge=0, le=20)] = 5
    radial_basis: Literal["gto", "polynomial"] = "gto"
    radial_scaling: RadialScaling | None = RadialScaling()
    center_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    weight: Positive = 1.0


class Compression(_Frozen):
    """Fewer features per scale.

    Attributes
    ----------
    method : {"pca", "pairs", "fps", "cur"}
        Principal components, of all features or of those of single pairs of species; or columns
        chosen by farthest points or by leverage scores.
    n_features : int
        What remains; a representation with fewer features is left as it is.
    """

    method: Literal["pca", "pairs", "fps", "cur"] = "pca"
    n_features: Annotated[int, Field(ge=1)] = 1000


class Soap(_Frozen):
    """All hyper-parameters of a representation and its kernel. Eqs. (13)–(16), Musil et al. 2019.

    Attributes
    ----------
    scales : tuple of Scale
        The kernel is the weighted sum of the kernels of all scales.
    exponent : float
        ζ, to which the kernel of Eq. (13) is raised.
    normalize : bool
        Whether power spectra are scaled to unit length.
    compression : Compression, "auto" or None
        "auto" compresses to 1000 principal components if that saves time in training, or if there
        are so many representatives that rounding of float32 would limit the accuracy. For an
        energy with `smoothing`, which has forces, it keeps 32 components for each pair of species,
        or 192 in all.
    engine : {"auto", "dscribe", "featomic"}
        "auto" is dscribe, the faster one for values, unless `smoothing` asks for featomic.
    """

    scales: Annotated[tuple[Scale, ...], Field(min_length=1, max_length=16)] = (Scale(),)
    exponent: Annotated[float, Field(ge=1, le=20)] = 2.0
    normalize: bool = True
    compression: Compression | Literal["auto"] | None = "auto"
    engine: Literal["auto", "dscribe", "featomic"] = "auto"

    @model_validator(mode="after")
    def _engine_can_do_it(self) -> Self:
        smooth = any(scale.smoothing is not None for scale in self.scales)
        polynomial = any(scale.radial_basis == "polynomial" for scale in self.scales)
        if smooth and (self.engine == "dscribe" or polynomial):
            raise ValueError("smoothing needs engine featomic and radial_basis gto")
        if polynomial and self.engine == "featomic":
            raise ValueError("radial_basis polynomial needs engine dscribe")
        return self

    @property
    def resolved_engine(self) -> Literal["dscribe", "featomic"]:
        """The engine that "auto" stands for."""
        if self.engine != "auto":
            return self.engine
        smooth = any(scale.smoothing is not None for scale in self.scales)
        return "featomic" if smooth else "dscribe"


#: organic suits molecules such as those of QM9, nmr shieldings in molecular crystals (both compared
#: with their neighbours in `python -m benchmarks presets`); general is a starting point.
PRESETS: dict[str, Soap] = {
    "organic": Soap(),
    "nmr": Soap(
        scales=(
            Scale(
                cutoff=5.0,
                gaussian_width=0.3,
                n_radial=8,
                l_max=7,
                radial_scaling=RadialScaling(scale=2.0, exponent=4.0),
            ),
        ),
    ),
    "general": Soap(
        scales=(
            Scale(
                cutoff=5.5,
                gaussian_width=0.5,
                n_radial=8,
                l_max=6,
                radial_scaling=RadialScaling(scale=3.0, exponent=4.0),
            ),
        ),
    ),
}

_SCALE_FIELDS = frozenset(Scale.model_fields)


def make_soap(representation: str | Soap | dict[str, Any] = "organic", **overrides: Any) -> Soap:
    """Return hyper-parameters from a preset, with some of them changed.

    Parameters
    ----------
    representation : str, Soap or dict
        Name of a preset; hyper-parameters; or a dict with the fields of `Soap`, or of `Scale` for a
        single cutoff, and optionally ``preset``.
    **overrides
        Fields of `Soap`, or of `Scale`, which then apply to every scale.

    Examples
    --------
    >>> make_soap("organic", cutoff=4.5, exponent=3).scales[0].cutoff
    4.5
    """
    if isinstance(representation, dict):
        changes = {**representation, **overrides}
        return _changed(make_soap(changes.pop("preset", "organic")), changes)
    if isinstance(representation, str):
        if representation not in PRESETS:
            raise InputError("representation", repr(representation), f"one of {', '.join(PRESETS)}")
        representation = PRESETS[representation]
    if not isinstance(representation, Soap):
        raise InputError("representation", type(representation).__name__, "a name, dict or Soap")
    return _changed(representation, overrides)


def _changed(soap: Soap, overrides: dict[str, Any]) -> Soap:
    unknown = sorted(map(str, set(overrides) - _SCALE_FIELDS - set(Soap.model_fields)))
    if unknown:
        known = sorted(_SCALE_FIELDS | set(Soap.model_fields))
        raise InputError("representation", f"unknown {', '.join(unknown)}", ", ".join(known))
    document = soap.model_dump()
    document |= {k: v for k, v in overrides.items() if k in Soap.model_fields}
    of_scales = {k: v for k, v in overrides.items() if k in _SCALE_FIELDS}
    if of_scales and isinstance(document["scales"], (list, tuple)):
        document["scales"] = [_with(scale, of_scales) for scale in document["scales"]]
    try:
        return Soap.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        # Fields that may be of several kinds are followed by the name of a class.
        parts = [str(part) for part in first["loc"] if part != Compression.__name__]
        name = ".".join(parts) or "representation"
        raise InputError(name, repr(first["input"]), first["msg"]) from None


def _with(scale: Any, overrides: dict[str, Any]) -> Any:
    """Return a scale with some fields changed; what is no scale is left for the validation."""
    given = scale.model_dump() if isinstance(scale, Scale) else scale
    return {**given, **overrides} if isinstance(given, dict) else given
