"""A job on this machine: launches, kills and restarts its groups, and watches their event files."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jaxft._supervised._phase_file import orders_beside, steps_beside
from jaxft_launch.processes._processes import KILLED, Child, Processes
from jaxft_launch.processes._python_command import python_command
from jaxft_launch.processes._ranks import Member, start_ranks
from jaxft_launch.processes._warm import Warm
from jaxft_launch.storm._events import EventFile, FinishedEvent, StepEvent
from jaxft_launch.storm._fate import Fate
from jaxft_launch.storm._record import Fault, History, Kill, RunRecord
from jaxft_launch.supervise.core.values import AGAIN


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
        preload: modules that its warm processes import, beside jax and jaxft.
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
            "{folder}": str(events.parent / job),
        }
        filled = list(self.own_words.get(group, self.words))
        for name, value in values.items():
            filled = [word.replace(name, value) for word in filled]
        return filled


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a group. Its pipe of orders and its phase file are beside `files`."""

    child: Child
    files: Path


@dataclass(eq=False, slots=True)
class Incarnation:
    """A group's processes, and their reports so far.

    Attributes:
        ranks: the processes. The first one reports for the group.
        launched_s: when it was started, in seconds since 1970.
        killed: whether its kill is recorded.
        doomed: whether a SIGKILL is planned, so that its death is not a failure.
        frozen: whether one of several processes was stopped, so that the others may end.
        read_to_end: whether it has ended, and all of its output has been read.
    """

    group: str
    number: int
    ranks: tuple[Rank, ...]
    events: EventFile
    launched_s: float
    killed: bool = False
    doomed: bool = False
    frozen: bool = False
    read_to_end: bool = False
    steps: list[StepEvent] = field(default_factory=list)
    finished: FinishedEvent | None = None
    fate: Fate = field(init=False)

    def __post_init__(self) -> None:
        self.fate = Fate([rank.child for rank in self.ranks])

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
        self.fate.watch()
        return self.fate.over

    @property
    def status(self) -> int:
        """The exit status that says how it ended. Only once it is over."""
        return self.fate.result()[1]

    @property
    def failing(self) -> Child:
        """The process that failed first, or the first of all."""
        return self.ranks[self.fate.failed or 0].child

    @property
    def fell(self) -> bool:
        """Whether it is over because of a fault that we injected."""
        if not (self.doomed or self.frozen) or not self.over:
            return False
        statuses = self.fate.statuses.values()
        if self.doomed and any(status in KILLED for status in statuses):
            return True
        # Other processes may end because of the victim, and be seen before it.
        return len(self.ranks) > 1 and self.status == AGAIN

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
        *,
        coordinator: str | None,
        processes: Processes,
        doors: Doors | None = None,
        nproc: int = 1,
    ) -> None:
        """Start nothing yet.

        Args:
            name: its name at the coordinator.
            groups: the names of the groups.
            program: what they run.
            coordinator: its address; None if there is none.
            processes: what starts them.
            doors: a proxy in front of the coordinator and the groups.
            nproc: the number of processes of each group.
        """
        self.name = name
        self.groups = tuple(groups)
        self.program = program
        self.nproc = nproc
        self._coordinator = coordinator
        self._doors = doors
        self._processes = processes
        self._incarnations: dict[str, list[Incarnation]] = {group: [] for group in groups}
        self._warm: dict[str, Warm] = {}
        self._kills: list[Kill] = []
        self._faults: list[Fault] = []

    def start(self, group: str) -> Incarnation:
        """Launch or restart a group."""
        number = len(self._incarnations[group])
        name = f"{self.name}.{group}.{number}"
        member = self._member(group)
        files = [
            self._processes.folder / f"{member.process_name(name, rank)}.jsonl" for rank in range(self.nproc)
        ]
        commands = [
            self.program.command(
                job=self.name, group=group, coordinator=member.coordinator, events=file, rank=rank
            )
            for rank, file in enumerate(files)
        ]
        takes_orders = self.program.takes_orders
        children = start_ranks(
            member,
            commands,
            self._processes,
            name=name,
            warm=self._warm_for(member, commands[0]),
            own=[{"JAXFT_CHAOS": str(file)} if takes_orders else {} for file in files],
            orders=[orders_beside(file) for file in files] if takes_orders else [],
        )
        events = files[0] if self.program.writes_events else steps_beside(files[0])
        ranks = tuple(Rank(child, file) for child, file in zip(children, files, strict=True))
        self._incarnations[group].append(Incarnation(group, number, ranks, EventFile(events), time.time()))
        return self.current(group)

    def _member(self, group: str) -> Member:
        coordinator = self._coordinator if self._doors is None else self._doors.coordinator_of(group)
        extra = {} if self._doors is None else {"JAXFT_HOST": self._doors.host_of(group)}
        return Member(name=group, nproc=self.nproc, coordinator=coordinator, extra=extra)

    def _warm_for(self, member: Member, command: Sequence[str]) -> Warm | None:
        """Return the warm process of a group, which a restart does not wait for; None for other programs."""
        python = python_command(command)
        if python is None:
            return None
        if member.name not in self._warm:
            for group in self.groups:  # all at once: the first start of each waits for its own
                self._warm[group] = self._processes.start_warm(
                    f"{self.name}.{group}.warm",
                    environment=member.environment(),
                    preload=self.program.preload,
                    options=python.options,
                )
        warm = self._warm[member.name]
        if not self._incarnations[member.name]:
            warm.until_ready()
        return warm

    def note(self, kill: Kill) -> None:
        """Record the kill of a group's newest incarnation."""
        self.current(kill.group).killed = True
        self._kills.append(kill)

    def note_fault(self, fault: Fault) -> None:
        """Record a fault that is over."""
        self._faults.append(fault)

    def end(self) -> None:
        """End every process that still runs, and read the last events."""
        self._processes.end([rank.child for incarnation in self._all() for rank in incarnation.ranks])
        self._processes.end_warm(list(self._warm.values()))
        self._warm.clear()
        self.read()

    def read(self) -> None:
        """Read all new events."""
        for incarnation in self._all():
            incarnation.read()

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
    def cold(self) -> Mapping[str, str]:
        """Why groups have no warm process, by group."""
        return {group: warm.problem for group, warm in self._warm.items() if warm.problem}

    @property
    def over(self) -> bool:
        """Whether no process is left that could report more."""
        return all(self.current(group).over for group in self.groups)

    def failed(self) -> Incarnation | None:
        """Return an incarnation that ended before it finished, and was not killed by us."""
        for incarnation in self._all():
            if not incarnation.over or incarnation.killed or incarnation.fell:
                continue
            incarnation.read()  # its last events may not have been read yet
            if incarnation.status != 0 or incarnation.finished is None:
                return incarnation
        return None

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
