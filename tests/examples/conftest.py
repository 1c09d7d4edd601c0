"""Settings for the tests of the examples, on top of those for every test."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _optax_promotes_dtypes() -> Iterator[None]:
    """optax adds floats to integer counts, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield
