from collections.abc import Callable

import pytest

from tests.faults.trial import STEPS
from tests.processes.harness import digest_alone


@pytest.fixture(scope="session")
def undisturbed_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The digest of the training alone, for so many steps, with these flags: made once."""
    known: dict[tuple[int, tuple[str, ...]], str] = {}

    def digest(steps: int, *flags: str) -> str:
        if (steps, flags) not in known:
            known[steps, flags] = digest_alone(tmp_path_factory.mktemp("alone"), steps, *flags)
        return known[steps, flags]

    return digest


@pytest.fixture(scope="session")
def undisturbed(undisturbed_of: Callable[..., str]) -> str:
    return undisturbed_of(STEPS)
