"""The verdict on two runs, and its text and JSON, from handmade records."""

import json
from dataclasses import replace

import pytest

from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._verdict import Verdict, judge
from jaxft_launch.storm._verdict_text import verdict_json, verdict_text
from tests.chaos.cases import disturbed, finished, undisturbed, with_history, with_step, without_step

ISSUED_KEYS = (
    *("kills", "steps_committed", "steps_lost", "stall_ms", "back_s", "digests_equal"),
    "matches_undisturbed",
)
TOO_SHORT = "group-1 returned only after the job was over; give the job more steps"


def with_digest(record: RunRecord, index: int, digest: str | None, step: int = 10) -> RunRecord:
    return with_history(record, replace(record.histories[index], finished=finished(step, digest)))


def text_of(verdict: Verdict) -> str:
    return verdict_text(verdict, seed=7)


def test_a_success() -> None:
    verdict = judge(disturbed(), undisturbed())
    assert verdict.ok
    assert (verdict.problems, verdict.steps_committed, verdict.steps_lost) == ((), 10, 0)
    assert [(o.kill.group, o.stall_s, o.back_s) for o in verdict.kills] == [("group-1", 0.75, 2.75)]
    assert (verdict.undisturbed_s_per_step, verdict.first_difference) == (1.0, None)
    assert text_of(verdict) == (
        "VERDICT: nothing was lost, and the result is the undisturbed run's, bit for bit.\n"
        "  kills              1 of 1 (group-1), --seed 7\n"
        "  steps committed    10 of 10\n"
        "  steps lost         0\n"
        "  survivors stalled  750 ms\n"
        "  victims back in    2.8 s\n"
        "  seconds per step   1.000 with kills, 1.000 undisturbed\n"
        "  final state        d0 in all 3 groups\n"
        "  undisturbed run    the same bits"
    )


def test_a_lost_step_is_a_failure_and_counts_once_however_many_reasons_there_are() -> None:
    record = with_history(disturbed(), with_step(disturbed().histories[0], 8, shards=(0, 0, 1, 2)))
    verdict = judge(record, undisturbed())
    assert (len(verdict.lost), verdict.steps_lost) == (2, 1)
    assert (verdict.ok, verdict.matches_undisturbed) == (False, True)


@pytest.mark.parametrize("index", [0, 2, 3])
@pytest.mark.parametrize("digest", ["d1", None])
def test_one_group_with_another_digest_or_none(index: int, digest: str | None) -> None:
    verdict = judge(with_digest(disturbed(), index, digest), undisturbed())
    assert (verdict.digests_equal, verdict.matches_undisturbed, verdict.ok) == (False, False, False)


def test_only_the_digest_of_the_last_step_and_of_the_last_incarnation_counts() -> None:
    unfinished = with_history(disturbed(), replace(disturbed().histories[2], finished=None))
    assert judge(unfinished, undisturbed()).digests == {"group-0": "d0", "group-1": None, "group-2": "d0"}
    assert judge(with_digest(disturbed(), 0, "d0", step=9), undisturbed()).digests["group-0"] is None
    assert judge(with_digest(disturbed(), 1, "d1"), undisturbed()).ok
    record = undisturbed()
    for index in range(3):
        record = with_digest(record, index, None)
    assert not judge(record, record).digests_equal


def test_the_first_step_at_which_the_runs_differ_is_named() -> None:
    record = undisturbed(digest="d1")
    for index in range(3):
        changed = with_step(with_step(record.histories[index], 9, loss=7.0), 4, loss=8.0)
        record = with_history(record, changed)
    verdict = judge(disturbed(), record)
    assert verdict.first_difference == 4
    assert "differ from step 4 on" in text_of(verdict)


def test_a_victim_or_a_survivor_that_never_committed_again_is_a_failure() -> None:
    record = disturbed()
    idle = replace(record.histories[2], steps=record.histories[2].steps[:1])
    verdict = judge(with_history(record, idle), undisturbed())
    assert verdict.problems == ("group-1, killed at step 3, did not contribute again",)
    silent = replace(record.histories[0], steps=record.histories[0].steps[:3])
    verdict = judge(with_history(record, silent), undisturbed())
    assert "a survivor did not commit again after group-1 was killed at step 3" in verdict.problems


def test_a_victim_that_only_fetched_the_last_state_found_the_job_too_short() -> None:
    record = disturbed()
    late = replace(record.histories[2], steps=(replace(record.histories[2].steps[0], step=10),))
    verdict = judge(with_history(record, late), undisturbed())
    assert (verdict.problems, verdict.incomplete) == ((), True)
    assert verdict.too_short == (
        "group-1, killed at step 3, came back only after the last step; give the job more steps",
    )
    other = replace(late, finished=finished(10, "d1"))
    assert not judge(with_history(record, other), undisturbed()).incomplete


def test_a_ledger_that_does_not_add_up_is_a_failure_also_of_a_job_that_was_too_short() -> None:
    for record in (disturbed(), replace(disturbed(), too_short=TOO_SHORT)):
        end = replace(finished(10), ledger=False, ledger_text="sample 3 was used twice")
        verdict = judge(with_history(record, replace(record.histories[2], finished=end)), undisturbed())
        assert verdict.problems == ("the samples that group-1 used: sample 3 was used twice",)
        assert not verdict.incomplete


def test_problems_of_either_run_are_failures() -> None:
    assert judge(replace(disturbed(), problems=("a hang",)), undisturbed()).problems == ("a hang",)
    steps = judge(replace(disturbed(), planned_steps=12), undisturbed())
    assert "10 steps were committed instead of 12" in steps.problems
    for record in (disturbed(), replace(disturbed(), too_short=TOO_SHORT)):
        verdict = judge(record, replace(undisturbed(), problems=("a hang",)))
        assert verdict.problems == ("undisturbed run: a hang",)
        assert (verdict.ok, verdict.incomplete) == (False, False)
    record = undisturbed()
    for index in range(3):
        record = with_history(record, without_step(record.histories[index], 2))
    (problem,) = judge(disturbed(), record).problems
    assert problem.startswith("undisturbed run: step 2: no group reports it")


def test_of_a_run_that_was_cut_short_only_the_cause_is_told() -> None:
    cut = replace(undisturbed(), planned_steps=50, planned_kills=3, problems=("group-1 failed",))
    verdict = judge(with_history(cut, replace(cut.histories[0], finished=None)), None)
    assert verdict.problems == ("group-1 failed",)
    text = text_of(verdict)
    assert "FAILED. Not every group finished. Not everything went as planned." in text
    assert "did not take place" in text


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (replace(disturbed(), too_short=TOO_SHORT), "group-1 returned only after"),
        (replace(disturbed(), planned_kills=3), "only 1 of 3 kills could be placed"),
    ],
)
def test_a_job_that_is_over_before_its_faults_is_no_failure_and_no_success(
    record: RunRecord, reason: str
) -> None:
    for each in (record, with_history(record, replace(record.histories[2], finished=None))):
        verdict = judge(each, undisturbed())
        assert (verdict.incomplete, verdict.ok) == (True, False)
        text = text_of(verdict)
        assert text.startswith("VERDICT: INCOMPLETE. Nothing was lost, and no bit differs")
        (line,) = [line for line in text.splitlines() if line.startswith("  no room")]
        assert reason in line
        result = verdict_json(verdict, seed=1)
        assert result["verdict"] == "incomplete"
        assert reason in result["problems"][0]
        assert result["too_short"] == result["problems"]


def test_json_has_the_promised_keys_first_and_rounds() -> None:
    result = json.loads(json.dumps(verdict_json(judge(disturbed(), undisturbed()), seed=7)))
    assert tuple(result)[: len(ISSUED_KEYS)] == ISSUED_KEYS
    assert [result[key] for key in ISSUED_KEYS] == [1, 10, 0, [750.0], [2.75], True, True]
    assert (result["ok"], result["verdict"], result["seed"]) == (True, "success", 7)
    assert (result["victims"], result["undisturbed_s_per_step"]) == (["group-1"], 1.0)
    assert result["problems"] == result["too_short"] == []
    assert result["versions"]["jax"]
    never = verdict_json(judge(replace(disturbed(), histories=()), None), seed=7)
    assert (never["stall_ms"], never["back_s"], never["undisturbed_s_per_step"]) == ([None], [None], None)
