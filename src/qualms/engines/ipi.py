"""i-PI: a driver with the members as a committee, for ``ffdirect`` and for sockets.

Energies, forces and virials are those of `qualms.ase.Calculator`. The members are in the extras
that ``ffcommittee`` and ``i-pi-committee-reweight`` read; they are calibrated, so that ``alpha``
must be 1, its default.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ase import Atoms
from ipi.pes.dummy import Dummy_driver
from ipi.utils.units import unit_to_internal, unit_to_user

from qualms.arrays import Float64Array
from qualms.atomistic.structures import iter_frames
from qualms.engines.calculators import make_calculator, virial
from qualms.errors import InputError
from qualms.io.files import check_digest, check_input

__all__ = ["Driver"]

_energy = partial(unit_to_internal, "energy", "electronvolt")
_force = partial(unit_to_internal, "force", "ev/ang")
_length = partial(unit_to_user, "length", "angstrom")


class Driver(Dummy_driver):  # type: ignore[misc]
    """A model for i-PI, of which the file that ``qualms export`` writes has a subclass.

    Parameters
    ----------
    template : path
        File with the elements of the atoms, in their order, in a format that qualms reads.
    pbc : bool
        Whether the structure is periodic along all vectors of the cell, as it is for i-PI.
    *args, **kwargs
        Of ``Dummy_driver``.

    Notes
    -----
    Extras are ``committee_pot`` (N_R,), ``committee_force`` (N_R, 3n) and ``committee_virial``
    (N_R, 9), calibrated members; and the standard deviations ``energy_uncertainty`` and
    ``forces_uncertainty`` (3n,), all in atomic units.
    """

    #: Path of the model, and the SHA-256 of the file.
    model: ClassVar[str]
    digest: ClassVar[str]

    def __init__(self, template: str | Path, pbc: bool = True, *args: Any, **kwargs: Any) -> None:
        self.template, self.pbc = template, pbc
        super().__init__(*args, **kwargs)

    def check_parameters(self) -> None:
        """Read the model and the elements."""
        if self.pbc not in (True, False):
            raise InputError(f"`pbc` is {self.pbc!r}; it must be True or False.", parameter="pbc")
        check_digest(self.model, self.digest)
        self.calculator = make_calculator(self.model)
        frames = iter_frames(check_input(self.template, "template"))
        self.numbers = next(iter(frames)).numbers

    def compute_structure(
        self, cell: Float64Array, pos: Float64Array
    ) -> tuple[float, Float64Array, Float64Array, str]:
        """Return energy, forces, virial and extras of a structure, all in atomic units.

        Parameters
        ----------
        cell : (3, 3) array
            Vectors in columns.
        pos : (n, 3) array
        """
        if len(pos) != len(self.numbers):
            raise InputError(
                f"i-PI has {len(pos)} atoms, and {self.template} has {len(self.numbers)}.",
                parameter="template",
            )
        atoms = Atoms(self.numbers, _length(pos), cell=_length(cell).T, pbc=self.pbc)
        tensor, tensors = (virial(self.calculator, atoms, of) for of in ("", "_ensemble"))
        results = self.calculator.results
        forces = np.moveaxis(results["forces_ensemble"], -1, 0)
        # Flat lists would be taken for one member.
        extras = {
            "committee_pot": _energy(results["energy_ensemble"]),
            "committee_force": _force(forces.reshape(len(forces), -1)),
            "committee_virial": _energy(tensors.reshape(9, -1).T),
            "energy_uncertainty": np.array(_energy(results["energy_uncertainty"])),
            "forces_uncertainty": _force(results["forces_uncertainty"].ravel()),
        }
        return (
            float(_energy(results["energy"])),
            np.asarray(_force(results["forces"])),
            np.asarray(_energy(tensor)),
            json.dumps({name: values.tolist() for name, values in extras.items()}),
        )
