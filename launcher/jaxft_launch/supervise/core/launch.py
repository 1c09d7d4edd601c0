"""All groups of a launch, and its coordinator: `step(launch, event, now_s) -> (launch, effects)`. Pure.

Here are the rules that no group can follow alone:

1. *One at a time, while another group holds the job's state.* A group leaves for its own sake (a higher rung of its
   ladder, a check that is critical) only while no other group of this launch is leaving so, and only if a group that
   stays holds the state: it has committed a step itself or has healed completely, in its current life. A heal that
   has only begun does not count, and neither does the group itself, nor a group that leaves.
2. As long as the job lives without a group, that is never given up, unless the job refuses it.
3. Once a group is done, the job is: the others are not restarted, and have a deadline.
4. If each group has found that nothing holds the job's state any more, all are given up.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxft_launch.supervise.core import group as groups
from jaxft_launch.supervise.core import keeper as keepers
from jaxft_launch.supervise.core.entries import DrainBegan
from jaxft_launch.supervise.core.group import Aim, Around, Group, Phase, Rules
from jaxft_launch.supervise.core.keeper import Keeper
from jaxft_launch.supervise.core.life import END
from jaxft_launch.supervise.core.values import (
    AGAIN,
    DONE,
    ERROR,
    REFUSED,
    CoordinatorDown,
    CoordinatorListens,
    CoordinatorSigned,
    CoordinatorStartFailed,
    CoordinatorUp,
    DevicesSeen,
    Effect,
    Event,
    GroupEvent,
    Say,
    Signalled,
    Tick,
    Write,
)

INTERRUPTED = 130  # as a shell reports Ctrl-C
HANGUP, INTERRUPT = "SIGHUP", "SIGINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch.

    Attributes:
        groups: in their order.
        keeper: the launch's coordinator; None if that is elsewhere: then other launches may have groups of the job.
        devices: the last answer of `--probe`.
        signal: the first that the launcher got.
        job_done: whether a group was done.
    """

    groups: tuple[Group, ...]
    rules: Rules
    keeper: Keeper | None = None
    devices: DevicesSeen | None = None
    signal: str = ""
    job_done: bool = False

    @property
    def over(self) -> bool:
        return all(group.over for group in self.groups)

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)


Result = tuple[Launch, tuple[Effect, ...]]


def step(launch: Launch, event: Event, now_s: float) -> Result:
    """Return the launch after an event, and what its shell has to do, in order.

    Raises:
        StopIteration: there is no such group.
        AssertionError: the event cannot come in the phase of its group.
    """
    match event:
        case Tick():
            launch, effects = _tick(launch, now_s)
        case Signalled(name=name):
            launch, effects = _signalled(launch, name, now_s)
        case DevicesSeen():
            launch, effects = replace(launch, devices=event), ()
        case (
            CoordinatorUp()
            | CoordinatorStartFailed()
            | CoordinatorListens()
            | CoordinatorSigned()
            | CoordinatorDown()
        ):
            assert launch.keeper is not None
            keeper, effects = keepers.step(launch.keeper, event, now_s)
            launch = replace(launch, keeper=keeper)
        case _:
            launch, effects = _of_group(launch, launch.group(event.group), event, now_s)
    launch, more = _together(launch, now_s)
    return launch, (*effects, *more)


def may_leave(launch: Launch, group: Group) -> bool:
    """Whether the job keeps its state without a group that would leave for its own sake (rule 1)."""
    others = list(_others(launch, group))
    if any(_leaves_for_itself(other) for other in others):
        return False
    return any(other.holds_the_state for other in others) or _elsewhere(launch, group)


def job_lives(launch: Launch, group: Group) -> bool:
    """Whether the job continues without a group (rule 2)."""
    runs = any(
        other.stays and (other.holds_the_state or other.past.fruitless == 0)
        for other in _others(launch, group)
    )
    return runs or _elsewhere(launch, group)


def verdict(launch: Launch) -> tuple[int, tuple[str, ...]]:
    """Return the exit status of a launch that is over, and what its last lines say."""
    done = [each for each in launch.groups if each.phase is Phase.DONE]
    absent = [each for each in launch.groups if _took_no_part(each)]
    if launch.keeper is not None and done and all(each.late and each.took_part for each in done):
        # Only a launch that has started the coordinator knows all groups.
        return ERROR, (
            "no program has ended well: each group ended unexpectedly, and when it came back, the job was finished "
            "and its state gone. Later parts of the program, such as a second job, may not be done. Give "
            "each Manager checkpoints=: a restarted group then passes through a finished job",
        )
    if done and absent and not launch.signal:
        status = REFUSED if any(each.status == REFUSED for each in absent) else ERROR
        return status, tuple(
            f"the job was done, but {each.name} took no part: {_why_absent(each)}" for each in absent
        )
    if done:
        return DONE, ()
    if launch.signal == INTERRUPT:
        return INTERRUPTED, ()
    if all(each.drained for each in launch.groups):
        return DONE, ()
    given_up = [each.status for each in launch.groups if each.phase is Phase.GIVEN_UP]
    return next((status for status in given_up if status != AGAIN), AGAIN), ()


def _tick(launch: Launch, now_s: float) -> Result:
    effects: tuple[Effect, ...] = ()
    for name in [group.name for group in launch.groups]:  # each sees what those before it have begun
        launch, more = _of_group(launch, launch.group(name), Tick(), now_s)
        effects = (*effects, *more)
    if launch.keeper is not None:
        keeper, more = keepers.step(launch.keeper, Tick(), now_s)
        launch, effects = replace(launch, keeper=keeper), (*effects, *more)
    return launch, effects


def _of_group(launch: Launch, group: Group, event: GroupEvent | Tick, now_s: float) -> Result:
    ending = bool(launch.signal) or launch.job_done  # all groups end anyway
    around = Around(
        may_leave=not ending and may_leave(launch, group),
        job_lives=job_lives(launch, group),
        devices=launch.devices,
    )
    group, effects = groups.step(group, event, now_s, around)
    return _with(launch, group), effects


def _signalled(launch: Launch, name: str, now_s: float) -> Result:
    """Drain at the first signal, and end everything at the second."""
    if launch.signal and name == HANGUP:
        return launch, ()  # its terminal is closed, which may come as two signals, or after Ctrl-C
    effects: tuple[Effect, ...]
    if launch.signal:
        effects = (Say(f"got {name} again: ends all groups"),)
        for group in launch.groups:
            group, more = groups.end(group, Aim.LEAVE)
            launch, effects = _with(launch, group), (*effects, *more)
        return launch, effects
    text = (
        f"got {name}: each group finishes its step and leaves, within {launch.rules.drain_timeout_s:g} s. If no "
        "other group of the job is left, the job continues from its newest checkpoint when it is started again. "
        "Without checkpoints, begin another run in another --folder, or under another job name"
    )
    launch, effects = replace(launch, signal=name), (Say(text), Write(DrainBegan(signal=name)))
    for group in launch.groups:
        group, more = groups.drain(group, Aim.LEAVE, now_s)
        launch, effects = _with(launch, group), (*effects, *more)
    return launch, effects


def _together(launch: Launch, now_s: float) -> Result:
    """What follows for all groups (rules 3 and 4)."""
    # Not by a group that came too late: the others may be in the second phase of their program, with another job.
    if not launch.job_done and any(each.phase is Phase.DONE and not each.late for each in launch.groups):
        until_s = now_s + launch.rules.deadlines.get(END, math.inf)
        left = tuple(groups.leave(each, until_s) for each in launch.groups)
        launch = replace(launch, job_done=True, groups=left)
    left = [each for each in launch.groups if not each.over]
    # Only a launch that has started the coordinator knows all groups.
    if launch.keeper is None or launch.signal or not left or not all(each.stranded for each in left):
        return launch, ()
    effects: tuple[Effect, ...] = ()
    for group in left:
        group, more = groups.give_up(
            group,
            "No group holds the job's state any more, and none has brought a checkpoint of it: it cannot go on. To "
            "train again from the first step, start another launch, in another --folder if you gave one. With "
            "checkpoints= in its Manager, it would go on from the newest one.",
        )
        launch, effects = _with(launch, group), (*effects, *more)
    return launch, effects


def _others(launch: Launch, group: Group) -> Iterator[Group]:
    return (other for other in launch.groups if other.name != group.name)


def _leaves_for_itself(group: Group) -> bool:
    leaves = (Phase.ENDING, Phase.KILLED, Phase.LINGERING, Phase.SWEPT)
    return group.aim in (Aim.CLIMB, Aim.MOVE) and group.phase in leaves


def _elsewhere(launch: Launch, group: Group) -> bool:
    """Whether groups of other launches took part in the last step of this one.

    It counts all groups of this launch as members, since each of them may leave or fail meanwhile.
    """
    if group.life is None:
        return False
    return group.life.members > sum(not each.over for each in launch.groups)


def _took_no_part(group: Group) -> bool:
    return not group.spare and group.phase is not Phase.DONE and not group.took_part and not group.drained


def _why_absent(group: Group) -> str:
    if group.sick:
        return f"its check is {group.level}: {group.text}"
    if group.lacks:
        return f"it waits for its devices {', '.join(group.lacks)}"
    return group.why or "it has committed no step"


def _with(launch: Launch, group: Group) -> Launch:
    changed = tuple(group if each.name == group.name else each for each in launch.groups)
    return replace(launch, groups=changed)
