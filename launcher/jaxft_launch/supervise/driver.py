"""Drives the supervisor's core over real processes: for a launch, a storm, the demo and benchmarks alike.

The core decides (`core/launch.py`). The driver starts, kills and reads, and sends it events. It never
waits: call `poll` often, until `over`. Orders go in through `send`; news come out through the `Listener`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, assert_never

from jaxft._supervised._phase_file import read_word
from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.processes._devices import environment_of
from jaxft_launch.processes._processes import Child, Processes
from jaxft_launch.processes._python_command import python_command
from jaxft_launch.processes._ranks import Member, RankStart, start_ranks
from jaxft_launch.processes._warm import Warm, with_statuses
from jaxft_launch.supervise._asking import Answer, Asking
from jaxft_launch.supervise._plan import LaunchPlan
from jaxft_launch.supervise.core import launch as core
from jaxft_launch.supervise.core.entries import Entry
from jaxft_launch.supervise.core.group import Group, Phase
from jaxft_launch.supervise.core.keeper import Keeper, KeeperPhase
from jaxft_launch.supervise.core.values import (
    AskDevices,
    Checked,
    CoordinatorDown,
    CoordinatorListens,
    CoordinatorSigned,
    CoordinatorStartFailed,
    CoordinatorUp,
    DevicesSeen,
    Effect,
    Ended,
    Event,
    Kill,
    KillCoordinator,
    KillRest,
    LogOf,
    RestSeen,
    Say,
    ShowStacks,
    Signed,
    Start,
    StartCoordinator,
    Started,
    StartFailed,
    Terminate,
    Tick,
    Write,
)

# How often signs of life are read.
SIGNS_EVERY_S = 0.5
# How often child processes that a group has left behind are looked for.
REST_EVERY_S = 0.05
# A longer pause is the launcher's own, as after SIGSTOP: the groups are not late for it.
LONGEST_PAUSE_S = 2.0
PROBE_MOST_EVERY_S, PROBE_LEAST_EVERY_S = 10.0, 0.2
# While a group waits for devices.
PROBE_WAITING_S = 1.0
CHECK_EVERY_S = 30.0
PHASE_FILE = "JAXFT_PHASE_FILE"


class Listener(Protocol):
    """Gets the news of a launch: entries of its journal, and lines for people."""

    def write(self, entry: Entry) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(slots=True)
class _Process:
    """A process of a life, and the file with its phase."""

    rank: int
    child: Child
    phase_file: Path
    mark: tuple[float, float] | None = None  # of its last sign
    ended: bool = False

    def sign(self, group: str, index: int) -> Signed | None:
        """Return a new sign of life; None if it has given none since."""
        word = read_word(self.phase_file)
        if word is None:
            return None
        try:
            alive_t_s = self.phase_file.stat().st_mtime
        except OSError:  # removed since
            return None
        if self.mark == (word.t_s, alive_t_s):
            return None
        self.mark = (word.t_s, alive_t_s)
        return Signed(
            group=group,
            rank=index,
            phase=word.phase,
            step=word.step,
            members=word.members,
            committed=word.committed,
            phase_mark=word.t_s,
            life_mark=alive_t_s,
        )


@dataclass(slots=True)
class _Clock:
    """Seconds from 0, of which a pause between two looks adds `LONGEST_PAUSE_S` at most."""

    now_s: float = 0.0
    _last_s: float = field(default_factory=time.monotonic)

    def look(self) -> float:
        last_s, self._last_s = self._last_s, time.monotonic()
        self.now_s += min(self._last_s - last_s, LONGEST_PAUSE_S)
        return self.now_s


class Driver:
    """Runs the groups of a plan.

    Attributes:
        launch: the core's state: each group's phase, life and step.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        processes: Processes,
        *,
        phases: Path,
        listener: Listener,
        coordinator: Coordinator | None = None,
        start_of: Callable[[Member, int, int], RankStart] | None = None,
    ) -> None:
        """Start nothing yet."""
        self._plan = plan
        self._processes = processes
        self._phases = phases
        self._listener = listener
        self._coordinator = coordinator
        address = None if coordinator is None else coordinator.address
        self.members = {member.name: self._placed(member, address) for member in plan.groups}
        self._start_of = start_of or self._as_planned
        self._lives: dict[str, list[_Process]] = {member.name: [] for member in plan.groups}
        self._logs: dict[LogOf, Child] = {}
        self._warm: dict[str, Warm] = {}
        self._mentioned: set[str] = set()
        self._clock = _Clock()
        self._signs_at_s = self._rest_at_s = 0.0
        self._coordinator_sign: int | None = None
        self._probe = Asking(plan.probe, every_s=self._probe_every_s()) if plan.probe else None
        self._checks = {
            name: Asking(plan.check, every_s=CHECK_EVERY_S, environment=self._check_environment(member))
            for name, member in self.members.items()
            if plan.check
        }
        keeper = None
        if coordinator is not None:
            keeper = Keeper(
                address=coordinator.address,
                silence_s=plan.silence_s,
                phase=KeeperPhase.UP,
                pid=coordinator.child.pid,
            )
        self.launch = core.Launch(groups=plan.core_groups(), rules=plan.rules, keeper=keeper)

    @property
    def over(self) -> bool:
        return self.launch.over

    @property
    def now_s(self) -> float:
        """The time of the core."""
        return self._clock.now_s

    def children(self, group: str) -> list[Child]:
        """Return the processes of a group's newest life, by rank; some may have ended."""
        return [each.child for each in self._lives[group]]

    def send(self, event: Event) -> None:
        """Give the core an order or another event; carry out its effects."""
        self.launch, effects = core.step(self.launch, event, self._clock.now_s)
        for effect in effects:
            self._do(effect)

    def poll(self) -> None:
        """Look at everything once, and act on it."""
        now_s = self._clock.look()
        self._look_at_processes(signs=now_s >= self._signs_at_s)
        if now_s >= self._signs_at_s:
            self._signs_at_s = now_s + SIGNS_EVERY_S
        if now_s >= self._rest_at_s:
            self._rest_at_s = now_s + REST_EVERY_S
            self._look_at_rest()
        self._look_at_coordinator()
        self._ask(now_s)
        self.send(Tick())
        for group in self.launch.groups:
            if group.phase is Phase.STARTING:  # it waits for its warm process
                self._try_to_start(group)

    def end(self) -> None:
        """End the commands of `--probe` and `--check`."""
        for asking in (self._probe, *self._checks.values()):
            if asking is not None:
                asking.end()

    # ---- events ----

    def _look_at_processes(self, *, signs: bool) -> None:
        for name, processes in self._lives.items():
            for index, process in enumerate(processes):
                if process.ended:
                    continue
                status = process.child.exit_code()
                if (signs or status is not None) and (sign := process.sign(name, index)) is not None:
                    self.send(sign)
                if status is not None:
                    process.ended = True
                    self.send(Ended(name, index, status))

    def _look_at_rest(self) -> None:
        for group in self.launch.groups:
            if group.phase not in (Phase.LINGERING, Phase.SWEPT):
                continue
            with contextlib.suppress(OSError):  # what runs cannot be found out now: look again
                rest = [pid for each in self._lives[group.name] for pid in each.child.rest()]
                self.send(RestSeen(group.name, tuple(rest)))
                if not rest:
                    self._remove_phase_files(group.name)

    def _look_at_coordinator(self) -> None:
        one, keeper = self._coordinator, self.launch.keeper
        if one is None or keeper is None or keeper.phase is KeeperPhase.WAITING:
            return
        if (status := one.child.exit_code()) is not None:
            self.send(CoordinatorDown(status))
            return
        if keeper.phase is KeeperPhase.STARTING:
            with contextlib.suppress(OSError):  # its log cannot be read now
                if one.has_listened():
                    self.send(CoordinatorListens())
        if (sign := one.sign()) not in (None, self._coordinator_sign):
            self._coordinator_sign = sign
            self.send(CoordinatorSigned())

    def _ask(self, now_s: float) -> None:
        if self._probe is not None and (answer := self._probe.poll(now_s)) is not None:
            self._take_devices(answer)
        for name, check in self._checks.items():
            if not self.launch.group(name).over and (answer := check.poll(now_s)) is not None:
                self.send(Checked(name, answer.status, answer.text))

    def _take_devices(self, answer: Answer) -> None:
        """An answer that cannot be read changes nothing, and is reported once."""
        problem = "" if answer.status == 0 else f"ended with status {answer.status}: {answer.text}"
        if problem and "probe" not in self._mentioned:
            self._listener.say(f"--probe {problem}. Groups that are due wait for its next answer.")
        self._mentioned = self._mentioned | {"probe"} if problem else self._mentioned - {"probe"}
        if not problem:
            self.send(DevicesSeen(frozenset(answer.text.replace(",", " ").split()), answer.asked_s))

    # ---- effects ----

    def _do(self, effect: Effect) -> None:
        match effect:
            case Start(group=group):
                self._try_to_start(self.launch.group(group))
            case Terminate() | Kill() | KillRest() | ShowStacks():
                self._signal(effect)
            case AskDevices():
                if self._probe is not None:
                    self._probe.hurry(PROBE_WAITING_S)
            case StartCoordinator():
                self._start_coordinator()
            case KillCoordinator():
                assert self._coordinator is not None
                self._coordinator.child.kill()
            case Say(text=text, log=log):
                tail = "" if log is None else self._log_tail(log)
                self._listener.say(f"{text}\n{tail}".rstrip())
            case Write(entry=entry):
                self._listener.write(entry)
            case _:
                assert_never(effect)

    def _signal(self, effect: Terminate | Kill | KillRest | ShowStacks) -> None:
        for process in self._lives[effect.group]:
            match effect:
                case Terminate():
                    process.child.terminate()
                case Kill():
                    process.child.kill()
                case ShowStacks():
                    process.child.say_where()
                case KillRest():
                    with contextlib.suppress(OSError):  # looked for again
                        process.child.kill_rest()

    def _try_to_start(self, group: Group) -> None:
        assert group.life is not None
        name = group.name
        member = self.members[name]
        if group.life.devices:
            member = member.on(group.life.devices)
        starts = [self._start_of(member, group.life.number, rank) for rank in member.ranks_here]
        try:
            ready, warm = self._warm_for(member, starts[0].words)
            if not ready:
                return
            children = self._start(member, group.life.number, starts, warm)
        except (OSError, RuntimeError) as error:  # no descriptor, process, memory or disk is free
            self.send(StartFailed(name, str(error)))
            return
        pids = tuple(child.pid for child in children)
        self.send(Started(name, pids, warm=all(child.warm for child in children)))

    def _start(
        self, member: Member, number: int, starts: Sequence[RankStart], warm: Warm | None
    ) -> list[Child]:
        life = f"{member.name}.{number}"
        files = [self._phases / f"{life}.{rank}.phase" for rank in member.ranks_here]
        # What clears temporary folders may have removed it.
        self._phases.mkdir(mode=0o700, parents=True, exist_ok=True)
        starts = [
            replace(
                start,
                words=start.words if warm is not None else with_statuses(start.words),
                environment={PHASE_FILE: str(file), **start.environment},
            )
            for file, start in zip(files, starts, strict=True)
        ]
        children = start_ranks(member, starts, self._processes, name=life, warm=warm)
        ranks = zip(member.ranks_here, children, files, strict=True)
        self._lives[member.name] = [_Process(rank, child, file) for rank, child, file in ranks]
        for process in self._lives[member.name]:
            self._logs[LogOf(member.name, number, process.rank)] = process.child
        return children

    def _warm_for(self, member: Member, words: Sequence[str]) -> tuple[bool, Warm | None]:
        """Return whether a life can start now, and the warm process to fork it from."""
        python = python_command(words) if self._plan.warm else None
        if python is None:
            return True, None
        warm = self._warm.get(member.name)
        if warm is None or (warm.problem and warm.was_ready):
            if warm is not None:
                self._processes.end_warm([warm], timeout_s=0.0)
            warm = self._warm[member.name] = self._processes.start_warm(
                f"{member.name}.warm",
                environment=member.environment(),
                preload=self._plan.preload,
                options=python.options,
            )
        if warm.problem and member.name not in self._mentioned:
            self._mentioned.add(member.name)
            self._listener.say(f"{member.name} starts without a warm process from now on: {warm.problem}")
        return warm.ready or bool(warm.problem), warm

    def _start_coordinator(self) -> None:
        assert self._coordinator is not None
        try:
            self._coordinator.start_again()
        except (OSError, RuntimeError) as error:
            self.send(CoordinatorStartFailed(str(error)))
            return
        self._coordinator_sign = None
        self.send(CoordinatorUp(self._coordinator.child.pid))

    # ---- the plan ----

    def _placed(self, member: Member, address: str | None) -> Member:
        cache = self._processes.folder / "compiled" / member.name if self._plan.caches else None
        return replace(
            member,
            coordinator=member.coordinator or address,
            compilation_cache=member.compilation_cache or cache,
        )

    def _as_planned(self, member: Member, _life: int, rank: int) -> RankStart:
        values = {
            "{coordinator}": member.coordinator or "",
            "{group}": member.name,
            "{rank}": str(rank),
            "{folder}": str(self._processes.folder),
        }
        words = list(self._plan.command)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return RankStart(words=words)

    def _probe_every_s(self) -> float:
        return min(PROBE_MOST_EVERY_S, max(PROBE_LEAST_EVERY_S, self._plan.patience_s / 4))

    def _check_environment(self, member: Member) -> dict[str, str]:
        return {**os.environ, **member.environment(), **environment_of(member.devices)}

    def _log_tail(self, log: LogOf) -> str:
        if not log.group:
            return "" if self._coordinator is None else self._coordinator.child.log_tail()
        child = self._logs.get(log)
        return "" if child is None else child.log_tail()

    def _remove_phase_files(self, group: str) -> None:
        with contextlib.suppress(OSError):  # no later life has a file of this name
            for process in self._lives[group]:
                process.phase_file.unlink(missing_ok=True)
