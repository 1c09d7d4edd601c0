"""Keeps one group alive: `step(group, event, now_s, around) -> (group, effects)`. Pure.

Theory of operation
===================

Two things say where a group stands. Its *phase* is what its processes do:

    WAITING -> STARTING -> RUNNING -> ENDING -> KILLED -> LINGERING -> SWEPT
       ^          |           |         |         |           |          |
       +----------+-----------+---------+---------+-----------+----------+
                                                                 -> DONE, LEFT, GIVEN_UP

A life runs until its processes have all ended. ENDING: they were asked to (SIGTERM), or a process has failed.
KILLED: they were sent SIGKILL. LINGERING: they have ended, and their child processes may end by themselves; SWEPT:
these were killed. Each phase has one time at which it ends by itself (`until_s`).

Its *aim* is what follows the end of its life. It only rises, but for CLIMB and MOVE, which end with the life:

    RUN      start again
    CLIMB    start again at once, with more devices
    MOVE     start again once its check is OK
    RETIRE   leave: this group alone was asked to
    LEAVE    leave: the launch ends, or its job is done
    GIVE_UP  end at once

A group gets as `Around` the facts that it cannot know by itself: whether it may leave for its own sake (CLIMB, MOVE),
and whether the job lives without it. `launch.py` has both rules.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import assert_never

from jaxft_protocol.values import SLOW_WAIT_S

from jaxft_launch.supervise.core.entries import (
    CheckChanged,
    CheckDrains,
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
from jaxft_launch.supervise.core.ladder import Ladder
from jaxft_launch.supervise.core.life import (
    DEADLINES_S,
    SILENCE,
    STACKS_S,
    Life,
    Rank,
    ended,
    late,
    signed,
)
from jaxft_launch.supervise.core.restarts import GiveUp, Lived, Past, after, jitter_of
from jaxft_launch.supervise.core.values import (
    AGAIN,
    ERROR,
    REFUSED,
    AskDevices,
    Checked,
    DevicesSeen,
    DrainAsked,
    Effect,
    Ended,
    Ending,
    GroupEvent,
    Kill,
    KillRest,
    LogOf,
    RestSeen,
    Say,
    ShowStacks,
    Signed,
    Start,
    Started,
    StartFailed,
    StrikeAsked,
    Terminate,
    Tick,
    Write,
    ending_of,
)

# Child processes may end by themselves after their parent: Python's tracker of shared memory frees that first.
REST_S = 2.0
# After SIGKILL, a process ends as soon as the kernel has reclaimed its memory.
REAP_S = 30.0
OK, CRITICAL = 0, 2
LEVELS = {OK: "ok", 1: "warning", CRITICAL: "critical"}
UNKNOWN = "unknown"


class Phase(StrEnum):
    """The state of a group's processes. The live table shows these words."""

    WAITING = "waits"
    STARTING = "starts"
    RUNNING = "runs"
    ENDING = "ends"
    KILLED = "killed"
    LINGERING = "lingers"
    SWEPT = "swept"
    DONE = "done"
    LEFT = "left"
    GIVEN_UP = "given up"


OVER = (Phase.DONE, Phase.LEFT, Phase.GIVEN_UP)
# The processes of the current life run.
ALIVE = (Phase.RUNNING, Phase.ENDING, Phase.KILLED)


class Aim(IntEnum):
    RUN = 0
    CLIMB = 1
    MOVE = 2
    RETIRE = 3
    LEAVE = 4
    GIVE_UP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When a supervisor ends its group, and how often it restarts it."""

    deadlines: Mapping[str, float] = field(default_factory=lambda: DEADLINES_S)
    max_restarts: int = 10
    drain_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Facts that a group cannot know by itself.

    Attributes:
        may_leave: whether the job keeps its state without this group, and no other is away for its own sake.
        job_lives: whether the job continues without it.
        devices: the last answer of `--probe`; None before the first one.
    """

    may_leave: bool = False
    job_lives: bool = False
    devices: DevicesSeen | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of a launch.

    Attributes:
        phase, until_s, aim: see above. `until_s`: when the phase ends by itself.
        life: the current life, or the last one.
        lives: the number of lives so far.
        step: the highest step of former lives.
        log: of the last life that found the job's state.
        ended_s: when the last life ended.
        lacks: the devices that it waits for, as reported.
        level, text: of its check; `sick`: it was critical, and has not been OK since.
        mentioned: the lines of this phase that are written only once.
        drained, late: how it is over: it alone has left; the job was finished without it.
        status, why: of a group that was given up, or ended without progress.
    """

    name: str
    rules: Rules = field(default_factory=Rules)
    ranks: tuple[int, ...] = (0,)
    spare: bool = False
    ladder: Ladder | None = None
    phase: Phase = Phase.WAITING
    until_s: float = -math.inf
    aim: Aim = Aim.RUN
    life: Life | None = None
    lives: int = 0
    past: Past = field(default_factory=Past)
    step: int = 0
    log: LogOf | None = None
    ended_s: float = -math.inf
    lacks: tuple[str, ...] = ()
    level: str = UNKNOWN
    text: str = ""
    sick: bool = False
    mentioned: frozenset[str] = frozenset()
    was_stranded: bool = False
    took_part: bool = False
    drained: bool = False
    late: bool = False
    status: int = AGAIN
    why: str = ""

    @property
    def over(self) -> bool:
        return self.phase in OVER

    @property
    def stays(self) -> bool:
        """Whether it runs, and is to run on."""
        return self.phase is Phase.RUNNING and self.aim is Aim.RUN and self.until_s == math.inf

    @property
    def holds_the_state(self) -> bool:
        """Whether the job keeps its state as long as this group runs."""
        return self.stays and self.life is not None and self.life.holds_the_state

    @property
    def stranded(self) -> bool:
        """Whether it has no state, and its current life, or the last one, finds no group that holds the job's."""
        if self.aim >= Aim.RETIRE or self.over or self.life is None:
            return False
        if self.phase is Phase.RUNNING and self.life.has_begun:
            return self.life.stranded
        return self.was_stranded

    @property
    def highest_step(self) -> int:
        return max(self.step, 0 if self.life is None else self.life.step)


Result = tuple[Group, tuple[Effect, ...]]


def step(group: Group, event: GroupEvent | Tick, now_s: float, around: Around) -> Result:
    """Return the group after an event, and what its shell has to do, in order."""
    match event:
        case Tick():
            return _tick(group, now_s, around)
        case Started():
            return _started(group, event, now_s)
        case StartFailed(error=error):
            assert group.phase is Phase.STARTING
            news = Say(f"{group.name} cannot be started: {error}")
            group, effects = _go_on(group, Lived(ending=Ending.AGAIN, status=AGAIN), now_s, around)
            return group, (news, *effects)
        case Signed():
            assert group.life is not None
            return replace(group, life=signed(group.life, event, now_s)), ()
        case Ended():
            return _ended(group, event, now_s)
        case RestSeen():
            return _rest(group, event.pids, now_s, around)
        case Checked():
            return _checked(group, event)
        case DrainAsked():
            return drain(group, Aim.RETIRE, now_s)
        case StrikeAsked():
            return kill(group) if group.phase in ALIVE else (group, ())
        case _:
            assert_never(event)


def drain(group: Group, aim: Aim, now_s: float) -> Result:
    """Ask the group to finish its step and end; `aim`: what follows."""
    if group.over or group.aim > aim:
        return group, ()
    group = replace(group, aim=aim)
    if group.phase in (Phase.WAITING, Phase.STARTING):
        return replace(group, phase=Phase.LEFT), ()
    if group.phase not in (Phase.RUNNING, Phase.ENDING) or group.life is None:
        return group, ()
    until_s = now_s + group.rules.drain_timeout_s
    fails = group.life.failed is not None  # its processes are ended within a second
    life = replace(group.life, leaves_until_s=until_s)
    group = replace(
        group, phase=Phase.ENDING, until_s=min(group.until_s, until_s) if fails else until_s, life=life
    )
    return group, (Terminate(group.name),)


def leave(group: Group, until_s: float) -> Group:
    """Do not start it any more; what still runs is killed at `until_s`."""
    if group.over or group.aim >= Aim.RETIRE:
        return group
    if group.phase in (Phase.WAITING, Phase.STARTING):
        return replace(group, phase=Phase.LEFT)
    return replace(group, aim=Aim.LEAVE, until_s=min(group.until_s, until_s))


def kill(group: Group) -> Result:
    """Send SIGKILL to its processes."""
    assert group.life is not None
    life = replace(group.life, killed=True, leaves_until_s=0.0)
    return replace(group, phase=Phase.KILLED, until_s=math.inf, life=life), (Kill(group.name),)


def end(group: Group, aim: Aim) -> Result:
    """End the group at once. It is not started again."""
    if group.over:
        return group, ()
    group = replace(group, aim=max(aim, group.aim))
    if group.phase in ALIVE:
        return kill(group)
    if group.phase in (Phase.LINGERING, Phase.SWEPT):
        return replace(group, until_s=-math.inf), ()
    return replace(group, phase=Phase.GIVEN_UP if aim is Aim.GIVE_UP else Phase.LEFT), ()


def give_up(group: Group, why: str) -> Result:
    """End the group at once, for an error of its program: another launch would end in the same way."""
    group, effects = _given_up(group, why, ERROR, group.log)
    group, more = end(group, Aim.GIVE_UP)
    return group, (*effects, *more)


# ---- time ----


def _tick(group: Group, now_s: float, around: Around) -> Result:
    match group.phase:
        case Phase.WAITING if group.aim >= Aim.RETIRE:
            return replace(group, phase=Phase.LEFT), ()
        case Phase.WAITING if now_s >= group.until_s:
            return _try_to_start(group, now_s, around)
        case Phase.STARTING if now_s >= group.until_s and "starts" not in group.mentioned:
            return _once(
                group, "starts", f"{group.name} waits until its warm process has imported its modules"
            )
        case Phase.RUNNING | Phase.ENDING:
            return _watch(group, now_s, around)
        case Phase.KILLED:
            return _reap(group, now_s)
        case _:
            return group, ()


def _try_to_start(group: Group, now_s: float, around: Around) -> Result:
    name = group.name
    if group.sick:
        return _once(group, "sick", f"{name} is not started here until its check is OK: {group.text}")
    if group.ladder is None:
        return _start(group, (), now_s)
    seen = around.devices
    if seen is None or seen.asked_s < group.ended_s:
        return group, (AskDevices(),)  # the answer is older than what may have ended the last life
    ladder = group.ladder.look(seen.working, now_s)
    group = replace(group, ladder=ladder)
    if devices := ladder.start(seen.working, now_s):
        return _start(replace(group, lacks=()), devices, now_s)
    if (lacks := ladder.missing(seen.working)) == group.lacks:
        return group, (AskDevices(),)
    text = (
        f"{name} waits for its devices {', '.join(lacks)}; after {ladder.patience_s:g} s it starts with as many as "
        f"work, {ladder.rungs[-1]} at least"
    )
    entry = DevicesMissing(group=name, devices=list(lacks), wait_s=ladder.patience_s)
    return replace(group, lacks=lacks), (AskDevices(), Say(text), Write(entry))


def _start(group: Group, devices: tuple[str, ...], now_s: float) -> Result:
    life = Life(number=group.lives, started_s=now_s, pids=(), devices=devices, ranks=())
    group = replace(
        group,
        phase=Phase.STARTING,
        until_s=now_s + SLOW_WAIT_S,
        mentioned=frozenset(),
        step=group.highest_step,
        life=life,
    )
    return group, (Start(group.name, life.number, devices),)


def _started(group: Group, event: Started, now_s: float) -> Result:
    assert group.phase is Phase.STARTING
    assert group.life is not None
    life = replace(group.life, started_s=now_s, pids=event.pids, ranks=tuple(Rank() for _ in event.pids))
    group = replace(group, phase=Phase.RUNNING, until_s=math.inf, life=life, lives=group.lives + 1)
    entry = GroupStarted(
        group=group.name,
        life=life.number,
        pids=list(event.pids),
        warm=event.warm,
        devices=list(life.devices),
    )
    return group, (
        Say(f"started {group.name} (pid {', '.join(map(str, event.pids))})"),
        Write(entry),
    )


def _watch(group: Group, now_s: float, around: Around) -> Result:
    """Kill a life that has exceeded a time; let a group that is sick, or could have more devices, leave."""
    life = group.life
    assert life is not None
    if now_s >= group.until_s:
        return _out_of_time(group)
    if group.phase is Phase.RUNNING and (overdue := late(life, now_s, group.rules.deadlines)):
        life = replace(life, overdue=overdue, failed=overdue.rank)
        group = replace(group, phase=Phase.ENDING, until_s=now_s + STACKS_S, life=life)
        return group, (ShowStacks(group.name),)
    if not group.stays:
        return group, ()
    if group.sick:
        return _move(group, life, now_s, around)
    return _climb(group, life, now_s, around)


def _out_of_time(group: Group) -> Result:
    assert group.life is not None
    if group.life.failed is not None:
        group, news = _tell_failure(group)
    elif group.aim is Aim.LEAVE:
        news = (Say(f"{group.name} did not end in time: it is killed"),)
    else:
        news = (Say(f"{group.name} did not leave within {group.rules.drain_timeout_s:g} s: it is killed"),)
    group, effects = kill(group)
    return group, (*news, *effects)


def _move(group: Group, life: Life, now_s: float, around: Around) -> Result:
    if not around.may_leave:
        return _once(
            group,
            "kept",
            f"{group.name} is kept although its check is critical: no other group holds the job's state now",
        )
    text = f"{group.name} finishes its step and leaves, until its check is OK: {group.text}"
    entry = CheckDrains(group=group.name, life=life.number, text=group.text)
    group, effects = drain(group, Aim.MOVE, now_s)
    return group, (Say(text), Write(entry), *effects)


def _climb(group: Group, life: Life, now_s: float, around: Around) -> Result:
    if group.ladder is None or around.devices is None:
        return group, ()
    ladder = group.ladder.look(around.devices.working, now_s, used=life.devices)
    group = replace(group, ladder=ladder)
    if not around.may_leave or not ladder.may_climb(now_s):
        return group, ()
    text = f"{group.name} has more devices than it uses: it finishes its step and starts again with them"
    entry = GroupClimbs(group=group.name, life=life.number)
    group, effects = drain(group, Aim.CLIMB, now_s)
    return group, (Say(text), Write(entry), *effects)


def _reap(group: Group, now_s: float) -> Result:
    """A process that was killed ends at once, unless the kernel cannot end it."""
    life = group.life
    assert life is not None
    if group.until_s == math.inf:
        return replace(group, until_s=now_s + REAP_S), ()
    if now_s < group.until_s:
        return group, ()
    pids = ", ".join(map(str, life.running()))
    why = "It is in the kernel, as for a driver or a file server that hangs, or belongs to another user."
    if group.aim < Aim.RETIRE:
        text = f"{group.name} (pid {pids}) was killed, and has not ended. {why}"
        return replace(group, until_s=now_s + 10 * REAP_S), (Say(text),)
    group, effects = _given_up(group, f"Its process {pids} was killed, and has not ended. {why}", AGAIN, None)
    return replace(group, phase=Phase.GIVEN_UP), effects


# ---- ends ----


def _ended(group: Group, event: Ended, now_s: float) -> Result:
    assert group.life is not None
    life, kill_at_s = ended(group.life, event.rank, event.status, now_s)
    shared = group.phase is Phase.RUNNING  # in a drain, each process ends by itself
    group = replace(group, life=life)
    news: tuple[Effect, ...] = ()
    if kill_at_s is not None and shared:
        group = replace(group, phase=Phase.ENDING, until_s=kill_at_s)
    if not life.over:
        return group, ()
    if life.failed is not None:
        group, news = _tell_failure(group)
    lingers_s = max(now_s + REST_S, life.leaves_until_s)
    return replace(group, phase=Phase.LINGERING, until_s=lingers_s), news


def _rest(group: Group, pids: tuple[int, ...], now_s: float, around: Around) -> Result:
    if not pids or (group.phase is Phase.SWEPT and now_s >= group.until_s):
        return _conclude(group, now_s, around)
    if group.phase is Phase.SWEPT or now_s < group.until_s:
        return group, ()
    text = f"killed child processes that {group.name} had left behind (pid {', '.join(map(str, pids))})"
    group = replace(group, phase=Phase.SWEPT, until_s=now_s + REAP_S)
    return group, (Say(text), KillRest(group.name))


def _tell_failure(group: Group) -> tuple[Group, tuple[Effect, ...]]:
    """Say once which process has ended a life."""
    life = group.life
    assert life is not None
    assert life.failed is not None
    if life.reported:
        return group, ()
    rank, pid = group.ranks[life.failed], life.pids[life.failed]
    several = len(group.ranks) > 1
    name = f"{group.name}, rank {rank}" if several else group.name
    group = replace(group, life=replace(life, reported=True))
    entry: Entry
    if (over := life.overdue) is not None:
        # Ranks that wait for another in a collective are in the same phase. A silent rank waits for none.
        others = ". It may wait for another: their logs say where each stood"
        text = (
            f"{name} (pid {pid}) has been in {over.phase} of step {over.step} for {over.lasted_s:.0f} s, which is "
            f"longer than {over.deadline_s:g} s (--deadlines {over.phase}=...): its group is killed"
            f"{others if several and over.phase != SILENCE else ''}"
        )
        entry = RankOverdue(
            group=group.name,
            life=life.number,
            rank=rank,
            pid=pid,
            phase=over.phase,
            step=over.step,
            lasted_s=round(over.lasted_s, 3),
            deadline_s=over.deadline_s,
        )
        return group, (Say(text), Write(entry))
    status = life.ranks[life.failed].status
    assert status is not None
    ending = ending_of(status)
    entry = RankEnded(group=group.name, life=life.number, rank=rank, pid=pid, status=status, ending=ending)
    return group, (Say(f"{name} (pid {pid}) ended with exit status {status} ({ending})"), Write(entry))


def _conclude(group: Group, now_s: float, around: Around) -> Result:
    """Decide what follows the end of a life."""
    life = group.life
    assert life is not None
    ending, status = life.result()
    lived_s = round(now_s - life.started_s, 3)
    name = group.name
    entry = GroupEnded(
        group=name, life=life.number, ending=ending, status=status, step=life.step, lived_s=lived_s
    )
    effects: tuple[Effect, ...] = (Write(entry),)
    if group.ladder is not None:
        effects = (*effects, AskDevices())
    group = replace(
        group,
        ended_s=now_s,
        step=group.highest_step,
        was_stranded=life.stranded,
        took_part=group.took_part or life.committed > 0 or life.healed,
        log=group.log if life.stranded else _log_of(group, life),
    )
    if ending is Ending.DONE:
        group = replace(group, phase=Phase.DONE, late=life.late)
        return group, (*effects, Say(f"{name} is done{_but(life)}"))
    if group.aim in (Aim.CLIMB, Aim.MOVE) and ending in (Ending.DRAINED, Ending.KILLED, Ending.AGAIN):
        restarts = GroupRestarts(group=name, life=group.lives, wait_s=0.0)
        group = replace(group, aim=Aim.RUN, phase=Phase.WAITING, until_s=now_s, mentioned=frozenset())
        return group, (*effects, Write(restarts))
    if group.aim is Aim.GIVE_UP:
        return replace(group, phase=Phase.GIVEN_UP), effects
    if group.aim >= Aim.RETIRE or ending is Ending.DRAINED:
        drained = ending is Ending.DRAINED
        group = replace(group, phase=Phase.LEFT, drained=drained and group.aim is not Aim.LEAVE)
        text = f"{name} {'was drained' if drained else 'has left'}, at step {life.step}"
        return group, (*effects, Say(text))
    lived = Lived(
        ending=ending,
        status=status,
        committed=life.committed,
        lived_s=lived_s,
        stands_by=group.spare,
        job_lives=around.job_lives,
    )
    group, more = _go_on(replace(group, aim=Aim.RUN), lived, now_s, around)
    return group, (*effects, *more)


def _go_on(group: Group, lived: Lived, now_s: float, around: Around) -> Result:
    """Wait for the next start, or give the group up."""
    lived = replace(lived, job_lives=around.job_lives)
    decision = after(
        group.past,
        lived,
        max_restarts=group.rules.max_restarts,
        jitter=jitter_of(group.name, group.lives + group.past.fruitless),
    )
    if isinstance(decision, GiveUp):
        log = None if group.life is None else _log_of(group, group.life)
        group, effects = _given_up(group, decision.why, _status_of(lived), log)
        return replace(group, phase=Phase.GIVEN_UP), effects
    wait_s = decision.wait_s
    group = replace(
        group,
        past=decision.past,
        phase=Phase.WAITING,
        until_s=now_s + wait_s,
        mentioned=frozenset(),
        status=_status_of(lived),
        why=f"its last life ended with status {lived.status}",
    )
    entry = Write(GroupRestarts(group=group.name, life=group.lives, wait_s=round(wait_s, 3)))
    if not wait_s:
        return group, (entry,)
    why = f": {decision.why}" if decision.why else ""
    return group, (Say(f"{group.name} is restarted in {wait_s:.1f} s{why}"), entry)


def _given_up(group: Group, why: str, status: int, log: LogOf | None) -> tuple[Group, tuple[Effect, ...]]:
    entry = GroupGivenUp(group=group.name, life=max(0, group.lives - 1), why=why)
    group = replace(group, status=status, why=why)
    return group, (Say(f"{group.name} is given up. {why}", log), Write(entry))


# ---- its check ----


def _checked(group: Group, event: Checked) -> Result:
    """Note the answer of the check. A change is reported; the next `Tick` decides the consequences."""
    level = LEVELS.get(event.status, UNKNOWN)
    sick = event.status == CRITICAL or (group.sick and event.status != OK)
    before = group.level
    group = replace(group, level=level, text=event.text, sick=sick)
    if level == before:
        return group, ()
    entry = CheckChanged(group=group.name, level=level, before=before, text=event.text)
    group = replace(group, mentioned=group.mentioned - {"sick", "kept"})
    return group, (Say(f"{group.name}: its check is {level} (was {before}): {event.text}"), Write(entry))


# ---- texts ----


def _once(group: Group, what: str, text: str) -> Result:
    if what in group.mentioned:
        return group, ()
    return replace(group, mentioned=group.mentioned | {what}), (Say(text),)


def _log_of(group: Group, life: Life) -> LogOf:
    return LogOf(group.name, life.number, group.ranks[life.failed or 0])


def _status_of(lived: Lived) -> int:
    """The launcher's own exit status for a group that was given up."""
    match lived.ending:
        case Ending.REFUSED:
            return REFUSED
        case Ending.ERROR:
            return lived.status if 0 < lived.status < 128 else ERROR
        case _:
            return AGAIN


def _but(life: Life) -> str:
    """The odd fact about a life that was done, if there is one."""
    if life.late:
        return ": its job was finished without it"
    if life.joined:
        return ""
    return ", but its program has called no step: does it come to `with jaxft.Manager(...)`?"
