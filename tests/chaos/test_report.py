"""The report of a storm, from handmade records."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxft_launch.storm._events import FinishedEvent, StepEvent
from jaxft_launch.storm._network import LEAST_DAMAGED_BYTES
from jaxft_launch.storm._options import StormOptions
from jaxft_launch.storm._record import Fault, History, Kill, RunRecord
from jaxft_launch.storm._report import storm_json, storm_text
from jaxft_launch.storm._runs import conclude
from jaxft_launch.storm._verdict import Verdict, judge
from jaxft_launch.storm.chaos import few_steps_text, slowed_text

GROUPS = ("group-0", "group-1", "group-2")
STEPS = 20


def event(step: int, **changes: Any) -> StepEvent:
    return StepEvent(
        t_s=float(step), step=step, loss=1.0, seconds=1.0, members=GROUPS, **{"shards": (), **changes}
    )


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


def undisturbed() -> RunRecord:
    alone = History(
        group="alone",
        steps=tuple(event(step) for step in range(1, STEPS + 1)),
        finished=FinishedEvent(t_s=20.0, step=STEPS, digest="d0"),
    )
    return RunRecord(groups=("alone",), planned_steps=STEPS, histories=(alone,))


def verdict() -> Verdict:
    return judge(record(), undisturbed())


def test_json_says_what_was_hit_and_what_it_cost() -> None:
    result = json.loads(json.dumps(storm_json(verdict(), record(), seed=7)))
    assert result["kills"] == 3
    assert result["hit_phases"] == {"compute": 1, "vote": 1, "heal": 1}
    assert result["aimed_phases"] == {"vote": 1, "any": 1, "heal": 1}
    assert result["hit_groups"] == {"group-0": 0, "group-1": 2, "group-2": 1}
    assert result["hit_steps"] == [kill.step for kill in record().kills]
    assert result["double_deaths"] == 1
    assert [hit["strike"] for hit in result["hits"]] == [0, 0, 1]
    # The death of a joiner stalls no group; the first kill of group-1 was not followed by a return.
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
    first, *_, last = (kill.step for kill in record().kills)
    assert f"  at steps           {first} to {last}, of {STEPS}\n" in text
    assert "each once" in text
    assert "undisturbed in one process\n" in text


def stop(t_s: float, seconds: float, strike: int) -> Fault:
    return Fault(kind="stop", group="group-2", t_s=t_s, seconds=seconds, strike=strike, step=int(t_s))


def with_faults(*faults: Fault) -> RunRecord:
    return replace(record(), faults=faults, planned_faults=len(faults))


def test_faults_are_told_by_kind_with_what_they_cost() -> None:
    faults = with_faults(stop(12.5, 1.0, 5), stop(15.5, 2.0, 6))
    judged = judge(faults, undisturbed())
    assert judged.ok
    result = json.loads(json.dumps(storm_json(judged, faults, seed=7)))
    assert result["faults_by_kind"] == {
        "stop": {
            "count": 2,
            "standstill_s_median": 1.0,
            "standstill_s_max": 1.0,
            "back_s_median": 0.5,
            "back_s_max": 0.5,
        }
    }
    assert [(fault["seconds"], fault["back_s"]) for fault in result["faults"]] == [
        (1.0, {"group-2": 0.5}),
        (2.0, {"group-2": 0.5}),
    ]
    assert result["participation"] == 1.0
    text = storm_text(judged, faults, seed=7)
    assert "other faults       2 of 2" in text
    assert (
        "stop             2; the job stood still for median 1.0 s, max 1.0 s; back in after its end:" in text
    )


def test_a_victim_of_a_stop_that_only_fetched_the_last_state_found_the_job_too_short() -> None:
    run = with_faults(stop(12.0, 6.5, 5))
    *others, last = run.histories
    caught_up = event(STEPS, attempts=0)
    late = replace(last, steps=(*last.steps[:4], caught_up))
    judged = judge(replace(run, histories=(*others, late)), undisturbed())
    assert judged.problems == ()
    assert judged.too_short == (
        "group-2, away after the stop at step 12, came back only after the last step; give the job more steps",
    )
    assert judged.incomplete


def test_faults_with_nothing_to_damage_need_no_more_steps() -> None:
    run = replace(with_faults(stop(12.5, 1.0, 5)), planned_faults=3, undamaged=2)
    judged = judge(run, undisturbed())
    (text,) = judged.too_short
    assert text.startswith(f"2 corruptions found no piece of {LEAST_DAMAGED_BYTES // 1024} KiB to damage")
    assert "leave out corrupt from --faults" in text
    assert judged.incomplete
    both = judge(replace(run, planned_faults=4), undisturbed()).too_short
    assert both == ("only 1 of 4 faults could be placed before the job was over; give it more steps", text)


def test_only_a_failure_is_one_to_investigate(capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(record(), problems=("the job hangs",))
    for run, status, asks in (
        (broken, 1, True),
        (replace(record(), planned_faults=3), 1, False),
        (record(), 0, False),
    ):
        assert conclude(StormOptions(), judge(run, undisturbed()), run) == status
        assert ("--keep FOLDER" in capsys.readouterr().out) == asks


def test_too_few_steps_are_told_ahead_and_quick_ones_are_slowed_down() -> None:
    times = {"own_s": 0.5, "most_pace_s": 2.0, "lasts_s": 80.0}
    assert few_steps_text(10, **times) == (
        "10 steps are few for 80 s of faults, since each takes 0.5 s and is made 2 s longer at most: a victim may "
        "return too late. Give the program 32 steps or more, or pass fewer --kills"
    )
    assert (few_steps_text(32, **times), slowed_text(10, **times)) == ("", "")
    assert slowed_text(100, **times) == "; steps are slowed down so that the faults have 80 s"
