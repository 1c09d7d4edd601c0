from typing import Any

import pytest

from jaxft_launch.processes._statuses import Ending
from jaxft_launch.supervise._restarts import LONGEST_WAIT_S, STEADY_S, GiveUp, Past, Restart, after

KILLED = {"ending": Ending.KILLED, "status": -9}
ERROR = {"ending": Ending.ERROR, "status": 1}


def decide(past: Past, *, step: int = 0, jitter: float = 0.0, **how: Any) -> Restart | GiveUp:
    return after(past, step=step, lived_s=1.0, max_restarts=3, jitter=jitter, **how)


@pytest.mark.parametrize("how", [KILLED, ERROR, {"ending": Ending.AGAIN, "status": 75}])
def test_a_life_with_a_new_step_is_followed_by_another_at_once(how: dict[str, Any]) -> None:
    assert decide(Past(4, 2), step=5, **how) == Restart(0.0, Past(5, 0))


def test_waits_double_and_end_after_the_limit() -> None:
    past, waits_s = Past(4), []
    while isinstance(decision := decide(past, step=4, **KILLED), Restart):
        waits_s.append(decision.wait_s)
        past = decision.past
    assert waits_s == [1.0, 2.0, 4.0]
    assert decision == GiveUp("It ended 4 times in a row without a new step (--max-restarts 3).")


def test_a_new_step_ends_the_row() -> None:
    decision = decide(Past(4, 3), step=6, **KILLED)
    assert isinstance(decision, Restart)
    assert decide(decision.past, step=6, **KILLED) == Restart(1.0, Past(6, 1))


def test_what_tells_no_steps_has_made_progress_if_it_has_lived_for_long() -> None:
    def lived(seconds: float, **how: Any) -> Restart | GiveUp:
        return after(Past(0, 1), step=0, stands_by=True, lived_s=seconds, max_restarts=3, jitter=0.0, **how)

    assert lived(STEADY_S, **KILLED) == Restart(0.0, Past())
    assert lived(STEADY_S - 1, **KILLED) == Restart(2.0, Past(0, 2))
    assert isinstance(lived(STEADY_S, **ERROR), GiveUp)  # the launcher there has tried twice


def test_a_spare_that_stood_by_for_long_has_made_progress() -> None:
    def lived(seconds: float, *, step: int = 4, **how: Any) -> Restart | GiveUp:
        return after(
            Past(4, 2), step=step, lived_s=seconds, max_restarts=2, jitter=0.0, stands_by=True, **how
        )

    assert lived(STEADY_S, **KILLED) == Restart(0.0, Past(4, 0))
    assert isinstance(lived(STEADY_S - 1, **KILLED), GiveUp)
    assert isinstance(lived(STEADY_S, **ERROR), GiveUp)
    assert lived(1.0, step=5, **KILLED) == Restart(0.0, Past(5, 0))


def test_a_wait_has_a_limit_and_a_jitter() -> None:
    how = {"ending": Ending.KILLED, "status": -9, "step": 0, "lived_s": 1.0, "max_restarts": 100}
    decision = after(Past(0, 20), jitter=0.0, **how)
    assert isinstance(decision, Restart)
    assert decision.wait_s == LONGEST_WAIT_S
    decision = after(Past(0, 20), jitter=0.999, **how)
    assert isinstance(decision, Restart)
    assert 0.7 * LONGEST_WAIT_S < decision.wait_s < 0.8 * LONGEST_WAIT_S


def test_a_wait_stays_at_its_limit_however_often_there_is_no_progress() -> None:
    how = {"ending": Ending.AGAIN, "status": 75, "step": 0, "lived_s": 1.0, "max_restarts": 10**9}
    for fruitless in (1023, 1024, 1025, 10**6):
        decision = after(Past(0, fruitless), jitter=0.0, **how)
        assert decision == Restart(LONGEST_WAIT_S, Past(0, fruitless + 1))


def test_an_error_is_tried_twice_without_progress() -> None:
    first = decide(Past(), **ERROR)
    assert first == Restart(1.0, Past(0, 1))
    second = decide(first.past, **ERROR)
    assert second == GiveUp(
        "It failed with exit status 1, 2 times in a row without a new step: fix the program."
    )


def test_an_error_at_the_same_step_again_is_given_up() -> None:
    past = Past()
    for _ in range(2):
        decision = decide(past, step=100, **ERROR)
        assert isinstance(decision, Restart)
        past = decision.past
    assert isinstance(decide(past, step=100, **ERROR), GiveUp)


def test_what_the_job_refuses_is_not_tried_again() -> None:
    decision = decide(Past(4), step=9, ending=Ending.REFUSED, status=78)
    assert decision == GiveUp("The job refused it (exit status 78); its log says what differs.")
