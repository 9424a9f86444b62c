"""Helpers that tests share."""

from contextlib import contextmanager

import pytest
from safetensors import safe_open

from qualms.errors import InputError


@contextmanager
def rejects(parameter):
    """Expect an `InputError` that names this parameter, in one line."""
    with pytest.raises(InputError) as error:
        yield error
    assert error.value.parameter == parameter
    assert "\n" not in str(error.value)


def metadata_of(path):
    """The metadata of a safetensors file."""
    with safe_open(path, "np") as file:
        return file.metadata()
