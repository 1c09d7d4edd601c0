import json
from dataclasses import replace

import pytest

from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._verdict import judge
from jaxft_launch.storm._verdict_text import verdict_json, verdict_text
from tests.chaos.cases import disturbed, finished, undisturbed, with_history, with_step, without_step

ISSUED_KEYS = (
    "kills",
    "steps_committed",
    "steps_lost",
    "stall_ms",
    "back_s",
    "digests_equal",
    "matches_undisturbed",
)


def with_digest(record: RunRecord, index: int, digest: str | None, step: int = 10) -> RunRecord:
    changed = replace(record.histories[index], finished=finished(step, digest))
    return with_history(record, changed)


def test_a_success() -> None:
    verdict = judge(disturbed(), undisturbed())
    assert verdict.ok
    assert verdict.problems == ()
    assert verdict.steps_committed == 10
    assert verdict.steps_lost == 0
    assert [(o.kill.group, o.stall_s, o.back_s) for o in verdict.kills] == [("group-1", 0.75, 2.75)]
    assert verdict.undisturbed_s_per_step == 1.0
    assert verdict.first_difference is None


def test_a_lost_step_is_a_failure_and_counts_once_however_many_reasons_there_are() -> None:
    record = with_history(disturbed(), with_step(disturbed().histories[0], 8, shards=(0, 0, 1, 2)))
    verdict = judge(record, undisturbed())
    assert len(verdict.lost) == 2
    assert verdict.steps_lost == 1
    assert not verdict.ok
    assert verdict.digests_equal
    assert verdict.matches_undisturbed


@pytest.mark.parametrize("index", [0, 2, 3])
@pytest.mark.parametrize("digest", ["d1", None])
def test_one_group_with_another_digest_or_none(index: int, digest: str | None) -> None:
    verdict = judge(with_digest(disturbed(), index, digest), undisturbed())
    assert not verdict.digests_equal
    assert not verdict.matches_undisturbed
    assert not verdict.ok


def test_a_group_that_did_not_finish_has_no_digest() -> None:
    record = with_history(disturbed(), replace(disturbed().histories[2], finished=None))
    verdict = judge(record, undisturbed())
    assert verdict.digests == {"group-0": "d0", "group-1": None, "group-2": "d0"}
    assert not verdict.ok


def test_the_digest_of_an_earlier_step_does_not_count() -> None:
    assert judge(with_digest(disturbed(), 0, "d0", step=9), undisturbed()).digests["group-0"] is None


def test_the_digest_of_a_killed_incarnation_does_not_count() -> None:
    record = with_digest(disturbed(), 1, "d1")
    assert judge(record, undisturbed()).ok


def test_digests_that_nobody_reported_are_not_equal() -> None:
    record = undisturbed()
    for index in range(3):
        record = with_digest(record, index, None)
    verdict = judge(record, record)
    assert not verdict.digests_equal
    assert not verdict.matches_undisturbed


def test_equal_digests_that_are_not_the_undisturbed_ones() -> None:
    verdict = judge(disturbed(), undisturbed(digest="d1"))
    assert verdict.digests_equal
    assert not verdict.matches_undisturbed
    assert not verdict.ok


def test_an_undisturbed_run_whose_groups_differ_matches_nothing() -> None:
    assert not judge(disturbed(), with_digest(undisturbed(), 2, "d1")).matches_undisturbed


def test_the_first_step_at_which_the_runs_differ_is_named() -> None:
    record = undisturbed(digest="d1")
    for index in range(3):
        changed = with_step(with_step(record.histories[index], 9, loss=7.0), 4, loss=8.0)
        record = with_history(record, changed)
    verdict = judge(disturbed(), record)
    assert verdict.first_difference == 4
    assert "differ from step 4 on" in verdict_text(verdict, seed=1)


def test_a_victim_that_never_contributed_again_is_a_failure() -> None:
    record = disturbed()
    idle = replace(record.histories[2], steps=record.histories[2].steps[:1])
    verdict = judge(with_history(record, idle), undisturbed())
    assert verdict.kills[0].back_s is None
    assert verdict.problems == ("group-1, killed at step 3, did not contribute again",)


def test_a_victim_that_only_fetched_the_last_state_found_the_job_too_short() -> None:
    record = disturbed()
    caught_up = replace(record.histories[2].steps[0], step=10)
    late = replace(record.histories[2], steps=(caught_up,))
    verdict = judge(with_history(record, late), undisturbed())
    assert verdict.kills[0].back_s is None
    assert verdict.problems == ()
    assert verdict.too_short == (
        "group-1, killed at step 3, came back only after the last step; give the job more steps",
    )
    assert verdict.incomplete
    other = replace(late, finished=finished(10, "d1"))
    assert not judge(with_history(record, other), undisturbed()).incomplete


def test_a_survivor_that_never_committed_again_is_a_failure() -> None:
    record = disturbed()
    silent = replace(record.histories[0], steps=record.histories[0].steps[:3])
    verdict = judge(with_history(record, silent), undisturbed())
    assert "a survivor did not commit again after group-1 was killed at step 3" in verdict.problems


def test_a_ledger_that_does_not_add_up_is_a_failure() -> None:
    record = disturbed()
    end = replace(finished(10), ledger=False, ledger_text="sample 3 was used twice")
    verdict = judge(with_history(record, replace(record.histories[2], finished=end)), undisturbed())
    assert verdict.problems == ("the samples that group-1 used: sample 3 was used twice",)
    end = replace(end, ledger=True)
    assert judge(with_history(record, replace(record.histories[2], finished=end)), undisturbed()).ok


def test_too_few_steps_are_a_failure() -> None:
    verdict = judge(replace(disturbed(), planned_steps=12), undisturbed())
    assert "10 steps were committed instead of 12" in verdict.problems


def test_problems_of_either_run_are_failures() -> None:
    assert judge(replace(disturbed(), problems=("a hang",)), undisturbed()).problems == ("a hang",)
    verdict = judge(disturbed(), replace(undisturbed(), problems=("a hang",)))
    assert verdict.problems == ("undisturbed run: a hang",)
    assert not verdict.ok


def test_of_a_run_that_was_cut_short_only_the_cause_is_told() -> None:
    cut = replace(undisturbed(), planned_steps=50, planned_kills=3, problems=("group-1 failed",))
    verdict = judge(with_history(cut, replace(cut.histories[0], finished=None)), None)
    assert verdict.problems == ("group-1 failed",)
    assert "FAILED. Not every group finished. Not everything went as planned." in verdict_text(
        verdict, seed=1
    )


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (
            replace(
                disturbed(), too_short="group-1 returned only after the job was over; give the job more steps"
            ),
            "group-1 returned only after",
        ),
        (replace(disturbed(), planned_kills=3), "only 1 of 3 kills could be placed"),
    ],
)
def test_a_job_that_is_over_before_its_faults_is_no_failure_and_no_success(
    record: RunRecord, told: str
) -> None:
    late = replace(record.histories[2], finished=None)
    for each in (record, with_history(record, late)):
        verdict = judge(each, undisturbed())
        assert verdict.incomplete
        assert not verdict.ok
        text = verdict_text(verdict, seed=1)
        assert text.startswith("VERDICT: INCOMPLETE. Nothing was lost, and no bit differs")
        (line,) = [line for line in text.splitlines() if line.startswith("  no room")]
        assert told in line
        result = verdict_json(verdict, seed=1)
        assert result["verdict"] == "incomplete"
        assert told in result["problems"][0]
        assert result["too_short"] == result["problems"]


def test_what_is_worse_than_too_few_steps_is_a_failure() -> None:
    record = replace(disturbed(), planned_kills=3)
    other = replace(record.histories[0], finished=replace(finished(10), digest="other"))
    lost = with_history(record, with_step(record.histories[0], 8, shards=(0, 0, 1, 2)))
    for verdict in (
        judge(with_history(record, other), undisturbed()),
        judge(replace(record, problems=("a hang",)), undisturbed()),
        judge(replace(record, too_short="group-1 was late"), None),
        judge(lost, undisturbed()),
    ):
        assert not verdict.ok
        assert not verdict.incomplete, verdict
        assert "VERDICT: FAILED." in verdict_text(verdict, seed=1)
        assert verdict_json(verdict, seed=1)["verdict"] == "failed"


def test_a_job_that_was_too_short_is_checked_as_far_as_it_came() -> None:
    record = replace(disturbed(), too_short="group-1 returned only after the job was over")
    end = replace(finished(10), ledger=False, ledger_text="sample 3 was used twice")
    wrong = judge(with_history(record, replace(record.histories[0], finished=end)), undisturbed())
    assert wrong.problems == ("the samples that group-0 used: sample 3 was used twice",)
    assert not wrong.incomplete
    hangs = judge(record, replace(undisturbed(), problems=("a hang",)))
    assert hangs.problems == ("undisturbed run: a hang",)
    assert not hangs.incomplete


def test_without_a_final_state_only_the_steps_are_said_to_be_equal() -> None:
    record = replace(disturbed(), too_short="group-1 returned only after the job was over")
    for history in record.histories:
        record = with_history(record, replace(history, finished=None))
    verdict = judge(record, undisturbed())
    assert verdict.incomplete
    first, *_ = verdict_text(verdict, seed=1).splitlines()
    assert first == (
        "VERDICT: INCOMPLETE. Nothing was lost, and no loss of a step differs from the undisturbed run's, but no "
        "group finished, and the job had no room for the whole plan."
    )


def test_an_undisturbed_run_that_lost_something_is_no_measure() -> None:
    record = undisturbed()
    for index in range(3):
        record = with_history(record, without_step(record.histories[index], 2))
    (problem,) = judge(disturbed(), record).problems
    assert problem.startswith("undisturbed run: step 2: no group reports it")


def test_without_an_undisturbed_run_there_is_no_success() -> None:
    verdict = judge(disturbed(), None)
    assert not verdict.ok
    assert not verdict.matches_undisturbed
    assert "did not take place" in verdict_text(verdict, seed=1)


def test_a_run_in_which_nothing_at_all_happened_can_be_judged() -> None:
    empty = RunRecord(groups=("group-0",), planned_steps=5, planned_kills=1, problems=("no start",))
    verdict = judge(empty, None)
    assert not verdict.ok
    assert "VERDICT: FAILED." in verdict_text(verdict, seed=1)
    json.dumps(verdict_json(verdict, seed=1))


def test_json_has_the_promised_keys_first_and_rounds() -> None:
    result = json.loads(json.dumps(verdict_json(judge(disturbed(), undisturbed()), seed=7)))
    assert tuple(result)[: len(ISSUED_KEYS)] == ISSUED_KEYS
    assert result["kills"] == 1
    assert result["steps_committed"] == 10
    assert result["steps_lost"] == 0
    assert result["stall_ms"] == [750.0]
    assert result["back_s"] == [2.75]
    assert result["digests_equal"] is True
    assert result["matches_undisturbed"] is True
    assert result["ok"] is True
    assert result["verdict"] == "success"
    assert result["problems"] == result["too_short"] == []
    assert result["seed"] == 7
    assert result["victims"] == ["group-1"]
    assert result["undisturbed_s_per_step"] == 1.0
    assert result["versions"]["jax"]


def test_json_says_null_where_something_never_happened() -> None:
    result = verdict_json(judge(replace(disturbed(), histories=()), None), seed=7)
    assert result["stall_ms"] == [None]
    assert result["back_s"] == [None]
    assert result["undisturbed_s_per_step"] is None


def test_the_text_of_a_success() -> None:
    assert verdict_text(judge(disturbed(), undisturbed()), seed=7) == (
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


def test_the_text_of_a_failure_says_what_and_where() -> None:
    record = disturbed()
    for step in range(1, 10):
        record = with_history(record, with_step(record.histories[0], step, shards=(0, 0)))
    text = verdict_text(judge(with_digest(record, 0, "d1"), undisturbed()), seed=7)
    assert "VERDICT: FAILED. Work was lost. The groups did not all end with the same state." in text
    assert "step 1: group-0 (incarnation 0) computed shard 0 2 times" in text
    assert "and 4 more reasons" in text
    assert "group-0 d1, group-1 d0, group-2 d0" in text
