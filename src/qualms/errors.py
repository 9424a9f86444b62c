"""Exceptions and warnings."""

from __future__ import annotations

import sys


class QualmsError(Exception):
    """Base class of every error that qualms raises on purpose."""


class InputError(QualmsError, ValueError):
    """An argument cannot be used.

    Parameters
    ----------
    parameter : str
        The parameter to change, as the caller spells it.
    given : object
        The value, shape or count that was given.
    expected : str
        Accepted values.
    remedy : str, optional
        What to do, if ``expected`` does not already state it.
    """

    def __init__(self, parameter: str, given: object, expected: str, remedy: str = "") -> None:
        message = f"{parameter}={given} cannot be used: expected {expected}."
        super().__init__(f"{message} {remedy}".rstrip())
        self.parameter = parameter
        self.given = given
        self.expected = expected
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # The default would rebuild the exception from its one-string message.
        return type(self), (self.parameter, self.given, self.expected, self.remedy)


class NumericalError(QualmsError, ArithmeticError):
    """A computation cannot be carried out to a meaningful accuracy."""


class CalibrationError(QualmsError, ValueError):
    """The data cannot determine a calibration."""


class ExactFitError(CalibrationError):
    """Members agree with each other and with the reference to rounding: there is no error."""


class UncertaintyError(QualmsError, RuntimeError):
    """A prediction is less certain than the user allows."""


class QualmsWarning(UserWarning):
    """A result was returned, but the user must know about something."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def level_of_user() -> int:
    """Return the stack level of the first caller outside ASE and qualms, for warnings."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in ("ase", "qualms"):
        frame, level = frame.f_back, level + 1
    return level
