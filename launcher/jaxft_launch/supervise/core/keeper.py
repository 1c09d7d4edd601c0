"""Keeps a launch's own coordinator alive: `step(keeper, event, now_s) -> (keeper, effects)`. Pure.

A coordinator that has ended is started again, after a wait that doubles up to a few seconds: it costs nothing to
start, and groups wait for one for their `failure_timeout_s` (60 s) only. A coordinator that is silent (it is stopped,
or hangs) is killed, since it keeps its port and its store from the next one; so is a start that does not listen in
time.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from jaxft_launch.supervise.core.entries import CoordinatorEnded, CoordinatorStarted
from jaxft_launch.supervise.core.restarts import FIRST_WAIT_S, STEADY_S, doubled_s
from jaxft_launch.supervise.core.values import (
    CoordinatorDown,
    CoordinatorListens,
    CoordinatorSigned,
    CoordinatorStartFailed,
    CoordinatorUp,
    Effect,
    KeeperEvent,
    KillCoordinator,
    LogOf,
    Say,
    StartCoordinator,
    Tick,
    Write,
)

# Well below the time for which groups wait for a coordinator.
LONGEST_WAIT_S = 5.0
START_TIMEOUT_S = 60.0


class KeeperPhase(StrEnum):
    WAITING = "waits"  # for its next start
    STARTING = "starts"
    UP = "listens"
    KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """The coordinator of a launch.

    Attributes:
        address: where it listens, in all its lives.
        silence_s: for how long it may give no sign of life after its first one.
        pid: of its process.
        since_s: since when it is in its phase.
        sign_s: when its last sign of life was seen; None before the first one.
        due_s: when it is started again.
        ends: how often it has ended in a row.
    """

    address: str
    silence_s: float = math.inf
    phase: KeeperPhase = KeeperPhase.WAITING
    pid: int = 0
    since_s: float = 0.0
    sign_s: float | None = None
    due_s: float = -math.inf
    ends: int = 0


Result = tuple[Keeper, tuple[Effect, ...]]


def step(keeper: Keeper, event: KeeperEvent | Tick, now_s: float) -> Result:
    """Return the keeper after an event, and what its shell has to do."""
    match event:
        case Tick():
            return _tick(keeper, now_s)
        case CoordinatorUp(pid=pid):
            keeper = replace(keeper, phase=KeeperPhase.STARTING, pid=pid, since_s=now_s, sign_s=None)
            news = Say(f"coordinator at {keeper.address} (pid {pid})")
            return keeper, (news, Write(CoordinatorStarted(pid=pid, address=keeper.address)))
        case CoordinatorStartFailed(error=error):
            keeper, _ = _wait(keeper, now_s)
            return keeper, (Say(f"the coordinator cannot be started: {error}"),)
        case CoordinatorListens():
            up = keeper.phase is KeeperPhase.STARTING
            return (replace(keeper, phase=KeeperPhase.UP, since_s=now_s) if up else keeper), ()
        case CoordinatorSigned():
            return replace(keeper, sign_s=now_s), ()
        case CoordinatorDown(status=status):
            return _down(keeper, status, now_s)
        case _:
            assert_never(event)


def _tick(keeper: Keeper, now_s: float) -> Result:
    match keeper.phase:
        case KeeperPhase.WAITING if now_s >= keeper.due_s:
            return replace(keeper, due_s=math.inf), (StartCoordinator(),)
        case KeeperPhase.STARTING if now_s - keeper.since_s > START_TIMEOUT_S:
            return _kill(keeper, f"does not listen after {START_TIMEOUT_S:.0f} s")
        case KeeperPhase.STARTING | KeeperPhase.UP if keeper.sign_s is not None:
            silent_s = now_s - keeper.sign_s
            if silent_s > keeper.silence_s:
                third = "a third of --deadlines silence=..., 5 s at least"
                return _kill(keeper, f"has been silent for {silent_s:.0f} s ({third})")
            return keeper, ()
        case _:
            return keeper, ()


def _kill(keeper: Keeper, why: str) -> Result:
    text = f"the coordinator (pid {keeper.pid}) {why}: it is killed"
    return replace(keeper, phase=KeeperPhase.KILLED), (Say(text), KillCoordinator())


def _down(keeper: Keeper, status: int, now_s: float) -> Result:
    if keeper.phase is KeeperPhase.UP and now_s - keeper.since_s >= STEADY_S:
        keeper = replace(keeper, ends=0)
    pid = keeper.pid
    keeper, wait_s = _wait(keeper, now_s)
    text = f"the coordinator (pid {pid}) ended with exit status {status}; restarted in {wait_s:.0f} s"
    return keeper, (Say(text, LogOf("")), Write(CoordinatorEnded(pid=pid, status=status, wait_s=wait_s)))


def _wait(keeper: Keeper, now_s: float) -> tuple[Keeper, float]:
    wait_s = doubled_s(FIRST_WAIT_S, keeper.ends, LONGEST_WAIT_S)
    waiting = KeeperPhase.WAITING
    return replace(keeper, phase=waiting, due_s=now_s + wait_s, ends=keeper.ends + 1), wait_s
