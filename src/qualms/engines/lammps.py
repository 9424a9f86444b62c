"""LAMMPS: energies, forces, virial and their uncertainties through ``fix external``.

Nothing is compiled: the fix calls a function of this module with every evaluation of the forces.
All processes know the atoms of all of them, share the environments, and keep what belongs to their
own atoms: results do not depend on the number of processes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.data import atomic_masses, atomic_numbers, chemical_symbols

from qualms.arrays import Float64Array, IntArray
from qualms.ase import Calculator
from qualms.atomistic.forces import shared_by
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import force_norm
from qualms.engines.calculators import check_elements, make_calculator, virial
from qualms.errors import InputError, QualmsError
from qualms.io.files import check_digest

__all__ = ["Attachment", "attach"]

#: The fix, and the property of atoms that has the uncertainties of their forces.
FIX = "qualms"
PROPERTY = "qualms_std"
#: Largest difference of the mass of a type from that of its element, in u.
_SAME_MASS = 0.05
#: Attachments of the input that LAMMPS runs, which nothing else refers to.
_ATTACHED: list[Attachment] = []


class _Ranks(NamedTuple):
    """Atoms of all processes, one after the other, and where those of this process are."""

    tags: IntArray
    types: IntArray
    positions: Float64Array
    own: slice


class Attachment:
    """A model that computes the forces of a LAMMPS simulation: see `attach`.

    Attributes
    ----------
    calculator : Calculator
        Its ``results`` are those of the last evaluation; atoms are in the order of their IDs.
    elements : tuple of str
        Of each type of atom.
    """

    def __init__(self, lmp: Any, calculator: Calculator, elements: Sequence[str]) -> None:
        self.calculator, self.elements = calculator, tuple(elements)
        self._lmp = lmp
        self._numbers = np.array([0, *(atomic_numbers[symbol] for symbol in elements)])
        self._comm = _communicator(lmp)

    def __call__(
        self,
        caller: object,
        step: int,
        n_local: int,
        tags: IntArray,
        positions: Float64Array,
        forces: Float64Array,
    ) -> None:
        """Fill in the forces on the atoms of this process; called by LAMMPS.

        An exception would be printed and ignored: LAMMPS is stopped instead.
        """
        try:
            self._evaluate(n_local, tags, positions, forces)
        except BaseException as error:  # also that of the keyboard
            stop(error, self._comm)

    def _evaluate(
        self, n_local: int, tags: IntArray, positions: Float64Array, forces: Float64Array
    ) -> None:
        lmp = self._lmp
        types: IntArray = np.empty(0, dtype=np.int32)
        if n_local:
            types = lmp.numpy.extract_atom("type")[:n_local]
        ranks = self._gathered(tags, types, positions)
        n_lost = lmp.get_natoms() - len(ranks.tags)
        if n_lost:
            raise InputError(
                f"{n_lost} of {lmp.get_natoms()} atoms were lost: they left a box that is not "
                "periodic, or moved too far in a step. Use a shorter timestep or a larger box.",
                parameter="lmp",
            )
        order = np.argsort(ranks.tags, kind="stable")  # of IDs: results do not depend on sorting
        low, high, xy, yz, xz, periodic, _ = lmp.extract_box()
        a, b, c = np.subtract(high, low)
        atoms = Atoms(
            self._numbers[ranks.types[order]],
            ranks.positions[order] - low,
            cell=[[a, 0, 0], [xy, b, 0], [xz, yz, c]],
            pbc=np.array(periodic, dtype=bool),
        )
        with shared_by(self._comm):
            tensor = virial(self.calculator, atoms)
        results = self.calculator.results
        own = np.argsort(order)[ranks.own]  # places of the atoms of this process
        forces[:] = results["forces"][own]
        lmp.fix_external_set_energy_global(FIX, results["energy"])
        components = tensor[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]  # xx yy zz xy xz yz
        lmp.fix_external_set_virial_global(FIX, components.tolist())
        lmp.fix_external_set_vector(FIX, 1, results["energy_uncertainty"])
        if "forces_uncertainty" in results:
            std = force_norm(results["forces_uncertainty"])
            lmp.fix_external_set_vector(FIX, 2, float(std.max()))
            if n_local:
                lmp.numpy.extract_atom(f"d_{PROPERTY}")[:n_local] = std[own]

    def _gathered(self, tags: IntArray, types: IntArray, positions: Float64Array) -> _Ranks:
        if self._comm is None:
            return _Ranks(tags, types, positions, slice(0, len(tags)))
        parts = self._comm.allgather((np.array(tags), np.array(types), np.array(positions)))
        first = sum(len(part[0]) for part in parts[: self._comm.rank])
        every = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _Ranks(next(every), next(every), next(every), slice(first, first + len(tags)))


def attach(
    lmp: Any,
    model: AtomisticModel | str | Path,
    elements: Sequence[str] | None = None,
    *,
    forces_uncertainty_every: int = 1,
    threads: int | None = None,
) -> Attachment:
    """Let a model compute the forces of a LAMMPS simulation.

    The box, the atoms and the masses of their types must be defined. Commands that follow can use

    - ``f_qualms[1]``, the uncertainty of the energy in eV, and ``f_qualms[2]``, the largest
      √(σ_x² + σ_y² + σ_z²) of the forces in eV/Å;
    - ``d_qualms_std``, that of each atom, in dumps;

    in ``thermo_style custom``, variables, ``fix halt`` and ``dump_modify thresh``. Energies and
    virials are added to those of LAMMPS. An error during a run is printed and ends the process.

    Parameters
    ----------
    lmp : lammps.lammps
        With ``units metal``. A pair style is not needed; ``pair_style zero`` avoids warnings.
    model : AtomisticModel or path
        See `qualms.ase.Calculator`.
    elements : sequence of str, optional
        Element of each type of atom; by default those that have the masses of the types.
    forces_uncertainty_every : int
        See `qualms.ase.Calculator`; values of the last structure that had them remain.
    threads : int, optional
        See `qualms.ase.Calculator`; one by default if LAMMPS has several processes.

    Returns
    -------
    Attachment
        LAMMPS refers to it as long as `lmp` exists.
    """
    if (style := lmp.extract_global("units")) != "metal":
        raise InputError(
            f"LAMMPS has `units {style}`; energies in eV and lengths in Å need `units metal`.",
            parameter="lmp",
        )
    if not lmp.extract_setting("box_exist"):
        raise InputError(
            "The box and the atoms are not defined: attach the model after read_data, "
            "read_restart or create_box.",
            parameter="lmp",
        )
    if threads is None and lmp.extract_setting("world_size") > 1:
        threads = 1
    calculator = make_calculator(
        model, threads=threads, forces_uncertainty_every=forces_uncertainty_every
    )
    if elements is None:
        elements = elements_of(lmp)
    check_elements(elements, calculator)
    n_types = lmp.extract_setting("ntypes")
    if len(elements) != n_types:
        raise InputError(
            f"`elements` are {', '.join(elements)}, but LAMMPS has {n_types} types of atoms. Name "
            "the element of each type, in their order.",
            parameter="elements",
        )
    attachment = Attachment(lmp, calculator, elements)
    lmp.command(f"fix {FIX}_std all property/atom d_{PROPERTY} ghost no")
    lmp.command(f"fix {FIX} all external pf/callback 1 1")
    lmp.command(f"fix_modify {FIX} energy yes virial yes")
    lmp.fix_external_set_vector_length(FIX, 2)
    lmp.set_fix_external_callback(FIX, attachment, lmp)
    return attachment


def elements_of(lmp: Any) -> list[str]:
    """Return the element of each type of atom, by its mass."""
    masses = lmp.extract_atom("mass")
    found = []
    for kind in range(1, lmp.extract_setting("ntypes") + 1):
        mass = float(masses[kind]) if masses else 0.0
        nearest = int(np.nanargmin(np.abs(atomic_masses - mass)))
        if nearest == 0 or abs(atomic_masses[nearest] - mass) > _SAME_MASS:
            raise InputError(
                f"Type {kind} has the mass {mass:g}, which is that of no element. Set the masses "
                "before, or name the element of each type with `elements`, or with `types` where "
                "the file is exported.",
                parameter="elements",
            )
        found.append(chemical_symbols[nearest])
    return found


def _communicator(lmp: Any) -> Any:
    """Return the MPI communicator of LAMMPS; None if it has one process."""
    size = lmp.extract_setting("world_size")
    if size == 1:
        return None
    comm = lmp.get_mpi_comm()
    if comm is None:
        raise InputError(
            f"LAMMPS has {size} processes, and the Python package mpi4py, which gathers their "
            "atoms, is missing. Install it, for the same MPI library, or use one process.",
            parameter="lmp",
        )
    return comm


def attach_exported(
    lmp: Any, path: str, digest: str, elements: Sequence[str] | None = None, every: int = 1
) -> None:
    """Attach the model of a file that ``qualms export`` wrote; an error ends the process.

    Parameters
    ----------
    lmp : lammps.lammps
    path : str
    digest : str
        SHA-256 of the model file.
    elements : sequence of str, optional
        Of each type of atom.
    every : int
        Steps from one with uncertainties of forces to the next.
    """
    try:
        check_digest(path, digest)
        _ATTACHED.append(attach(lmp, path, elements, forces_uncertainty_every=every))
    except BaseException as error:
        comm = lmp.get_mpi_comm() if lmp.extract_setting("world_size") > 1 else None
        stop(error, comm)


def stop(error: BaseException, comm: Any) -> None:
    """Print an error, and end LAMMPS on all its processes."""
    if not isinstance(error, QualmsError):
        traceback.print_exception(error)
    sys.stderr.write(f"ERROR: qualms: {' '.join(str(error).split())}\n")
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # output of LAMMPS, which is not written otherwise
    if comm is not None:
        comm.Abort(1)
    os._exit(1)
