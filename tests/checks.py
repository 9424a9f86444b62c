"""Context managers that tests share."""

from contextlib import contextmanager

import pytest

from qualms.errors import InputError


@contextmanager
def rejects(parameter):
    """Expect an `InputError` that names this parameter."""
    with pytest.raises(InputError) as error:
        yield
    assert error.value.parameter == parameter
