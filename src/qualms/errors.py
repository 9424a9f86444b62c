"""What can go wrong, said so that the reader knows what to change."""

from __future__ import annotations

import sys


class QualmsError(Exception):
    """Base class of every error that qualms raises on purpose."""


class InputError(QualmsError, ValueError):
    """Something the caller gave cannot be used.

    Parameters
    ----------
    parameter : str
        The parameter to change, as the caller spells it.
    given : object
        What was given: a value, a shape or a count.
    expected : str
        What would have been accepted.
    remedy : str, optional
        What to do about it, if ``expected`` does not already say so.
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
    """Members agree with each other and with the truth to rounding: there is no error to scale."""


class UncertaintyError(QualmsError, RuntimeError):
    """A prediction is less certain than the user allows."""


class QualmsWarning(UserWarning):
    """Something the user must know, although a result was returned."""


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: one thing is not "1 things"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def level_of_user() -> int:
    """Return how far up the stack, from who asks, the code is that is neither ASE nor qualms."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in ("ase", "qualms"):
        frame, level = frame.f_back, level + 1
    return level
