"""When a strike happens, and when it waits: on a handmade job, without any process."""

import io
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._events import FinishedEvent, StepEvent
from jaxft_launch.storm._faults import Victim
from jaxft_launch.storm._job import Job, Place, Program
from jaxft_launch.storm._schedule import Strike
from jaxft_launch.storm._storm import LATE_STEPS, Storm, Times
from tests import patience

GROUPS = ("group-0", "group-1", "group-2")


@dataclass
class FakeChild:
    """A process that only records the calls it gets."""

    pid: int = 1
    ended: int | None = None
    warm: bool = False
    orders: list[str] = field(default_factory=list)

    def rest(self) -> list[int]:
        return []

    def exit_code(self) -> int | None:
        return self.ended

    def order(self, text: str) -> None:
        self.orders.append(text)

    def kill(self) -> None:
        self.ended = -signal.SIGKILL


class FakeProcesses(Processes):
    def start(self, *_: Any, **__: Any) -> Any:
        return FakeChild()


def make_job(folder: Path, *, steps: int = 1000) -> Job:
    program = Program(words=("train",), steps=steps, takes_orders=True)
    processes = FakeProcesses(folder, cwd=folder)
    display = Display(io.StringIO(), name="test")
    job = Job("storm", GROUPS, program, Place(processes, display))
    job.poll()
    assert job.has_begun
    return job


def until_ended(job: Job, group: str) -> None:
    """Let a process of a group be killed from outside, and wait until the supervisor knows that."""
    incarnation = job.current(group)
    child(job, group).ended = -signal.SIGKILL
    patience.until(lambda: job.poll() or incarnation.end, f"the end of {group}")


def until_again(job: Job, group: str) -> None:
    """Wait until the supervisor has restarted a group that has committed nothing: for a second."""
    number = job.current(group).number
    patience.until(lambda: job.poll() or job.current(group).number > number, f"{group} again")


def commit(job: Job, step: int, *members: str) -> None:
    for group in members:
        job.current(group).steps.append(
            StepEvent(t_s=0.0, step=step, seconds=0.0, shards=(0,), members=members)
        )


def storm_of(*strikes: Strike) -> Storm:
    return Storm(Display(io.StringIO(), name="test"), strikes)


def struck(job: Job) -> set[str]:
    return {group for group in GROUPS if any(order.startswith("die") for order in child(job, group).orders)}


def child(job: Job, group: str) -> FakeChild:
    found: Any = job.current(group).child
    return found


def at(step: int, *groups: str, phase: str = "vote") -> Strike:
    return Strike(step, tuple(Victim(group, phase, 0.0) for group in groups))


def test_a_strike_waits_for_its_step(tmp_path: Path) -> None:
    job, storm = make_job(tmp_path), storm_of(at(5, "group-1"))
    commit(job, 4, *GROUPS)
    storm.strike(job)
    assert struck(job) == set()
    commit(job, 5, *GROUPS)
    storm.strike(job)
    assert child(job, "group-1").orders == ["die vote 0.0"]
    assert struck(job) == {"group-1"}


@pytest.mark.parametrize(
    ("victims", "members", "falls"),
    [
        (("group-0",), ("group-0",), False),
        (("group-0",), ("group-0", "group-2"), True),
        (("group-0",), ("group-1", "group-2"), False),
        (("group-0", "group-1"), ("group-0", "group-1"), False),
        (("group-0", "group-1"), ("group-0", "group-2"), False),
        (("group-0", "group-1"), GROUPS, True),
    ],
)
def test_it_waits_for_its_victims_and_for_somebody_else_who_holds_the_state(
    tmp_path: Path, victims: tuple[str, ...], members: tuple[str, ...], *, falls: bool
) -> None:
    job = make_job(tmp_path)
    commit(job, 9, *members)
    storm_of(at(5, *victims)).strike(job)
    assert struck(job) == (set(victims) if falls else set())


def test_who_is_dead_finished_or_not_there_in_person_is_no_member(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    commit(job, 9, *GROUPS)
    assert job.members_at_work() == set(GROUPS)
    until_ended(job, "group-0")
    assert job.members_at_work() == {"group-1", "group-2"}
    job.current("group-1").finished = FinishedEvent(t_s=0.0, step=9, digest=None)
    assert job.members_at_work() == {"group-2"}
    until_again(job, "group-0")  # the quorum still names it, but this process has not taken part yet
    assert job.members_at_work() == {"group-2"}


def test_the_next_strike_waits_for_the_death_of_the_last_victim_who_is_launched_again(tmp_path: Path) -> None:
    job, storm = make_job(tmp_path), storm_of(at(1, "group-1"), at(1, "group-2"))
    commit(job, 9, *GROUPS)
    storm.strike(job)
    storm.strike(job)
    assert struck(job) == {"group-1"}
    until_ended(job, "group-1")
    assert job.failed() is None  # before the death has been recorded
    storm.strike(job)
    assert [(kill.group, kill.aim, kill.incarnation) for kill in job.kills] == [("group-1", "vote", 0)]
    assert struck(job) == {"group-1", "group-2"}
    assert job.absent() == ["group-1"]
    until_again(job, "group-1")
    assert (job.failed(), job.absent()) == (None, [])


def test_a_phase_of_a_return_is_ordered_at_the_launch_and_hit_as_a_member_if_it_never_came(
    tmp_path: Path,
) -> None:
    job, storm = make_job(tmp_path), storm_of(at(1, "group-1"), at(1, "group-1", phase="replay"))
    commit(job, 9, *GROUPS)
    storm.strike(job)
    until_ended(job, "group-1")
    storm.strike(job)
    until_again(job, "group-1")
    storm.strike(job)
    again = child(job, "group-1")
    assert "die replay 0.0" in again.orders
    storm.strike(job)
    assert again.ended is None
    commit(job, 10, "group-1")
    storm.strike(job)
    assert again.ended is None  # alone: it holds the last state
    commit(job, 11, *GROUPS)
    storm.strike(job)
    assert again.ended == -signal.SIGKILL


@pytest.mark.parametrize("to_the_end", [False, True])
def test_steps_are_not_stretched_once_all_victims_are_back(tmp_path: Path, *, to_the_end: bool) -> None:
    """Unless the storm is to last for a set time."""
    display = Display(io.StringIO(), name="test")
    job = make_job(tmp_path)
    storm = Storm(display, (at(5, "group-1"),), times=Times(lasts_s=500.0, to_the_end=to_the_end))

    def pace_s(step: int, *members: str) -> float:
        job.poll()
        commit(job, step, *members)
        storm.tell(job)
        storm.strike(job)
        return float([order for order in child(job, "group-0").orders if "pace" in order][-1].split()[1])

    assert pace_s(5, *GROUPS) > 0
    until_ended(job, "group-1")
    assert pace_s(6, "group-0", "group-2") > 0
    assert job.kills
    until_again(job, "group-1")
    storm.strike(job)
    assert child(job, "group-1").orders[0].startswith("pace ")  # the same as the others
    assert (pace_s(7, *GROUPS) > 0) == to_the_end


def test_steps_are_made_longer_only_while_a_strike_is_late(tmp_path: Path) -> None:
    job, storm = make_job(tmp_path, steps=100), storm_of(at(5, "group-1"))
    commit(job, 5 + LATE_STEPS, "group-0")
    storm.strike(job)
    assert child(job, "group-0").orders == []
    commit(job, 6 + LATE_STEPS, "group-0")
    storm.strike(job)
    (order,) = child(job, "group-0").orders
    word, pace_s = order.split()
    # Two returns of some 5 s are to fit into 84 steps.
    assert word == "pace"
    assert 0.1 <= float(pace_s) <= 0.2
    commit(job, 90, "group-0")
    storm.strike(job)
    assert float(child(job, "group-0").orders[-1].split()[1]) >= 1.0
