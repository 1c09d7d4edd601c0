import pytest

from tests.clusters import digest_alone
from tests.faults.trial import STEPS


@pytest.fixture
def undisturbed() -> str:
    """The digest of the training alone."""
    return digest_alone(STEPS)
