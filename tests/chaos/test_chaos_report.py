"""What a storm reports, from records made by hand."""

import json
from typing import Any

import pytest

from jaxft._chaos._report import median, p99, storm_json, storm_text
from jaxft._launch._events import FinishedEvent, StepEvent
from jaxft._launch._record import History, Kill, RunRecord
from jaxft._launch._verdict import Verdict, judge

GROUPS = ("group-0", "group-1", "group-2")
STEPS = 20


def event(step: int, **changes: Any) -> StepEvent:
    return StepEvent(t_s=float(step), step=step, loss=1.0, seconds=1.0, **{"shards": (), **changes})


def life(group: str, number: int, steps: range, *, ends: bool = False, ledger: bool = True) -> History:
    shard = GROUPS.index(group)
    end = FinishedEvent(t_s=20.0, step=STEPS, digest="d0", ledger=ledger, ledger_text="each once")
    return History(
        group=group,
        incarnation=number,
        steps=tuple(event(step, shards=(shard,)) for step in steps),
        finished=end if ends else None,
    )


def kill(group: str, number: int, t_s: float, phase: str, strike: int, aim: str = "") -> Kill:
    return Kill(
        group=group, incarnation=number, t_s=t_s, step=int(t_s), strike=strike, phase=phase, aim=aim or phase
    )


def record() -> RunRecord:
    """Groups 1 and 2 die together at 3.5 s; group-1 again while it heals, at 5.5 s; they are back at 8 and 10 s."""
    return RunRecord(
        groups=GROUPS,
        planned_steps=STEPS,
        planned_kills=3,
        kills=(
            kill("group-1", 0, 3.5, "vote", 0),
            kill("group-2", 0, 3.5, "compute", 0, aim="any"),
            kill("group-1", 1, 5.5, "heal", 1),
        ),
        histories=(
            life("group-0", 0, range(1, STEPS + 1), ends=True),
            life("group-1", 0, range(1, 4)),
            life("group-1", 1, range(0)),
            life("group-1", 2, range(10, STEPS + 1), ends=True),
            life("group-2", 0, range(1, 4)),
            life("group-2", 1, range(8, STEPS + 1), ends=True),
        ),
    )


def verdict() -> Verdict:
    alone = History(
        group="alone",
        steps=tuple(event(step) for step in range(1, STEPS + 1)),
        finished=FinishedEvent(t_s=20.0, step=STEPS, digest="d0"),
    )
    return judge(record(), RunRecord(groups=("alone",), planned_steps=STEPS, histories=(alone,)))


def test_the_storm_is_a_success_though_two_died_at_once_and_one_on_its_way_back() -> None:
    assert verdict().problems == ()
    assert verdict().ok


def test_json_says_what_was_hit_and_what_it_cost() -> None:
    result = json.loads(json.dumps(storm_json(verdict(), record(), seed=7)))
    assert result["kills"] == 3
    assert result["hit_phases"] == {"compute": 1, "vote": 1, "heal": 1}
    assert result["aimed_phases"] == {"vote": 1, "any": 1, "heal": 1}
    assert result["hit_groups"] == {"group-0": 0, "group-1": 2, "group-2": 1}
    assert result["double_deaths"] == 1
    assert [hit["strike"] for hit in result["hits"]] == [0, 0, 1]
    # The death of a joiner stalls nobody; the first kill of group-1 was not followed by a return.
    assert result["stall_ms_median"] == result["stall_ms_max"] == 500.0
    assert result["back_s_median"] == result["back_s_max"] == 4.5
    assert result["ledger"] == dict.fromkeys(GROUPS, True)
    assert result["duration_s"] == 19.0
    assert result["s_per_kill"] == 6.33
    assert result["ok"]


def test_the_text_says_the_same() -> None:
    text = storm_text(verdict(), record(), seed=7)
    assert text.startswith(
        "VERDICT: nothing was lost, and the result is the undisturbed run's, bit for bit.\n"
    )
    assert "3 of 3, --seed 7; two groups at once: 1" in text
    assert "compute 1, vote 1, heal 1" in text
    assert "group-0 0, group-1 2, group-2 1" in text
    assert "each once" in text


def test_a_run_in_which_nothing_happened_can_be_reported() -> None:
    empty = RunRecord(groups=GROUPS, planned_steps=5, planned_kills=2, problems=("no start",))
    cut = judge(empty, None)
    assert "VERDICT: FAILED." in storm_text(cut, empty, seed=1)
    assert json.loads(json.dumps(storm_json(cut, empty, seed=1)))["s_per_kill"] is None


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (2, 2), (99, 99), (100, 99), (200, 198), (1000, 990)]
)
def test_p99_is_the_smallest_value_that_99_of_100_do_not_exceed(count: int, expected: int) -> None:
    assert p99(range(1, count + 1)) == expected


def test_of_nothing_there_is_no_median_and_no_p99() -> None:
    assert median([]) is None
    assert p99([]) is None
