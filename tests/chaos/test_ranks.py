"""Faults on one process of several, in a handmade job of real processes that only wait."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._events import StepEvent
from jaxft_launch.storm._faults import FaultKind, Victim
from jaxft_launch.storm._job import Job, Place, Program
from jaxft_launch.storm._options import StormOptions
from jaxft_launch.storm._schedule import Strike
from jaxft_launch.storm._storm import Storm
from tests import patience

GROUPS = ("group-0", "group-1")
# Carries out "die" at once, as the library does in the ordered phase, and "exit STATUS".
RANK = (
    "import os, signal\n"
    "orders = os.environ['JAXFT_CHAOS'].replace('.jsonl', '.orders')\n"
    "for line in open(orders):\n"
    "    print(line, flush=True)\n"
    "    if line.startswith('die'): os.kill(os.getpid(), signal.SIGKILL)\n"
    "    if line.startswith('exit'): os._exit(int(line.split()[1]))\n"
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    program = Program(words=(sys.executable, "-S", "-c", RANK), steps=1000, takes_orders=True)
    with Processes(tmp_path, cwd=tmp_path) as processes:
        display = Display(io.StringIO(), name="test")
        made = Job("storm", GROUPS, program, Place(processes, display, nproc=2))
        patience.until(lambda: made.poll() or made.has_begun, "the groups")
        commit(made, 9)
        yield made


def commit(job: Job, step: int) -> None:
    for group in GROUPS:
        job.current(group).steps.append(StepEvent(t_s=0.0, step=step, shards=(0,), members=GROUPS))


def storm_of(victim: Victim) -> tuple[Storm, io.StringIO]:
    lines = io.StringIO()
    return Storm(Display(lines, name="test"), [Strike(1, (victim,))]), lines


def until(storm: Storm, job: Job, condition: Callable[[], Any], what: str) -> None:
    def done() -> Any:
        job.poll()
        assert job.failed() is None
        storm.strike(job)
        return condition()

    patience.until(done, what)


def test_a_killed_rank_takes_its_group_with_it_which_is_started_again(job: Job) -> None:
    rank = 1
    victim, other = job.current("group-1"), job.current("group-0")
    storm, lines = storm_of(Victim("group-1", "vote", rank=rank))
    until(storm, job, lambda: job.kills, "the kill")
    (kill,) = job.kills
    assert (kill.group, kill.rank, kill.incarnation) == ("group-1", rank, 0)
    assert victim.over
    until(storm, job, lambda: job.current("group-1").number == 1, "the restart")
    assert len(job.current("group-1").ranks) == 2
    assert not other.over
    assert f"kill 1: group-1 rank {rank} (pid {victim.ranks[rank].child.pid})" in lines.getvalue()


def test_a_group_that_ends_because_a_rank_is_stopped_is_started_again(job: Job) -> None:
    storm, lines = storm_of(Victim("group-1", "any", kind=FaultKind.STOP, seconds=3600.0, rank=1))
    until(storm, job, lambda: job.current("group-1").frozen, "the stop")
    job.current("group-1").ranks[0].child.order("exit 75")  # as after a silence of the other
    until(storm, job, lambda: job.current("group-1").number == 1, "the restart")
    (fault,) = job.faults
    assert (fault.kind, fault.group, fault.rank) == ("stop", "group-1", 1)
    assert "stop: group-1 rank 1 for" in lines.getvalue()
    assert "group-1 has ended, because a rank was silent" in lines.getvalue()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nproc": 0}, "--nproc must be 1 or more"),
        ({"nproc": 2, "faults": "kill,link,corrupt"}, "link,corrupt"),
    ],
)
def test_what_is_impossible_with_several_processes_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        StormOptions(**options).plan(last_step=100)
