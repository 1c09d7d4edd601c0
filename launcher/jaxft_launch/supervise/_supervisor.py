"""Keeps one group alive: starts it, restarts it when it has ended, and ends it when it does not move."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from jaxft_launch.processes._processes import Processes
from jaxft_launch.processes._python_command import python_command
from jaxft_launch.processes._ranks import Member
from jaxft_launch.processes._statuses import AGAIN, ERROR, REFUSED, Ending, ending_of
from jaxft_launch.processes._warm import Warm
from jaxft_launch.supervise._deadlines import DEFAULTS, SILENCE
from jaxft_launch.supervise._journal import (
    DevicesMissing,
    Entry,
    GroupClimbs,
    GroupEnded,
    GroupGivenUp,
    GroupRestarts,
    GroupStarted,
    RankEnded,
    RankOverdue,
)
from jaxft_launch.supervise._ladder import Ladder
from jaxft_launch.supervise._life import Life, fill
from jaxft_launch.supervise._probe import Probe
from jaxft_launch.supervise._restarts import GiveUp, Past, after

# How often the phases of the processes are compared with their deadlines.
SUPERVISE_EVERY_S = 0.5
# Waits longer than this are logged.
FIRST_MENTION_S = 5.0


class State(StrEnum):
    """The state of a group, as the live table shows it."""

    WAITING = "waits"
    RUNNING = "runs"
    DONE = "done"
    # Not restarted: it was drained, or its job was over.
    LEFT = "left"
    GIVEN_UP = "given up"


OVER = (State.DONE, State.LEFT, State.GIVEN_UP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When a supervisor ends its group, and how often it restarts it."""

    deadlines: Mapping[str, float] = field(default_factory=lambda: DEFAULTS)
    max_restarts: int = 10
    warm: bool = True
    preload: tuple[str, ...] = ()
    drain_timeout_s: float = 60.0


class Supervisor:
    """Supervises one group. Call `poll` often: it never waits."""

    def __init__(
        self,
        member: Member,
        command: Sequence[str],
        processes: Processes,
        rules: Rules,
        *,
        phases: Path,
        write: Callable[[Entry], None],
        say: Callable[[str], None],
        ladder: Ladder | None = None,
        probe: Probe | None = None,
    ) -> None:
        """`phases`: a folder on this machine; `write` gets the events, and `say` what people should read.

        `ladder` comes with a `probe`, which the launcher polls.
        """
        self.member = member
        self.state = State.WAITING
        self.life: Life | None = None
        self.lives = 0
        self.status = AGAIN
        self._command = tuple(command)
        self._processes = processes
        self._rules = rules
        self._phases = phases
        self._write = write
        self._say = say
        self._past = Past()
        self._step = 0  # the highest of former lives
        self._due_s = 0.0
        self._supervise_at_s = 0.0
        self._restarts = True
        self._drains = False
        self._retires = False
        self._kill_at_s = math.inf
        self._struck: int | None = None
        # Its job was finished without it, and the programs of other groups may have more to do.
        self.late = False
        self.drained = False  # it alone was asked to leave, and not all groups of this launcher
        first = fill(command, member, rank=0, folder=processes.folder)
        # For all lives of it.
        self._python = python_command(first) if rules.warm else None
        self._warm: Warm | None = None
        self._told_cold = False
        self._told_imports: Warm | None = None
        self._ladder = ladder
        self._probe = probe
        self._ended_s = time.monotonic()
        self._lacks: tuple[int, ...] = ()  # what it has said to wait for
        self._climbs = False
        self._ends = False
        self._stranded = False  # its last life found no group with the job's state
        self._before: Life | None = None  # the last one that was not so
        self._given_up = False

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def restarts(self) -> bool:
        """Whether the group is to run, now or later."""
        return self._restarts and not self.over

    @property
    def came_back_late(self) -> bool:
        """Whether a life of it trained and did not end well, and the next one found the job finished without it."""
        return self.late and self._past.step > 0

    @property
    def running_life(self) -> int | None:
        """The number of the current life; None if the group does not run, or has been told to end."""
        life = self.life
        if (
            life is None
            or self.state is not State.RUNNING
            or not self._restarts
            or self._climbs
            or self._struck == life.number
        ):
            return None
        return None if life.failed is not None else life.number

    @property
    def step(self) -> int:
        """The highest step that it told."""
        return max(self._step, 0 if self.life is None else self.life.step)

    @property
    def stranded(self) -> bool:
        """Whether it has no state, and its current life, or the last one, finds no group that holds the job's."""
        if not self.restarts or self.life is None:
            return False
        if self.state is State.RUNNING and self.life.has_begun:
            return self.life.stranded
        return self._stranded

    def poll(self) -> None:
        """Do what is due."""
        match self.state:
            case State.WAITING if not self._restarts:
                self.state = State.LEFT
            case State.WAITING if time.monotonic() >= self._due_s:
                self._try_to_start()
            case State.RUNNING:
                self._watch()
            case _:
                pass

    def drain(self) -> None:
        """Ask the group to finish its step and end. It is not restarted."""
        self._restarts = False
        self._drains = True
        if self.life is not None and self.state is State.RUNNING:
            self.life.terminate(within_s=self._rules.drain_timeout_s)

    def retire(self) -> None:
        """Drain this group alone, as an operator does: the launch goes on. It is killed if it takes too long."""
        self._restarts = False
        self._retires = True
        self._kill_at_s = time.monotonic() + self._rules.drain_timeout_s
        if self.life is not None and self.state is State.RUNNING:
            self.life.terminate(within_s=self._rules.drain_timeout_s)

    def climb(self) -> None:
        """Drain this group and start it again with more devices, if a higher rung has enough by now."""
        life, probe, ladder = self.life, self._probe, self._ladder
        if ladder is None or probe is None or life is None or self.running_life is None:
            return
        ladder.look(probe.working, time.monotonic(), used=life.member.devices)
        if not ladder.may_climb(time.monotonic()):
            return
        self._climbs = True
        self._kill_at_s = time.monotonic() + self._rules.drain_timeout_s
        self._say(
            f"{self.name} has more devices than it uses: it finishes its step and starts again with them"
        )
        self._write(GroupClimbs(group=self.name, life=life.number))
        life.terminate(within_s=self._rules.drain_timeout_s)

    def strike(self) -> None:
        """Kill the group's current life. It is restarted like any group that was killed."""
        if self.life is not None and self.state is State.RUNNING:
            self._struck = self.life.number
            self.life.kill()

    def leave(self) -> None:
        """Do not restart it any more."""
        self._restarts = False

    def give_up(self, why: str) -> None:
        """End the group at once, for an error of its program: another launch would end in the same way."""
        self._tell_given_up(why, ERROR, "" if self._before is None else self._last_log(self._before))
        if self.state is not State.RUNNING:
            self.state = State.GIVEN_UP
            return
        self._given_up = True
        self.kill()

    def kill(self) -> None:
        """End the group at once. It is not restarted."""
        self._restarts = False
        self._ends = True
        if self.life is not None and self.state is State.RUNNING:
            self.life.kill()

    def _try_to_start(self) -> None:
        try:
            if self._may_start() and (member := self._member_now()) is not None:
                self._start(member)
        except (OSError, RuntimeError) as error:
            # No descriptor, process, memory or disk is free at the moment. The other groups do not end for that.
            self._say(f"{self.name} cannot be started: {error}")
            self._go_on_after(Ending.AGAIN, AGAIN, step=0, lived_s=0.0, log=str)

    def _may_start(self) -> bool:
        """Whether there is no warm process to wait for."""
        if self._python is None:
            return True
        if self._warm is None or (self._warm.problem and self._warm.was_ready):
            if self._warm is not None:
                self._processes.end_warm([self._warm], timeout_s=0.0)
                self._warm = None
            self._warm = self._processes.start_warm(
                f"{self.member.name}.warm",
                environment=self.member.environment(),
                preload=self._rules.preload,
                options=self._python.options,
            )
        if self._warm.problem and not self._told_cold:
            self._told_cold = True
            self._say(f"{self.member.name} starts without a warm process from now on: {self._warm.problem}")
        if self._warm.ready or self._warm.problem:
            return True
        if self._warm.age_s > FIRST_MENTION_S and self._told_imports is not self._warm:
            self._told_imports = self._warm
            imports = ", ".join(("jax", "jaxft", *self._rules.preload))
            self._say(f"{self.member.name} waits until its warm process has imported {imports}")
        return False

    def _member_now(self) -> Member | None:
        """The group on the devices that it starts with; None while it waits for some that do not work."""
        ladder, probe = self._ladder, self._probe
        if ladder is None or probe is None:
            return self.member
        if probe.asked_s < self._ended_s:
            return None  # the answer is older than what may have ended the last life
        ladder.look(probe.working, time.monotonic())
        if devices := ladder.start(probe.working, time.monotonic()):
            self._lacks = ()
            return self.member.on(devices)
        probe.group_waits()
        if (lacks := ladder.missing(probe.working)) != self._lacks:
            self._lacks = lacks
            self._say(
                f"{self.name} waits for its devices {', '.join(map(str, lacks))}; after {ladder.patience_s:g} s it "
                f"starts with as many as work, {ladder.rungs[-1]} at least"
            )
            self._write(DevicesMissing(group=self.name, devices=list(lacks), wait_s=ladder.patience_s))
        return None

    def _start(self, member: Member) -> None:
        self.life = life = Life(
            member, self.lives, self._command, self._processes, warm=self._warm, phases=self._phases
        )
        self.lives += 1
        self.state = State.RUNNING
        pids = [one.child.pid for one in life.ranks]
        self._say(f"started {self.member.name} (pid {', '.join(map(str, pids))})")
        self._write(
            GroupStarted(
                group=member.name, life=life.number, pids=pids, warm=life.warm, devices=list(member.devices)
            )
        )

    def _watch(self) -> None:
        life = self.life
        assert life is not None
        settled_before = life.settled
        if time.monotonic() >= self._kill_at_s:
            self._kill_at_s = math.inf
            self._say(
                f"{self.member.name} did not leave within {self._rules.drain_timeout_s:g} s: it is killed"
            )
            life.kill()
        over = life.over  # asked first: `watch` then sees how each of its processes has ended
        life.watch(fate=not (self._drains or self._retires or self._climbs))
        if time.monotonic() >= self._supervise_at_s:
            self._supervise_at_s = time.monotonic() + SUPERVISE_EVERY_S
            life.supervise(self._rules.deadlines)
        if life.settled and not settled_before:
            self._tell_failure(life)
        if life.untold and self._warm is not None:
            self._say(
                f"{self.name} was killed, but its warm process does not tell of its end: that is killed as well"
            )
            self._processes.end_warm([self._warm], timeout_s=0.0)
            self._warm = None
        if over and self._rest_has_ended(life):
            self._conclude(life)

    def _rest_has_ended(self, life: Life) -> bool:
        """Whether nothing runs any more that its processes have started."""
        try:
            has_ended, killed = life.end_rest()
        except OSError:  # what runs cannot be found out now: look again, while there is time
            return self._ends
        if killed:
            pids = ", ".join(map(str, killed))
            self._say(f"killed what the processes of {self.name} had started and left behind (pid {pids})")
        return has_ended

    def _tell_failure(self, life: Life) -> None:
        assert life.failed is not None
        one, name = life.failed, self.member.name
        if several := self.member.world > 1:
            name = f"{name}, rank {one.rank}"
        if (late := life.overdue) is not None:
            # Ranks that wait for another in a collective are in the same phase. One that is silent waits for none.
            waits = several and late.phase != SILENCE
            others = ". It may wait for another: their logs say where each stood" if waits else ""
            self._say(
                f"{name} (pid {one.child.pid}) has been in {late.phase} of step {late.step} for {late.lasted_s:.0f} "
                f"s, which is longer than {late.deadline_s:g} s (--deadlines {late.phase}=...): its group is killed"
                f"{others}"
            )
            self._write(
                RankOverdue(
                    group=self.member.name,
                    life=life.number,
                    rank=one.rank,
                    pid=one.child.pid,
                    phase=late.phase,
                    step=late.step,
                    lasted_s=round(late.lasted_s, 3),
                    deadline_s=late.deadline_s,
                )
            )
            return
        status = one.child.exit_code()
        assert status is not None
        self._say(f"{name} (pid {one.child.pid}) ended with exit status {status} ({ending_of(status)})")
        self._write(
            RankEnded(
                group=self.member.name,
                life=life.number,
                rank=one.rank,
                pid=one.child.pid,
                status=status,
                ending=ending_of(status),
            )
        )

    def _conclude(self, life: Life) -> None:
        """Decide what follows the end of a life."""
        life.clean_up()
        self._step = self.step
        self._stranded = life.stranded
        self._before = self._before if life.stranded else life
        name, (ending, status) = self.member.name, life.result()
        lived_s = round(time.monotonic() - life.started_s, 3)
        self._write(
            GroupEnded(
                group=name, life=life.number, ending=ending, status=status, step=life.step, lived_s=lived_s
            )
        )
        self._ended_s = time.monotonic()
        if self._probe is not None:
            self._probe.hurry()
        if ending is Ending.DONE:
            self.state, self.late = State.DONE, life.late
            self._say(f"{name} is done{_but(life)}")
            return
        if self._climbs and self._restarts:
            self._climbs, self._kill_at_s = False, math.inf
            self.state, self._due_s = State.WAITING, self._ended_s
            self._write(GroupRestarts(group=name, life=life.number + 1, wait_s=0.0))
            return
        if self._given_up:
            self.state = State.GIVEN_UP
            return
        if not self._restarts or ending is Ending.DRAINED:
            self.state = State.LEFT
            self.drained = ending is Ending.DRAINED and not self._drains
            self._say(
                f"{name} {'was drained' if ending is Ending.DRAINED else 'has left'}, at step {life.step}"
            )
            return
        self._go_on_after(
            ending, status, step=life.committed, lived_s=lived_s, log=lambda: self._last_log(life)
        )

    def _go_on_after(
        self, ending: Ending, status: int, *, step: int, lived_s: float, log: Callable[[], str]
    ) -> None:
        """Wait for the next start, or give the group up; `log` returns the last lines of what ended."""
        name = self.member.name
        decision = after(
            self._past,
            ending=ending,
            status=status,
            step=step,
            lived_s=lived_s,
            max_restarts=self._rules.max_restarts,
            jitter=random.random(),
            stands_by=self.member.spare,
        )
        if isinstance(decision, GiveUp):
            self.state = State.GIVEN_UP
            self._tell_given_up(decision.why, _status_of(ending, status), log())
            return
        self._past = decision.past
        self._due_s = time.monotonic() + decision.wait_s
        self.state = State.WAITING
        if decision.wait_s:
            self._say(f"{name} is restarted in {decision.wait_s:.1f} s")
        self._write(GroupRestarts(group=name, life=self.lives, wait_s=round(decision.wait_s, 3)))

    def _tell_given_up(self, why: str, status: int, log: str) -> None:
        self.status = status
        self._say(f"{self.name} is given up. {why}\n{log}".rstrip())
        self._write(GroupGivenUp(group=self.name, life=max(0, self.lives - 1), why=why))

    def _last_log(self, life: Life) -> str:
        return (life.failed or life.ranks[0]).child.log_tail()


def _status_of(ending: Ending, status: int) -> int:
    """The launcher's own exit status for a group that was given up."""
    match ending:
        case Ending.REFUSED:
            return REFUSED
        case Ending.ERROR:
            return status if 0 < status < 128 else ERROR
        case _:
            return AGAIN


def _but(life: Life) -> str:
    """What is odd about a life that was done."""
    if life.late:
        return ": its job was finished without it"
    if life.joined:
        return ""
    return ", but its program has called no step: does it come to `with jaxft.Manager(...)`?"
