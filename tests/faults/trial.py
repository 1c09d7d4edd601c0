"""A job of real groups to which something is done while it trains: through a network that can be broken, if asked.

The groups take their time for each step (`PACE_S`) until `hurry`, so that a fault has time to unfold, on a machine of
any speed; then they run to the end. What happened is read from their event files by the same functions that judge a
storm.
"""

import logging
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jaxft_launch.storm._events import StepEvent
from jaxft_launch.storm._network import COORDINATOR, Network
from jaxft_launch.storm._record import Fault, History, again_s, standstill_s
from tests import patience
from tests.clusters import Cluster, Worker, cluster
from tests.faults.namespaces import Switch

# The cost of a fault, for a run with --log-cli-level=INFO.
figures = logging.getLogger("figures")

GROUPS = ("group-0", "group-1", "group-2")
STEPS = 120
PACE_S = 0.1
FIRST_STEPS = 3
HEARTBEAT_S = 2.0
FAILURE_S = 6.0
LISTENS = re.compile(r"listens on port (\d+)")


def slack_s() -> float:
    """For a machine that stalls: everything that should take a few seconds may take so much longer."""
    return patience.stretched(15.0)


@dataclass
class Trial:
    """The job, with its workers and faults."""

    here: Cluster
    flags: tuple[str, ...]
    hurry_file: Path
    broken_network: Network | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    former: list[Worker] = field(default_factory=list)

    @property
    def network(self) -> Network:
        assert self.broken_network is not None, "the groups reach each other without it"
        return self.broken_network

    def start(self, group: str, *flags: str) -> Worker:
        """Start a group, or start it again."""
        if group in self.workers:
            self.former.append(self.workers[group])
        worker = self.here.start(
            group, *self.flags, *self._route(group), *flags, coordinated=self.broken_network is None
        )
        self.workers[group] = worker
        return worker

    def _route(self, group: str) -> tuple[str, ...]:
        if self.broken_network is None:
            return ()
        network = self.broken_network
        return ("--coordinator", network.coordinator_of(group), "--host", network.host_of(group))

    def until_step(self, group: str, count: int) -> None:
        """Wait until a group has taken part in this many more steps."""
        worker = self.workers[group]
        before = len(worker.steps())
        self.here.until(lambda: len(worker.steps()) >= before + count, f"{group} to take {count} more steps")

    def until_back(self, group: str) -> None:
        """Wait until a group takes part, in the newest step that any group reports or in a later one."""
        newest = max(event.step for history in self.histories() for event in history.steps)

        def takes_part() -> bool:
            return any(
                event["step"] >= newest and event["shards"] and group in event["members"]
                for event in self.workers[group].steps()
            )

        self.here.until(takes_part, f"{group} to take part again")

    def kill(self, group: str) -> None:
        self.workers[group].process.send_signal(signal.SIGKILL)
        self.here.until_dead(self.workers[group])

    def coordinator_says(self, text: str) -> bool:
        return text in self.here.coordinator_log.read_text()

    def until_coordinator_says(self, text: str) -> None:
        self.here.until(lambda: self.coordinator_says(text), f"the coordinator to say {text!r}")

    @contextmanager
    def fault(self, group: str, other: str = "") -> Iterator[Callable[[], Fault]]:
        """Measure a fault that lasts for the length of the context; its value reports it afterwards."""
        began_s = time.time()
        seconds = 0.0

        def heard() -> Fault:
            return Fault(kind="", group=group, other=other, t_s=began_s, seconds=seconds)

        yield heard
        seconds = time.time() - began_s

    def standstill_s(self, fault: Fault) -> float:
        """How long the job stood still for a fault that is over. Waits for the first commit after its end."""
        self.here.until(lambda: standstill_s(fault, self.histories()) is not None, "a commit after the fault")
        found = standstill_s(fault, self.histories())
        assert found is not None
        return found

    def again_s(self, fault: Fault, group: str) -> float:
        """How long after the fault's end a group took part again. Waits for that."""
        self.here.until(lambda: again_s(fault, group, self.histories()) is not None, f"{group} to be back")
        found = again_s(fault, group, self.histories())
        assert found is not None
        return found

    def _until_it_ends(self, worker: Worker) -> None:
        """Wait for the end of a group, for as long as it takes steps: there may be many."""
        while worker.process.poll() is None:
            size_bytes = worker.events_path.stat().st_size
            self.here.until(
                lambda size_bytes=size_bytes: (
                    worker.process.poll() is not None or worker.events_path.stat().st_size > size_bytes
                ),
                f"{worker.log_path.stem} to go on",
            )

    def histories(self) -> list[History]:
        return [history_of(worker) for worker in (*self.former, *self.workers.values())]

    def finish(self, undisturbed: str) -> None:
        """Run to the end: every group ends with the undisturbed run's bits, and no step was lost."""
        self.hurry_file.touch()
        for worker in self.workers.values():
            self._until_it_ends(worker)
        self.here.until_finished(*self.workers.values())
        digests = {group: worker.digest for group, worker in self.workers.items()}
        assert digests == dict.fromkeys(self.workers, undisturbed), self.here.logs()
        for history in self.histories():
            steps = [event.step for event in history.steps]
            assert steps == sorted(set(steps)), f"{history.group} went back"


def history_of(worker: Worker) -> History:
    group, _, life = worker.events_path.stem.rpartition("-life-")
    steps = tuple(
        StepEvent(
            t_s=event["t"],
            step=event["step"],
            loss=math.nan if event["loss"] is None else event["loss"],
            attempts=event["attempts"],
            shards=tuple(event["shards"]),
            quorum_id=event["quorum_id"],
            members=tuple(event["members"]),
        )
        for event in worker.steps()
    )
    return History(group=group, incarnation=int(life), steps=steps)


@contextmanager
def trial(
    folder: Path,
    *flags: str,
    steps: int = STEPS,
    heartbeat_s: float = HEARTBEAT_S,
    failure_s: float = FAILURE_S,
    state: Path | None = None,
    own_flags: Callable[[str], tuple[str, ...]] = lambda _group: (),
) -> Iterator[Trial]:
    """A job of all groups, which has taken its first steps with all of them, over a network that can be broken."""
    with ExitStack() as stack:
        here = stack.enter_context(cluster(folder))
        start_coordinator(here, heartbeat_s, state or folder / "state")

        def where(name: str) -> int | None:
            if name == COORDINATOR:
                return here.port
            found = LISTENS.search(made.workers[name].log())
            return None if found is None else int(found.group(1))

        made = Trial(here, common_flags(folder, steps, failure_s, flags), folder / "hurry")
        made.broken_network = stack.enter_context(Network(GROUPS, where))
        begin(made, GROUPS, own_flags)
        yield made


@contextmanager
def trial_over(net: Switch, folder: Path, *flags: str) -> Iterator[Trial]:
    """A job of all groups, which has taken its first steps with all of them, on the hosts of a network."""
    with cluster(folder) as here:
        here.namespace, here.host = net.namespace, net.address("coordinator")
        start_coordinator(here, HEARTBEAT_S, folder / "state", "--insecure")
        made = Trial(here, common_flags(folder, STEPS, FAILURE_S, flags), folder / "hurry")
        begin(made, GROUPS, lambda _group: ())
        yield made


def common_flags(folder: Path, steps: int, failure_s: float, flags: tuple[str, ...]) -> tuple[str, ...]:
    pace = ("--pace", str(PACE_S), "--hurry", str(folder / "hurry"))
    return ("--steps", str(steps), *pace, "--failure-timeout-s", str(failure_s), *flags)


def start_coordinator(here: Cluster, heartbeat_s: float, state: Path, *flags: str) -> None:
    timeout_ms = str(round(1000 * heartbeat_s))
    here.start_coordinator("--heartbeat-timeout-ms", timeout_ms, "--state", str(state), *flags)


def begin(made: Trial, groups: tuple[str, ...], own_flags: Callable[[str], tuple[str, ...]]) -> None:
    """Start all groups, and wait until each has taken its first steps together with all others."""
    gate = made.here.folder / "all-present"
    for group in groups:
        made.start(group, "--gate", f"start:{gate}", *own_flags(group))
    for group in groups:
        made.until_coordinator_says(f"{group} is present")
    gate.touch()
    made.here.until(
        lambda: all(len(worker.steps()) >= FIRST_STEPS for worker in made.workers.values()),
        "the first steps of all groups",
    )
