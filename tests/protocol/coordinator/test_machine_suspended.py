"""The time in which the coordinator was suspended counts for nothing: messages of that time are read after it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from jaxft_protocol.coordinator import progress
from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Ballot, Job, Options
from jaxft_protocol.messages import Evicted

from tests.protocol.coordinator.helpers import Desk, healing, members, running

SUSPENDED_S = 45.0
STEP_S = 1.0
# Eight steps, which is less than two heartbeat timeouts.
PATIENCE_S = 10.0


def trained(*names: str) -> Desk:
    """A running job whose steps take STEP_S."""
    desk = running(*names)
    for _ in range(3):
        desk.wait(STEP_S)
        desk.commit()
    return desk


def first_by_a_tick(desk: Desk) -> None:
    desk.now_s += SUSPENDED_S
    desk.tick(0.0)


def first_by_a_message(desk: Desk) -> None:
    desk.now_s += SUSPENDED_S


@pytest.mark.parametrize("suspended", [first_by_a_tick, first_by_a_message])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_it_is_not_part_of_a_step(suspended: Callable[[Desk], None], when: str) -> None:
    desk = trained("a", "b", "c")
    desk.wait(STEP_S)
    if when == "before":
        suspended(desk)
    desk.vote("a")
    desk.vote("b")
    if when == "between":
        suspended(desk)
    if when == "after":  # c dies which is noticed later
        suspended(desk)
        desk.close("c")
    else:
        desk.vote("c")
    assert desk.step == 4
    assert desk.job.recent_s[-1] == pytest.approx(STEP_S, abs=0.2)


def test_several_times_within_one_step() -> None:
    desk = trained("a", "b")
    for _ in range(3):
        desk.wait(STEP_S / 2)
        first_by_a_message(desk)
        desk.computed("a")
        desk.tick(0.0)
    desk.commit()
    assert desk.job.recent_s[-1] == pytest.approx(1.5 * STEP_S, abs=0.4)


@pytest.mark.parametrize("suspended", [first_by_a_tick, first_by_a_message])
def test_members_wait_for_others_only_while_it_runs(suspended: Callable[[Desk], None]) -> None:
    desk = trained("a", "b")
    desk.computed("a")
    desk.wait(PATIENCE_S - 2)
    suspended(desk)
    desk.computed("a")
    desk.wait(1.5)
    assert members(desk) == ["a", "b"]
    desk.wait(1.5)
    assert members(desk) == ["a"]


def test_a_joiner_that_could_continue_alone_waits_only_while_it_runs() -> None:
    desk = trained("a")
    healing(desk, "b")
    desk.ready("b")
    desk.wait(PATIENCE_S / 2)
    first_by_a_tick(desk)
    desk.wait(PATIENCE_S - 0.5)
    assert members(desk) == ["a"]
    desk.wait(1.0)
    assert members(desk) == ["b"]


def test_nobody_is_evicted_for_what_was_not_heard() -> None:
    desk = trained("a", "b")
    desk.computed("a")
    first_by_a_message(desk)
    done = desk.tick(0.0, silent=("a", "b"))
    assert not done.only(Evicted)
    assert not desk.tick(0.1, silent=("a", "b")).only(Evicted)
    assert members(desk) == ["a", "b"]


def test_all_times_of_a_ballot_move_and_none_into_the_future() -> None:
    times: dict[str, Any] = {
        field.name: 7.0 for field in dataclasses.fields(Ballot) if field.name.endswith("_s")
    }
    job = Job("job", Options(), ballot=Ballot(**times), last_tick_s=7.0)
    for began_s, moved_s in ((7.0, 47.0), (7.5, 47.0)):
        draft = Draft(dataclasses.replace(job, ballot=Ballot(**{**times, "began_s": began_s})), 47.0)
        progress.note_suspension(draft)
        moved = draft.job.ballot
        assert moved.began_s == moved_s
        assert all(getattr(moved, name) == 47.0 for name in times)
    limits = Ballot(deadline_s=9.0, gather_until_s=8.0)
    draft = Draft(dataclasses.replace(job, ballot=limits), 47.0)
    progress.note_suspension(draft)
    assert (draft.job.ballot.deadline_s, draft.job.ballot.gather_until_s) == (49.0, 48.0)
