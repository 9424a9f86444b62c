"""Labels that a structure came with, kept beside what is predicted in their place."""

from __future__ import annotations

from typing import Any

from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.io.extxyz import per_atom_properties, per_config_properties

from qualms.storage.origin import is_prediction

#: How columns end that say which atoms made a structure uncertain.
_OF_ATOMS = (
    "",
    "_uncertainty",
    "_local_uncertainty",
    "_force_uncertainty",
    "_novelty",
    "_ensemble",
)


def was_predicted(frame: Atoms, store: dict[str, Any], name: str) -> bool:
    """Return whether what a structure came with is an earlier prediction, not a reference."""
    results = getattr(frame.calc, "results", None) or {}
    if results.get(name) is not None:
        return is_prediction(frame, name, results[name], frame.calc)
    return name in store and is_prediction(frame, name, store[name])


def set_aside_references(
    atoms: Atoms, frame: Atoms, predicted: dict[str, Any], target: str
) -> None:
    """Rename to REF_… what the prediction replaces, and what would pass for a prediction.

    ASE reads keys that it knows, such as energy and forces, as results of one calculator. Next to a
    predicted energy, forces of another origin would seem to be predicted as well. What was itself
    predicted, earlier, is no reference: it is left out, with its error bars. So is what was said of
    atoms then: the same columns may not all be written again.
    """
    replaces_prediction = was_predicted(
        frame, frame.info if predicted is atoms.info else frame.arrays, target
    )
    if f"{target}_atoms_novelty" in atoms.arrays:
        for ending in _OF_ATOMS:
            atoms.arrays.pop(f"{target}_atoms{ending}", None)
    # Members of an earlier prediction must not pass for those of this one.
    predicted.pop(f"{target}_uncertainty", None)
    predicted.pop(f"{target}_ensemble", None)
    results = getattr(frame.calc, "results", {})
    for store, before, known, found in (
        (atoms.info, frame.info, per_config_properties, per_config_properties),
        (atoms.arrays, frame.arrays, per_atom_properties, all_properties),
    ):
        references = {name: results[name] for name in known if results.get(name) is not None}
        for name in [*store]:
            if name in found or (store is predicted and name == target):
                references.setdefault(name, store.pop(name))
        if store is predicted and replaces_prediction:
            references.pop(target, None)
        for name, value in references.items():
            if name != target and was_predicted(frame, before, name):
                for ending in ("uncertainty", "ensemble"):
                    store.pop(f"{name}_{ending}", None)
            else:
                store.setdefault(f"REF_{name}", value)
