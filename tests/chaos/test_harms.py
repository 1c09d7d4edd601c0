"""Faults on a handmade job: real stopped processes, fake groups."""

import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jaxft._supervised._phase_file import Word, WordFile, words_beside
from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._events import StepEvent
from jaxft_launch.storm._faults import (
    COORDINATOR,
    Cutoff,
    Damage,
    End,
    FaultKind,
    How,
    Length,
    LinkFault,
    Victim,
    Way,
)
from jaxft_launch.storm._harms import (
    CoordinatorDeath,
    Corruption,
    Cut,
    Hang,
    Reach,
    Stop,
)
from jaxft_launch.storm._job import Job, Place, Program
from jaxft_launch.storm._network import Network
from jaxft_launch.storm._schedule import Strike
from jaxft_launch.storm._storm import Storm
from tests import patience

GROUPS = ("group-0", "group-1", "group-2")
PATIENCE_S = 60.0
# Waits for orders.
GROUP = (
    "import os; orders = os.environ['JAXFT_CHAOS'].replace('.jsonl', '.orders')\n"
    "for line in open(orders): print(line, flush=True)\n"
)
LISTENER = (
    "import socket, sys, time\n"
    "port = int(sys.argv[-1].rpartition(':')[2])\n"
    "server = socket.create_server(('localhost', port))\n"
    "print(f'listens (port {server.getsockname()[1]})', flush=True)\n"
    "time.sleep(600)\n"
)


class Scene:
    """A job whose groups only wait, with a fault-injecting network."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.processes = stack.enter_context(Processes(folder, cwd=folder))
        program = Program(words=(sys.executable, "-S", "-c", GROUP), steps=1000, takes_orders=True)
        self.network = stack.enter_context(Network(GROUPS, lambda _: None))
        self.display = Display(io.StringIO(), name="test")
        command = (sys.executable, "-S", "-c", LISTENER)
        self.coordinator = Coordinator(self.processes, command)
        place = Place(self.processes, self.display)
        self.job = Job("storm", GROUPS, program, place, coordinator=self.coordinator)
        until(lambda: self.job.poll() or self.job.has_begun)

    def commit(self, step: int, *members: str) -> None:
        for group in members:
            self.job.current(group).steps.append(
                StepEvent(t_s=time.time(), step=step, shards=(0,), members=members)
            )

    def until_over(self, harm: Any) -> None:
        def over() -> bool:
            self.job.poll()
            harm.pursue()
            return harm.over()

        until(over)

    def state_of(self, group: str) -> str:
        """The kernel's state of a group's process, such as "T (stopped)"."""
        status = Path(f"/proc/{self.job.current(group).child.pid}/status").read_text()
        return next(line.split("\t", 1)[1] for line in status.splitlines() if line.startswith("State"))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, stack)


def until(condition: Callable[[], Any]) -> None:
    deadline_s = patience.machine_s() + PATIENCE_S
    while not condition():
        assert patience.machine_s() < deadline_s
        time.sleep(0.005)


def test_a_stopped_process_goes_on_after_its_time(scene: Scene) -> None:
    stop = Stop(Victim("group-1", "any", kind=FaultKind.STOP, seconds=0.2), 3, scene.job, scene.display)
    until(lambda: scene.state_of("group-1").startswith("T"))
    scene.until_over(stop)
    until(lambda: not scene.state_of("group-1").startswith("T"))
    (fault,) = scene.job.faults
    assert (fault.kind, fault.group, fault.strike) == ("stop", "group-1", 3)
    assert 0.2 <= fault.seconds < PATIENCE_S


def test_a_hang_is_ordered_and_lasts_from_where_the_victim_began(scene: Scene) -> None:
    victim = Victim("group-1", "vote", kind=FaultKind.HANG, seconds=0.2)
    incarnation = scene.job.current("group-1")
    hang = Hang(victim, 0, scene.job, scene.display)
    until(lambda: "hang vote 0.2" in incarnation.child.log.read_text())
    for _ in range(5):
        hang.pursue()
        assert not hang.over(), "it has not begun"
    began_s = time.time()
    word = Word(phase="vote", step=4, t_s=began_s, first_t_s=began_s, hung_t_s=began_s)
    WordFile(words_beside(incarnation.events.path)).write(word)
    scene.until_over(hang)
    (fault,) = scene.job.faults
    assert fault.t_s == began_s
    assert fault.seconds >= 0.2


@pytest.mark.parametrize(
    ("how", "other", "cut"),
    [
        (Cutoff(Way.BOTH, Length.LONG, End.REPAIRED), "", {"in", "out"}),
        (Cutoff(Way.OUT, Length.SHORT, End.RESET), "", {"out"}),
        (LinkFault.STALLS_THEN_RESET, "group-2", {"link"}),
    ],
)
def test_links_are_cut_for_their_time(scene: Scene, how: How, other: str, cut: set[str]) -> None:
    done: list[tuple[str, frozenset[tuple[str, str]]]] = []
    network = scene.network

    class Watched:
        around = staticmethod(network.around)

        def cut(self, pairs: Any) -> None:
            done.append(("cut", frozenset(pairs)))

        def repair(self, pairs: Any) -> None:
            done.append(("repair", frozenset(pairs)))

        def reset(self, a: str, b: str) -> int:
            done.append(("reset", frozenset({(a, b)})))
            return 1

    kind = FaultKind.LINK if other else FaultKind.PARTITION
    victim = Victim("group-1", "any", kind=kind, seconds=0.1, how=how, other=other)
    watched: Any = Watched()
    harm = Cut(victim, 0, scene.job, scene.display, watched)
    wanted = {
        "in": network.around("group-1", out=False),
        "out": network.around("group-1", into=False),
        "link": (("group-1", "group-2"), ("group-2", "group-1")),
    }
    pairs = frozenset(pair for name in cut for pair in wanted[name])
    assert done == [("cut", pairs)]
    scene.until_over(harm)
    assert done[-1] == ("repair", pairs)
    assert {name for name, _ in done[1:-1]} == ({"reset"} if "then reset" in str(how) else set())
    assert [fault.other for fault in scene.job.faults] == [other]


def test_the_coordinator_comes_back_on_its_port(scene: Scene) -> None:
    coordinator = scene.coordinator
    port, dead = coordinator.port, coordinator.child
    victim = Victim(COORDINATOR, "any", kind=FaultKind.COORDINATOR)
    scene.until_over(CoordinatorDeath(victim, 0, scene.job, scene.display, coordinator))
    assert dead.exit_code() == -signal.SIGKILL
    assert coordinator.child.pid != dead.pid
    assert coordinator.child.exit_code() is None
    assert f"(port {port})" in coordinator.child.log.read_text()
    assert [fault.group for fault in scene.job.faults] == [COORDINATOR]


def test_damage_counts_if_it_came_before_the_group_was_back(scene: Scene) -> None:
    victim = Victim("group-1", "any", kind=FaultKind.CORRUPT, how=Damage.ONE_DONOR)
    for came in (True, False):
        harm = Corruption(victim, 0, scene.job, scene.display, scene.network)
        assert not harm.over()
        number = scene.job.current("group-1").number
        scene.job.current("group-1").child.kill()
        until(lambda n=number: scene.job.poll() or scene.job.current("group-1").number > n)
        harm.pursue()
        if came:
            scene.network.damaged += 1
            harm.pursue()
        assert not harm.over(), "it is still away"
        scene.commit(10, *GROUPS)
        harm.pursue()
        assert harm.over()
        assert harm.found_nothing == (not came)
        assert len(scene.job.faults) == 1


def test_the_next_strike_waits_until_what_was_done_is_undone(scene: Scene) -> None:
    strikes = (
        Strike(1, (Victim("group-0", "any", kind=FaultKind.STOP, seconds=0.3),)),
        Strike(1, (Victim("group-1", "any", 0.0),)),
    )
    storm = Storm(scene.display, strikes, Reach())
    assert (storm.planned_kills, storm.planned_faults) == (1, 1)
    scene.commit(5, *GROUPS)
    storm.strike(scene.job)
    until(lambda: scene.state_of("group-0").startswith("T"))
    while not scene.job.faults:
        assert scene.job.current("group-1").child.exit_code() is None
        assert not scene.job.kills
        scene.job.poll()
        storm.strike(scene.job)
    until(lambda: scene.job.poll() or storm.strike(scene.job) or scene.job.kills)
    assert scene.job.kills[0].t_s >= scene.job.faults[0].end_s
