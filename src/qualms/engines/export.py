"""Files by which engines use a model.

Those that the inputs of LAMMPS and i-PI name say which model, and where qualms is. They are code,
which names the model by its path and its digest. What comes from the user stands in them as string
literals of a few harmless characters. A model of metatomic is complete, and needs neither.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import qualms
from qualms.arrays import check_integer
from qualms.ase import Calculator
from qualms.atomistic.model import AtomisticModel
from qualms.engines.calculators import check_elements, make_calculator
from qualms.errors import InputError, unknown_choice
from qualms.features.soap import SoapRepresentation
from qualms.io.files import (
    AnyPath,
    atomic_output,
    atomic_path,
    check_input,
    check_not_input,
    digest_of,
)

__all__ = ["ENGINES", "export"]


class _Engine(NamedTuple):
    """How a file for an engine is written, and how it is used; models have no template."""

    template: str
    usage: str


#: Triple quotes enclose the code for LAMMPS, in which it replaces no variables.
_LAMMPS = dedent('''\
    # Energies, forces and virial, with uncertainties, of the model
    #   {path}
    # for `units metal`; written by qualms {version}. Use: include FILE, after the atoms and masses.
    # f_qualms[1]: uncertainty of the energy, eV; f_qualms[2]: largest uncertainty of a force, eV/A;
    # d_qualms_std: that of the force on each atom.
    pair_style zero 2.0 nocoeff
    pair_coeff * *
    python qualms_attach input 1 SELF format p here """
    def qualms_attach(pointer):
        import os, sys
        path, problem = sys.path[:], None
        try:
            if sys.version_info[:2] != {python}:
                raise ImportError('LAMMPS has Python %d.%d, ' % sys.version_info[:2]
                    + 'qualms was installed for Python %d.%d' % {python})
            # The modules of LAMMPS and its MPI library come before those of qualms. In a virtual
            # environment, they may be missing or belong to another LAMMPS.
            for system in ([], ['/usr/lib/python3/dist-packages']):
                sys.path[:] = system + path
                try:
                    import lammps
                    lmp = lammps.lammps(ptr=pointer)
                    lmp.get_mpi_comm()
                    break
                except (AttributeError, ImportError) as error:
                    problem = error
                    for name in [*sys.modules]:
                        if name.split('.')[0] in ('lammps', 'mpi4py'):
                            del sys.modules[name]
            else:
                raise ImportError('its Python module, of Debian the package python3-lammps, '
                    'cannot be used (%s)' % problem)
            sys.path[:] = {folders} + path
            from qualms.engines.lammps import attach_exported
        except ImportError as error:
            sys.stderr.write('ERROR: qualms cannot be used by this LAMMPS: %s.' % error + chr(10))
            sys.stderr.flush()
            os._exit(1)
        attach_exported(lmp, {path}, {digest}, {elements}, {every})
    """
    python qualms_attach invoke
    ''')

_IPI = dedent('''\
    """Driver of i-PI for a model of qualms, with its members as a committee; by qualms {version}.

    In the input of i-PI, with the elements from a file in a format of ASE:

        <ffdirect name="qualms">
          <pes>custom</pes> <pes_path>FILE</pes_path>
          <parameters>{{template: init.xyz}}</parameters>
        </ffdirect>

    As a client of a socket: i-pi-py_driver -m custom -P FILE -o template=init.xyz -u -a ADDRESS

    Members are calibrated: <alpha> of <ffcommittee> must be 1, its default, and <parse_json> true.
    """

    from qualms.engines.ipi import Driver

    __DRIVER_NAME__ = "qualms"
    __DRIVER_CLASS__ = "QualmsDriver"


    class QualmsDriver(Driver):
        """The model, by its path and the SHA-256 of the file."""

        model = {path}
        digest = {digest}
    ''')

#: Engines, by name.
ENGINES = {
    "lammps": _Engine(_LAMMPS, "include {name}"),
    "ipi": _Engine(_IPI, "<pes>custom</pes> <pes_path>{name}</pes_path>"),
    "metatomic": _Engine("", "metatomic_ase.MetatomicCalculator({name!r})"),
}
del _LAMMPS, _IPI


def export(
    model: AnyPath,
    to: str,
    output: AnyPath,
    *,
    types: Sequence[str] | None = None,
    forces_uncertainty_every: int = 1,
    force: bool = False,
) -> str:
    """Write the file by which an engine uses a model; return how it is used.

    Parameters
    ----------
    model : path
        Of the file that `AtomisticModel.save` wrote. It is named by its absolute path.
    to : {"lammps", "ipi", "metatomic"}
    output : path
    types : sequence of str, optional
        LAMMPS: element of each type of atom; by default those of their masses.
    forces_uncertainty_every : int
        LAMMPS: uncertainties of forces are computed in every k-th step; see
        `qualms.ase.Calculator`.
    force : bool
        Whether an existing file may be replaced.
    """
    if to not in ENGINES:
        raise unknown_choice("to", to, ENGINES)
    if types is not None and to != "lammps":
        raise InputError(
            f"`types` are types of atoms in LAMMPS; {to} has the elements of atoms.",
            parameter="types",
        )
    every = check_integer("forces_uncertainty_every", forces_uncertainty_every, 1)
    if every > 1 and to != "lammps":
        raise InputError(
            f"`forces_uncertainty_every` is for LAMMPS; {to} asks for what it needs.",
            parameter="forces_uncertainty_every",
        )
    if types is not None and not types:
        raise InputError("`types` are empty: name the element of each.", parameter="types")
    check_not_input(output, model)
    name = Path(output).name
    if to == "ipi":
        _check_module(name)
    calculator = _check(check_input(model, "model"), types)
    # LAMMPS takes the first word alone.
    quoted = f'"{name}"' if to == "lammps" and re.search(r"\s", name) else name
    usage = ENGINES[to].usage.format(name=quoted)
    if to == "metatomic":
        with atomic_path(output, force=force) as temporary:
            _save_for_metatomic(calculator, temporary, digest_of(model))
        return usage
    text = ENGINES[to].template.format(
        version=qualms.__version__,
        path=literal(str(Path(model).resolve())),
        digest=literal(digest_of(model)),
        elements=None if types is None else f"[{', '.join(map(literal, types))}]",
        every=every,
        python=sys.version_info[:2],
        folders=f"[{', '.join(map(literal, package_folders()))}]",
    )
    with atomic_output(output, force=force, mode="w") as file:
        file.write(text)
    return usage


def _check(path: Path, types: Sequence[str] | None) -> Calculator:
    """Reject a model that the engine could not use, and elements that it does not know."""
    try:
        calculator = make_calculator(path)
    except InputError as error:
        if error.parameter in ("baseline", "representation"):
            error.args = (
                f"{error} A file for an engine cannot do that; in Python, `qualms.engines.lammps."
                "attach` takes a model that was loaded so.",
            )
        raise
    check_elements(types or (), calculator)
    return calculator


def _check_module(name: str) -> None:
    """Reject names of files that i-PI cannot import, or imports in place of something else."""
    stem, suffix = Path(name).stem, Path(name).suffix
    is_package = hasattr(sys.modules.get(stem), "__path__")
    if suffix == ".py" and not is_package and stem not in sys.stdlib_module_names:
        return
    problem = "is that of another one" if suffix == ".py" else "does not end in .py"
    raise InputError(
        f"i-PI imports the file as a module, whose name {name!r} {problem}. Use a name such as "
        "qualms_pes.py.",
        parameter="output",
    )


def _save_for_metatomic(calculator: Calculator, path: Path, digest: str) -> None:
    """Write a model that runs without qualms, if all of it can."""
    model, engines = calculator.model, "The exports for LAMMPS and i-PI can use it"
    assert isinstance(model, AtomisticModel)
    if not isinstance(model.fitted.representation, SoapRepresentation):
        raise InputError(
            "The model has other features than SOAP, which a file for metatomic cannot compute. "
            f"{engines}.",
            parameter="representation",
        )
    if (potential := model.baseline_potential) is not None:
        raise InputError(
            f"The model is a difference from the baseline {potential.name}, which a file for "
            f"metatomic cannot compute. {engines}.",
            parameter="baseline",
        )
    if model.fitted.calibration.needs_novelty:
        raise InputError(
            "The uncertainty of the model depends on the novelty q, which a file for metatomic "
            f"cannot compute. {engines}; or save `AtomisticModel.load(path).with_calibration("
            "'student')` and export that.",
            parameter="calibration",
        )
    try:
        from qualms.engines.metatomic import save
    except ImportError as error:
        raise InputError(
            f"Models for metatomic need its package and PyTorch, which cannot be imported "
            f"({error}): pip install 'qualms[engines]'.",
            parameter="to",
        ) from error
    origin = f"Written by qualms {qualms.__version__}; SHA-256 of the model file: {digest}"
    save(model.fitted, path, f"{origin}\n{model.summary()}")


def literal(text: str) -> str:
    r"""Return a text as a string literal that is the same for Python, in all quotes, and one line.

    Characters other than letters, digits and a few others are escape sequences, such as ``\x22``.
    """
    escaped = re.sub(r"[^A-Za-z0-9/._ +=@,~-]", lambda match: f"\\U{ord(match[0]):08x}", text)
    return f"'{escaped}'"


def package_folders() -> list[str]:
    """Return the folders in which Python finds qualms and the packages that it needs."""
    names = {"site-packages", "dist-packages"}
    folders = [str(Path(qualms.__file__).parents[1])]
    folders += [folder for folder in sys.path if Path(folder).name in names]
    return [*dict.fromkeys(folders)]
