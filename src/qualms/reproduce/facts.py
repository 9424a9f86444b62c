"""What a model is made of, in words: points, representatives, hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qualms.atomistic.settings import Settings
from qualms.features.hypers import Compression, Soap
from qualms.features.hypers import Scale as SoapScale
from qualms.reproduce.problems import Scale, Split, csd_settings, qm9_settings
from qualms.reproduce.results import Results

_NONE = "none"


def facts(results: Results) -> str:
    """Say what was trained on, and how."""
    seed = results.seeds[0]
    crystals = " Sizes of sub-samples count crystals." if results.name == "csd-crystals" else ""
    small = "" if results.scale == "paper" else " A tenth of what the paper has."
    return (
        f"{seed.n_train:,} training, {seed.n_validation:,} validation and {seed.n_test:,} test "
        f"points from {_source(results)}; {seed.n_representatives:,} representatives by farthest "
        f"point sampling out of {seed.n_environments:,} environments; "
        f"{asked_for(results).n_members} members.{crystals}{small} {_fewer(results)}"
        f"{described(results.representation)}"
    )


def _source(results: Results) -> str:
    return f"{results.source}{f' without {results.left_out}' if results.left_out else ''}"


def asked_for(results: Results) -> Settings:
    """Return what was to be done: as many representatives and members as the paper has."""
    scale: Scale = "paper" if results.scale == "paper" else "small"
    if results.name == "qm9":
        return qm9_settings(scale)
    split: Split = "atoms" if results.name == "csd-atoms" else "crystals"
    return csd_settings(split, scale)


def _fewer(results: Results) -> str:
    """Say why there are fewer representatives than were asked for, if there are."""
    kept = [seed.n_representatives for seed in results.seeds]
    chosen = min(asked_for(results).n_representatives, results.seeds[0].n_environments)
    if min(kept) >= chosen:
        return ""
    listed = f"{min(kept):,}" if len(set(kept)) == 1 else f"{min(kept):,} to {max(kept):,}"
    return (
        f"Of the {chosen:,} representatives asked for, {listed} are used. What the others would "
        "add to these is less than a millionth of the prior variance, which kernel rows in single "
        "precision cannot tell from nothing: they are dropped when the kernel is whitened. "
    )


def differing(first: Results, second: Results) -> list[list[str]]:
    """Return rows of what differs between two models: a name, and both values."""
    values = [_hyper_parameters(r.representation) for r in (first, second)]
    for found, results in zip(values, (first, second), strict=True):
        found["representatives used"] = f"{results.seeds[0].n_representatives:,}"
    names = dict.fromkeys(name for found in values for name in found)
    rows = [[name, *(found.get(name, "") for found in values)] for name in names]
    return [row for row in rows if row[1] != row[2]]


def _hyper_parameters(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the hyper-parameters of SOAP by name, those of several scales one after the other."""
    soap = Soap.model_validate(stored)
    scales = [_of_scale(scale) for scale in soap.scales]
    values = {name: [scale[name] for scale in scales] for name in scales[0]}
    found = {n: v[0] if len(set(v)) == 1 else "; ".join(v) for n, v in values.items()}
    return found | {"ζ": f"{soap.exponent:g}", "compression": compressed(stored)}


def described(stored: Mapping[str, Any]) -> str:
    """Say what the hyper-parameters of SOAP are."""
    soap = Soap.model_validate(stored)
    scales = []
    for found in map(_of_scale, soap.scales):
        near = found["radial scaling"]
        scaled = "no radial scaling" if near == _NONE else f"radial scaling of {near}"
        scales.append(
            f"cutoff {found['cutoff']}, Gaussians of {found['Gaussians']}, {found['basis']}, "
            f"{scaled}"
        )
    return f"SOAP: {'; '.join(scales)}; ζ = {soap.exponent:g}; {compressed(stored)}."


def _of_scale(scale: SoapScale) -> dict[str, str]:
    near = scale.radial_scaling
    return {
        "cutoff": f"{scale.cutoff:g} Å",
        "Gaussians": f"{scale.gaussian_width:g} Å",
        "basis": f"{scale.n_radial} radial functions, l ≤ {scale.l_max}",
        "radial scaling": _NONE if near is None else f"{near.scale:g} Å, m = {near.exponent:g}",
    }


def compressed(stored: Mapping[str, Any]) -> str:
    """Say to how many features those of SOAP are compressed."""
    soap = Soap.model_validate(stored)
    chosen = soap.compression
    if chosen is None:
        return "not compressed"
    found = chosen if isinstance(chosen, Compression) else Compression()
    pays = "" if chosen is found else " if that pays"
    each = " of each cutoff" if len(soap.scales) > 1 else ""
    return f"{found.n_features:,} components ({found.method}){each}{pays}"
