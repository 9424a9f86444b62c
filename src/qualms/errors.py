"""Exceptions and warnings."""

from __future__ import annotations


class QualmsError(Exception):
    """Base class of every error that qualms raises on purpose."""


class InputError(QualmsError, ValueError):
    """An argument cannot be used.

    `parameter` is the one to change, as the caller spells it, `given` its value, shape or count,
    `expected` names accepted values, and `remedy` what to do, if that does not already state it.
    """

    def __init__(self, parameter: str, given: object, expected: str, remedy: str = "") -> None:
        message = f"{parameter}={given} cannot be used: expected {expected}."
        super().__init__(f"{message} {remedy}".rstrip())
        self.parameter, self.given = parameter, given
        self.expected, self.remedy = expected, remedy

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
