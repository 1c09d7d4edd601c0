from typing import Any

import pytest

from jaxft_launch.supervise.core.restarts import (
    LONGEST_WAIT_S,
    STEADY_S,
    GiveUp,
    Lived,
    Past,
    Restart,
    after,
    jitter_of,
)
from jaxft_launch.supervise.core.values import Ending

KILLED = {"ending": Ending.KILLED, "status": -9}
ERROR = {"ending": Ending.ERROR, "status": 1}


def decide(past: Past, *, max_restarts: int = 3, jitter: float = 0.0, **life: Any) -> Restart | GiveUp:
    return after(past, Lived(**life), max_restarts=max_restarts, jitter=jitter)


@pytest.mark.parametrize("how", [KILLED, ERROR, {"ending": Ending.AGAIN, "status": 75}])
@pytest.mark.parametrize("committed", [5, 2], ids=["a higher step", "after a resume from a checkpoint"])
def test_a_life_with_a_new_step_is_followed_by_another_at_once(how: dict[str, Any], committed: int) -> None:
    assert decide(Past(4, 2, 1), committed=committed, **how) == Restart(0.0, Past(committed))


def test_waits_double_and_end_after_the_limit() -> None:
    past, waits_s = Past(4), []
    while isinstance(decision := decide(past, committed=4, **KILLED), Restart):
        waits_s.append(decision.wait_s)
        past = decision.past
    assert waits_s == [1.0, 2.0, 4.0]
    assert decision == GiveUp("It ended 4 times in a row without a new step (--max-restarts 3).")


def test_an_error_after_a_life_that_was_killed_is_the_first_error() -> None:
    killed = decide(Past(), **KILLED)
    assert isinstance(killed, Restart)
    failed = decide(killed.past, **ERROR)
    assert isinstance(failed, Restart)
    assert decide(failed.past, **ERROR) == GiveUp(
        "It failed with exit status 1, 2 times in a row without a new step: fix the program."
    )


def test_an_error_at_the_same_step_again_is_given_up() -> None:
    past = Past()
    for _ in range(2):
        decision = decide(past, committed=100, **ERROR)
        assert isinstance(decision, Restart)
        past = decision.past
    assert isinstance(decide(past, committed=100, **ERROR), GiveUp)


@pytest.mark.parametrize("how", [KILLED, ERROR])
def test_nothing_is_given_up_while_the_job_lives(how: dict[str, Any]) -> None:
    decision = decide(Past(4, 1000, 1000), job_lives=True, **how)
    assert isinstance(decision, Restart)
    assert decision.wait_s == LONGEST_WAIT_S
    assert (
        decision.why == "it ended 1001 times in a row without a new step, while the job continues without it"
    )


def test_what_the_job_refuses_is_not_tried_again() -> None:
    decision = decide(Past(4), committed=9, ending=Ending.REFUSED, status=78, job_lives=True)
    assert decision == GiveUp("The job refused it (exit status 78); its log names the difference.")


@pytest.mark.parametrize(
    ("lived_s", "how", "again"),
    [(STEADY_S, KILLED, True), (STEADY_S - 1, KILLED, False), (STEADY_S, ERROR, False)],
)
def test_a_spare_that_stood_by_for_long_has_made_progress(
    lived_s: float, how: dict[str, Any], *, again: bool
) -> None:
    decision = decide(Past(4, 2, 1), max_restarts=2, stands_by=True, lived_s=lived_s, **how)
    assert decision == Restart(0.0, Past(4)) if again else isinstance(decision, GiveUp)


def test_waits_of_groups_differ() -> None:
    waits_s = set[float]()
    for number in range(20):
        decision = decide(Past(0, 20), max_restarts=100, jitter=jitter_of(f"group-{number}", 3), **KILLED)
        assert isinstance(decision, Restart)
        waits_s.add(decision.wait_s)
    assert len(waits_s) == 20
    assert 0.75 * LONGEST_WAIT_S <= min(waits_s) < max(waits_s) <= LONGEST_WAIT_S
