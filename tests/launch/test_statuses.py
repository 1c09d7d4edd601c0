import pytest

from jaxft import _errors
from jaxft_launch.processes._statuses import AGAIN, DONE, REFUSED, Ending, ending_of, reason_of


@pytest.mark.parametrize(
    ("status", "ending"),
    [
        (0, Ending.DONE),
        (75, Ending.AGAIN),
        (78, Ending.REFUSED),
        (1, Ending.ERROR),
        (2, Ending.ERROR),
        (255, Ending.ERROR),
        (-9, Ending.KILLED),
        (-15, Ending.KILLED),
        (137, Ending.KILLED),
    ],
)
def test_what_a_status_means(status: int, ending: Ending) -> None:
    assert ending_of(status) is ending


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ([0, 0], (Ending.DONE, 0)),
        ([1, -9], (Ending.KILLED, -9)),
        ([75, 1], (Ending.ERROR, 1)),
        ([-9, 78], (Ending.REFUSED, 78)),
        ([0, 75], (Ending.AGAIN, 75)),
    ],
)
def test_the_reason_for_the_end_of_a_group(statuses: list[int], reason: tuple[Ending, int]) -> None:
    assert reason_of(statuses) == reason


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (_errors.JobFinished, DONE),
        (_errors.JoinRefused, REFUSED),
        (_errors.ConfigurationError, 1),
        (_errors.StepError, 1),
        (_errors.CoordinatorUnreachable, AGAIN),
        (_errors.CannotHeal, AGAIN),
        (_errors.SessionFailed, AGAIN),
        (_errors.Diverged, AGAIN),
        (_errors.JobHalted, AGAIN),
    ],
)
def test_the_status_of_an_error(error: type[_errors.JaxftError], status: int) -> None:
    assert error("...").exit_status == status
