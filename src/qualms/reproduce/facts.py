"""What a model is made of, in words: points, representatives, hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qualms.atomistic.hypers import Compression, Soap
from qualms.reproduce.problems import Scale, Split, csd_settings, qm9_settings
from qualms.reproduce.results import Results

_MEMBERS = 16


def facts(results: Results) -> str:
    """Say what was trained on, and how."""
    seed = results.seeds[0]
    crystals = " Sizes of sub-samples count crystals." if results.name == "csd-crystals" else ""
    small = "" if results.scale == "paper" else " A tenth of what the paper has."
    return (
        f"{seed.n_train:,} training, {seed.n_validation:,} validation and {seed.n_test:,} test "
        f"points from {_source(results)}; {seed.n_representatives:,} representatives by farthest "
        f"point sampling out of {seed.n_environments:,} environments; {_MEMBERS} members."
        f"{crystals}{small} {_fewer(results)}{described(results.representation)}"
    )


def _source(results: Results) -> str:
    return f"{results.source}{f' without {results.left_out}' if results.left_out else ''}"


def asked_for(results: Results) -> int:
    """Return how many representatives were to be chosen: as many as the paper has, by scale."""
    scale: Scale = "paper" if results.scale == "paper" else "small"
    if results.name == "qm9":
        return qm9_settings(scale).n_representatives
    split: Split = "atoms" if results.name == "csd-atoms" else "crystals"
    return csd_settings(split, scale).n_representatives


def _fewer(results: Results) -> str:
    """Say why there are fewer representatives than were asked for, if there are."""
    kept = [seed.n_representatives for seed in results.seeds]
    chosen = min(asked_for(results), results.seeds[0].n_environments)
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
    columns: dict[str, list[str]] = {}
    for scale in soap.scales:
        near = scale.radial_scaling
        scaled = "none" if near is None else f"{near.scale:g} Å, m = {near.exponent:g}"
        columns.setdefault("cutoff", []).append(f"{scale.cutoff:g} Å")
        columns.setdefault("Gaussians", []).append(f"{scale.gaussian_width:g} Å")
        basis = f"{scale.n_radial} radial functions, l ≤ {scale.l_max}"
        columns.setdefault("basis", []).append(basis)
        columns.setdefault("radial scaling", []).append(scaled)
    found = {name: "; ".join(values) for name, values in columns.items()}
    return found | {"ζ": f"{soap.exponent:g}", "compression": _compressed(soap)}


def described(stored: Mapping[str, Any]) -> str:
    """Say what the hyper-parameters of SOAP are."""
    soap = Soap.model_validate(stored)
    scales = []
    for scale in soap.scales:
        near = scale.radial_scaling
        scaled = "no radial scaling"
        if near is not None:
            scaled = f"radial scaling of {near.scale:g} Å, m = {near.exponent:g}"
        scales.append(
            f"cutoff {scale.cutoff:g} Å, Gaussians of {scale.gaussian_width:g} Å, "
            f"{scale.n_radial} radial functions, l ≤ {scale.l_max}, {scaled}"
        )
    return f"SOAP: {'; '.join(scales)}; ζ = {soap.exponent:g}; {_compressed(soap)}."


def _compressed(soap: Soap) -> str:
    if soap.compression is None:
        return "not compressed"
    given = isinstance(soap.compression, Compression)
    found = soap.compression if isinstance(soap.compression, Compression) else Compression()
    return f"{found.n_features:,} components ({found.method}){'' if given else ' if that pays'}"
