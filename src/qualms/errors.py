"""Exceptions and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any


class QualmsError(Exception):
    """Base class of every error that qualms raises on purpose."""


class InputError(QualmsError, ValueError):
    """An argument, an option or a file cannot be used.

    The message is a sentence or two, written for the case: what is wrong, what would be right, and
    what to do. Names of arguments stand between backticks in it, alone (`n_members`) or with a
    value (`force=True`); the command line shows its own options in their place.

    Parameters
    ----------
    message : str
    parameter : str
        The argument to change, as the caller spells it.
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # The default would rebuild the exception from its message alone.
        return partial(type(self), parameter=self.parameter), self.args


class WorkersError(QualmsError):
    """Workers, or their scheduler, ended."""


class NumericalError(QualmsError, ArithmeticError):
    """A computation cannot be carried out to a meaningful accuracy."""


class CalibrationError(QualmsError, ValueError):
    """The data cannot determine a calibration."""


class ExactFitError(CalibrationError):
    """Members agree with each other and with the reference to rounding: there is no error."""


class UncertaintyError(QualmsError, RuntimeError):
    """A prediction is less certain than the user allows.

    Parameters
    ----------
    message : str
    quantity : str
        "energy", "forces", "novelty" or "extrapolation".
    value, limit : float
        Of the quantity.
    atom : int or None
        The atom that has this value.
    atoms : Atoms
        The structure, without predictions and labels.
    """

    def __init__(
        self,
        message: str,
        quantity: str,
        value: float,
        limit: float,
        atom: int | None,
        atoms: Any,
    ) -> None:
        super().__init__(message)
        self.quantity, self.value, self.limit = quantity, value, limit
        self.atom, self.atoms = atom, atoms

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        parts = (self.quantity, self.value, self.limit, self.atom, self.atoms)
        return type(self), (*self.args, *parts)


class QualmsWarning(UserWarning):
    """A result was returned, but the user must know about something."""


def warn(message: str) -> None:
    """Issue a `QualmsWarning` of the function that calls this one."""
    warnings.warn(message, QualmsWarning, stacklevel=3)


def unknown_choice(parameter: str, value: object, choices: Iterable[str]) -> InputError:
    """Return the error of a parameter whose value is not among some choices.

    Parameters
    ----------
    parameter : str
        The argument, as the caller spells it.
    value : object
        Its value.
    choices : iterable of str
        Values that are right.
    """
    listed = [*choices]
    message = f"`{parameter}` is {value!r}; it must be {' or '.join(listed)}."
    if len(listed) > 2:
        message = f"`{parameter}` is {value!r}; it must be one of {', '.join(listed)}."
    return InputError(message + did_you_mean(str(value), listed), parameter=parameter)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """Return a question after the most similar choice, to end a message with; "" without one."""
    folded = {choice.casefold(): choice for choice in sorted(choices)}
    similar = get_close_matches(str(value).casefold(), folded, n=1)
    return f" Did you mean {folded[similar[0]]!r}?" if similar else ""
