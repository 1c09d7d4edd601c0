"""The groups of one run, under the supervisor of `jaxft launch`: what each life of them does and reports."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jaxft._supervised._phase_file import orders_beside, steps_beside
from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.processes._processes import Child, Processes
from jaxft_launch.processes._ranks import Member, RankStart
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._events import EventFile, FinishedEvent, StepEvent
from jaxft_launch.storm._record import Fault, History, Kill, RunRecord
from jaxft_launch.supervise._plan import LaunchPlan
from jaxft_launch.supervise.core.entries import Entry, GroupEnded, GroupStarted, RankEnded
from jaxft_launch.supervise.core.group import Rules
from jaxft_launch.supervise.core.life import DEADLINES_S
from jaxft_launch.supervise.core.values import Ending
from jaxft_launch.supervise.driver import Driver

# What hangs or is silent is a fault of the storm, and its length is planned.
NO_DEADLINES = Rules(deadlines=dict.fromkeys(DEADLINES_S, math.inf))


class Doors(Protocol):
    """A proxy network: the addresses that groups announce, and those at which they reach the coordinator."""

    def host_of(self, group: str) -> str: ...

    def coordinator_of(self, group: str) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program that every group of a job runs.

    Attributes:
        words: the command. {coordinator}, {job}, {group}, {rank}, {events} and {folder} in its words are filled in.
            A program that gets {events} writes its own event file; for other programs, the library writes one.
        own_words: the commands of groups with a different one.
        steps: how many steps it trains; None if that is not known yet.
        takes_orders: whether the library in it follows the orders of a storm.
        preload: modules that its warm processes import besides jax and jaxft.
    """

    words: tuple[str, ...]
    own_words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steps: int | None = None
    takes_orders: bool = False
    preload: tuple[str, ...] = ()

    @property
    def writes_events(self) -> bool:
        return any("{events}" in word for word in self.words)

    def command(
        self, *, job: str, group: str, coordinator: str | None, events: Path, rank: int = 0
    ) -> list[str]:
        """Return the command that starts one process of a group."""
        values = {
            "{coordinator}": coordinator or "",
            "{job}": job,
            "{group}": group,
            "{rank}": str(rank),
            "{events}": str(events),
            "{folder}": str(events.parent),
        }
        filled = list(self.own_words.get(group, self.words))
        for name, value in values.items():
            filled = [word.replace(name, value) for word in filled]
        return filled


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job runs: what starts its processes, its lines, and how many processes each group has."""

    processes: Processes
    display: Display
    nproc: int = 1


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a group. Its pipe of orders and its phase file have the name of `files`, with other suffixes."""

    child: Child
    files: Path


@dataclass(eq=False, slots=True)
class Incarnation:
    """A life of a group: its processes, and their reports so far.

    Attributes:
        ranks: the processes. The first one reports for the group.
        launched_s: when it was started, in seconds since 1970.
        end: how it ended; None while it or its child processes run.
        failing: the process that failed first, or the first of all.
        killed: whether its kill is recorded.
        doomed: whether a SIGKILL is planned, so that its death is not a failure.
        frozen: whether a process was stopped, so that the others may end.
        pace_s: how much longer it was ordered to make each step.
        read_to_end: whether it has ended, and all of its output has been read.
    """

    group: str
    number: int
    ranks: tuple[Rank, ...]
    events: EventFile
    launched_s: float
    end: GroupEnded | None = None
    failing: Child = field(init=False)
    killed: bool = False
    doomed: bool = False
    frozen: bool = False
    pace_s: float = 0.0
    read_to_end: bool = False
    steps: list[StepEvent] = field(default_factory=list)
    finished: FinishedEvent | None = None

    def __post_init__(self) -> None:
        self.failing = self.child

    @property
    def child(self) -> Child:
        """Its first process."""
        return self.ranks[0].child

    @property
    def pids(self) -> str:
        """Its processes, for messages."""
        return ", ".join(str(rank.child.pid) for rank in self.ranks)

    @property
    def over(self) -> bool:
        """Whether all of its processes have ended."""
        return all(rank.child.exit_code() is not None for rank in self.ranks)

    @property
    def status(self) -> int:
        """The exit status of its end. Only once `end` is known."""
        assert self.end is not None
        return self.end.status

    @property
    def fell(self) -> bool:
        """Whether it is over because of a fault that we injected."""
        if self.end is None or not (self.doomed or self.frozen):
            return False
        # Other processes may end because of the victim.
        asks_again = len(self.ranks) > 1 and self.end.ending == Ending.AGAIN
        return self.end.ending == Ending.KILLED or asks_again

    def order(self, text: str) -> None:
        """Order all of its processes something."""
        for rank in self.ranks:
            rank.child.order(text)

    def read(self) -> None:
        """Read the events that it has written since the last call."""
        if self.read_to_end:
            return
        ended = self.over
        for event in self.events.read():
            match event:
                case StepEvent():
                    self.steps.append(event)
                case FinishedEvent():
                    self.finished = event
        self.read_to_end = ended

    @property
    def live(self) -> bool:
        """Whether it took part in its newest step instead of catching up."""
        return bool(self.steps) and self.steps[-1].live

    def history(self) -> History:
        return History(
            group=self.group,
            incarnation=self.number,
            fell=self.fell,
            steps=tuple(self.steps),
            finished=self.finished,
        )


class Job:
    """The groups of one run. A restarted group keeps its name, and gets a new incarnation and new files."""

    def __init__(
        self,
        name: str,
        groups: Sequence[str],
        program: Program,
        place: Place,
        *,
        coordinator: Coordinator | None = None,
        doors: Doors | None = None,
    ) -> None:
        """Start nothing yet: `poll` does.

        The processes of `place` belong to this job alone. `coordinator`: None for a group without one. `doors`:
        a proxy in front of the coordinator and the groups. The supervisor's lines are in the file supervisor.log.
        """
        processes = place.processes
        self.name = name
        self.groups = tuple(groups)
        self.program = program
        self.nproc = place.nproc
        self._processes = processes
        self._display = place.display
        self._log = processes.folder / "supervisor.log"
        self._incarnations: dict[str, list[Incarnation]] = {group: [] for group in groups}
        self._kills: list[Kill] = []
        self._faults: list[Fault] = []
        address = None if coordinator is None else coordinator.address
        plan = LaunchPlan(
            groups=tuple(self._member(group, address, doors) for group in groups),
            command=program.words,
            rules=NO_DEADLINES,
            caches=False,
            preload=program.preload,
        )
        self._driver = Driver(
            plan,
            processes,
            phases=processes.folder / "phases",
            listener=self,
            coordinator=coordinator,
            start_of=self._start_of,
        )

    def _member(self, group: str, address: str | None, doors: Doors | None) -> Member:
        if doors is None:
            return Member(name=group, nproc=self.nproc, coordinator=address)
        host = {"JAXFT_HOST": doors.host_of(group)}
        return Member(name=group, nproc=self.nproc, coordinator=doors.coordinator_of(group), extra=host)

    def _start_of(self, member: Member, life: int, rank: int) -> RankStart:
        file = self._file(member, life, rank)
        words = self.program.command(
            job=self.name, group=member.name, coordinator=member.coordinator, events=file, rank=rank
        )
        if not self.program.takes_orders:
            return RankStart(words=words)
        environment = {"JAXFT_CHAOS": str(file)}
        return RankStart(words=words, environment=environment, orders=orders_beside(file))

    def _file(self, member: Member, life: int, rank: int) -> Path:
        return self._processes.folder / f"{member.process_name(f'{member.name}.{life}', rank)}.jsonl"

    # ---- news of the supervisor ----

    def write(self, entry: Entry) -> None:
        """Note the beginning and the end of a life."""
        match entry:
            case GroupStarted(group=group, life=life):
                self._begin(group, life)
            case RankEnded(group=group, life=life, rank=rank):
                self._incarnations[group][life].failing = self._incarnations[group][life].ranks[rank].child
            case GroupEnded(group=group, life=life):
                self._incarnations[group][life].end = entry
            case _:
                pass

    def say(self, text: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')}  {text}\n")

    def _begin(self, group: str, life: int) -> None:
        member = self._driver.members[group]
        ranks = tuple(
            Rank(child, self._file(member, life, rank))
            for rank, child in enumerate(self._driver.children(group))
        )
        file = ranks[0].files
        events = EventFile(file if self.program.writes_events else steps_beside(file))
        found = Incarnation(group, life, ranks, events, time.time())
        self._incarnations[group].append(found)
        self._display.say(f"{'launched' if life == 0 else 'restarted'} {group} (pid {found.pids})")

    # ---- actions ----

    def poll(self) -> None:
        """Let the supervisor act, and read all new events."""
        self._driver.poll()
        for incarnation in self._all():
            incarnation.read()

    def note(self, kill: Kill) -> None:
        """Record the kill of an incarnation."""
        self._incarnations[kill.group][kill.incarnation].killed = True
        self._kills.append(kill)

    def note_fault(self, fault: Fault) -> None:
        """Record a fault that is over."""
        self._faults.append(fault)

    def end(self) -> None:
        """End every process that still runs, and read the last events."""
        self._processes.end([rank.child for incarnation in self._all() for rank in incarnation.ranks])
        self._driver.end()
        for incarnation in self._all():
            incarnation.read()

    # ---- facts ----

    @property
    def has_begun(self) -> bool:
        """Whether all groups have been started."""
        return all(self._incarnations.values())

    def port_of(self, group: str) -> int | None:
        """Return the port on which a group listens; None if it does not yet."""
        if not self._incarnations[group]:
            return None
        try:
            lines = steps_beside(self.current(group).events.path).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        entered = next((line for line in lines if line.endswith(b"\n")), None)
        return None if entered is None else json.loads(entered)["port"]

    def current(self, group: str) -> Incarnation:
        """Return a group's newest incarnation."""
        return self._incarnations[group][-1]

    @property
    def committed_step(self) -> int:
        """The highest step that any group has reported."""
        return max((i.steps[-1].step for i in self._all() if i.steps), default=0)

    @property
    def last_event_t_s(self) -> float | None:
        """When a group last reported a step."""
        return max((i.steps[-1].t_s for i in self._all() if i.steps), default=None)

    @property
    def over(self) -> bool:
        """Whether no process is left that could report more."""
        return self._driver.over

    def failed(self) -> Incarnation | None:
        """Return an incarnation that ended before it finished, and was not killed by us."""
        for incarnation in self._all():
            if incarnation.end is None or incarnation.killed or incarnation.fell:
                continue
            incarnation.read()  # its last events may not have been read yet
            if incarnation.status != 0 or incarnation.finished is None:
                return incarnation
        return None

    def absent(self) -> list[str]:
        """Return the groups whose newest incarnation fell: once the job is over, they are not restarted."""
        return [group for group in self.groups if self.current(group).killed or self.current(group).fell]

    def members_at_work(self) -> frozenset[str]:
        """Return the groups whose current processes took part in the newest step."""
        current = [self.current(group) for group in self.groups]
        newest = max((i.steps[-1] for i in current if i.live), key=lambda event: event.step, default=None)
        return frozenset(
            i.group
            for i in current
            if newest is not None
            and i.live
            and i.group in newest.members
            and i.finished is None
            and not i.over
        )

    def others_at_work(self, names: Sequence[str]) -> frozenset[str]:
        """Return the groups that would still hold the state if these died."""
        return self.members_at_work() - set(names)

    @property
    def kills(self) -> Sequence[Kill]:
        """All kills so far, in order."""
        return self._kills

    @property
    def faults(self) -> Sequence[Fault]:
        """All faults that have ended so far, in the order of their ends."""
        return self._faults

    def record(
        self, *, planned_kills: int = 0, problems: Sequence[str] = (), too_short: str = ""
    ) -> RunRecord:
        """Return the record of the run so far."""
        return RunRecord(
            groups=self.groups,
            nproc=self.nproc,
            planned_steps=self.committed_step if self.program.steps is None else self.program.steps,
            planned_kills=planned_kills,
            kills=tuple(self._kills),
            faults=tuple(self._faults),
            histories=tuple(incarnation.history() for incarnation in self._all()),
            problems=tuple(problems),
            too_short=too_short,
        )

    def _all(self) -> Iterator[Incarnation]:
        for incarnations in self._incarnations.values():
            yield from incarnations
