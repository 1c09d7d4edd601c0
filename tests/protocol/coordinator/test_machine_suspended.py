"""The time in which the coordinator was suspended counts for nothing: messages of that time are read after it."""

import dataclasses
from typing import Any

import pytest
from jaxft_protocol.coordinator import progress
from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Ballot, Job, Options, Suspended
from jaxft_protocol.messages import Evicted

from tests.protocol.coordinator.helpers import Desk, healing, members, running

SUSPENDED_S = 45.0
STEP_S = 1.0
# Eight steps, which is less than two heartbeat timeouts.
PATIENCE_S = 10.0
# Of a ballot: when something is to happen, which may be in the future.
LIMITS = {"deadline_s", "gather_until_s"}


def trained(*names: str) -> Desk:
    """A running job whose steps take STEP_S."""
    desk = running(*names)
    for _ in range(3):
        desk.wait(STEP_S)
        desk.commit()
    return desk


def suspend(desk: Desk) -> None:
    desk.now_s += SUSPENDED_S
    assert not desk.do(Suspended(SUSPENDED_S)).effects


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_it_is_not_part_of_a_step(when: str) -> None:
    desk = trained("a", "b", "c")
    desk.wait(STEP_S)
    if when == "before":
        suspend(desk)
    desk.vote("a")
    desk.vote("b")
    if when == "between":
        suspend(desk)
    if when == "after":  # c has died, which is noticed now
        suspend(desk)
        desk.close("c")
    else:
        desk.vote("c")
    assert desk.step == 4
    assert desk.job.recent_s[-1] == pytest.approx(STEP_S, abs=0.2)


def test_members_wait_for_others_only_while_it_runs() -> None:
    desk = trained("a", "b")
    desk.computed("a")
    desk.wait(PATIENCE_S - 2)
    suspend(desk)
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
    suspend(desk)
    desk.wait(PATIENCE_S - 0.5)
    assert members(desk) == ["a"]
    desk.wait(1.0)
    assert members(desk) == ["b"]


def test_nobody_is_evicted_for_what_was_not_heard() -> None:
    desk = trained("a", "b")
    desk.computed("a")
    suspend(desk)
    done = desk.tick(0.0, silent=("a", "b"))
    assert not done.only(Evicted)
    assert not desk.tick(0.1, silent=("a", "b")).only(Evicted)
    assert members(desk) == ["a", "b"]


def test_all_times_of_a_ballot_move_and_none_into_the_future() -> None:
    times: dict[str, Any] = {
        field.name: 7.5 for field in dataclasses.fields(Ballot) if field.name.endswith("_s")
    }
    job = Job("job", Options(), ballot=Ballot(**times))
    for began_s, moved_s in ((3.0, 43.0), (7.5, 47.0)):
        draft = Draft(dataclasses.replace(job, ballot=Ballot(**{**times, "began_s": began_s})), 47.0)
        progress.suspended(draft, 40.0)
        moved = draft.job.ballot
        assert moved.began_s == moved_s
        assert all(getattr(moved, name) == 47.0 for name in times.keys() - {"began_s"} - LIMITS)
        assert all(getattr(moved, name) == 47.5 for name in LIMITS)


def test_groups_that_may_come_back_have_as_long_as_they_would_have_had() -> None:
    desk = trained("a", "b")
    desk.close("a")
    desk.close("b")
    desk.come("stale", step=2, digest="old", incarnation=9, history=desk.job.history)
    desk.wait(1.0)
    suspend(desk)
    desk.tick(0.0)
    desk.wait(Options().heartbeat_timeout_s - 2.0)
    assert desk.step == 3, "no decision before the holders of step 3 had their time"
    desk.come("a", step=3, incarnation=1, history=desk.job.history)
    assert desk.step == 3


def test_a_holder_whose_hello_is_unread_is_waited_for() -> None:
    """The job had waited long enough for it, but not yet since another group came."""
    desk = trained("a", "b")
    desk.close("a")
    desk.close("b")
    desk.wait(2 * Options().heartbeat_timeout_s)
    waits = dataclasses.replace(desk.job.options, founding_wait_s=None)
    desk.job, history = dataclasses.replace(desk.job, options=waits), desk.job.history
    desk.come("stale", step=2, digest="old", incarnation=9, history=history)
    suspend(desk)
    desk.tick(0.0)
    desk.wait(0.5)
    assert desk.step == 3
    desk.come("a", step=3, history=history)
    desk.wait(0.5)
    assert (members(desk), desk.step) == (["a"], 3)


def pinning(digest: int) -> Desk:
    """Three members, of which the last sends another digest of its state for a heal, with messages unread."""
    desk = trained("a", "b", "c")
    desk.tells_digests = False
    desk.come("joiner", digest="fresh")
    suspend(desk)
    desk.tick(0.0)
    for name, heard in (("a", 7), ("b", 7), ("c", digest)):
        if "joiner" in desk.job.groups and desk.group("joiner").pinned_step is not None:
            desk.pinned(name, "joiner", heard)
    return desk


def test_digests_of_donors_that_are_unread_are_waited_for() -> None:
    assert "c" in pinning(7).job.groups
    assert "c" not in pinning(8).job.groups, "its state is not the majority's"


@pytest.mark.parametrize("first", ["vote", "tick"])
def test_while_the_store_does_not_answer_no_step_is_under_way_but_members_are_judged(first: str) -> None:
    """Messages are handled, and there are no ticks; the commit that begins the next step leaves at the end."""
    desk = trained("a", "b")
    desk.now_s += SUSPENDED_S
    if first == "tick":
        desk.tick(0.0)
    desk.wait(STEP_S if first == "tick" else 0.0)
    desk.commit()
    assert desk.job.recent_s[-1] == pytest.approx(STEP_S if first == "tick" else 0.0, abs=0.2)
    desk.computed("a")
    desk.now_s += PATIENCE_S + 1
    desk.tick(0.0)
    desk.tick(0.1)
    assert members(desk) == ["a"]
