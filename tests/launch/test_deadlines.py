import math

import pytest

from jaxft._supervised._announcements import announced
from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.supervise._deadlines import DEFAULTS, Overdue, Sign, overdue, parse_deadlines

DEADLINES = {"boot": 100.0, "compute": 10.0, "vote": math.inf, "silence": 5.0}


def look(sign: Sign | None, *, now_t_s: float) -> Overdue | None:
    return overdue(sign, started_t_s=-20.0, now_t_s=now_t_s, deadlines=DEADLINES)


def sign(phase: str, *, since: float, alive: float) -> Sign:
    return Sign(phase=phase, step=7, since_t_s=since, alive_t_s=alive)


def test_a_process_that_has_told_nothing_is_booting() -> None:
    assert look(None, now_t_s=80.0) is None
    assert look(None, now_t_s=81.0) == Overdue("boot", 0, 101.0, 100.0)


def test_a_phase_that_takes_too_long() -> None:
    assert look(sign("compute", since=50.0, alive=59.0), now_t_s=60.0) is None
    assert look(sign("compute", since=50.0, alive=60.0), now_t_s=61.0) == Overdue("compute", 7, 11.0, 10.0)


def test_a_process_that_waits_for_others_has_time() -> None:
    assert look(sign("vote", since=0.0, alive=1e6), now_t_s=1e6) is None


def test_a_process_that_is_silent_is_overdue_in_any_phase() -> None:
    assert look(sign("vote", since=0.0, alive=50.0), now_t_s=56.0) == Overdue("silence", 7, 6.0, 5.0)


def test_the_phases_that_wait_for_others_have_no_deadline_by_default() -> None:
    """A process there may be the last one that holds the job's state."""
    assert {phase for phase, seconds in DEFAULTS.items() if seconds == math.inf} == {
        "wait",
        "vote",
        "outside",
    }


def test_each_announced_phase_has_a_deadline() -> None:
    for line in (
        "compute step 3 shard 1",
        "wait step 3",
        "[jaxft g] heals to step 3 from a",
        "replay step 3",
    ):
        found = announced(line)
        assert found is not None
        assert found[0] in DEFAULTS
        assert found[1] == 3


def test_deadlines_are_read_from_the_command_line() -> None:
    found = parse_deadlines("compute=5, outside=60.5,apply=0")
    assert (found["compute"], found["outside"], found["apply"]) == (5.0, 60.5, math.inf)
    assert found["exchange"] == DEFAULTS["exchange"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bake=3", "there is no phase 'bake'. Phases: boot, wait, compute"),
        ("compute", "write PHASE=SECONDS"),
        ("compute=-1", "write PHASE=SECONDS"),
        ("compute=nan", "write PHASE=SECONDS"),
        ("compute=inf", "write PHASE=SECONDS"),
    ],
)
def test_a_deadline_that_cannot_be_right_is_an_error(text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        parse_deadlines(text)
