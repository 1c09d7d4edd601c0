"""The keeper of a launch's own coordinator."""

import pytest

from jaxft_launch.supervise.core import keeper as core
from jaxft_launch.supervise.core.entries import CoordinatorEnded
from jaxft_launch.supervise.core.keeper import Keeper
from jaxft_launch.supervise.core.values import (
    CoordinatorDown,
    CoordinatorListens,
    CoordinatorSigned,
    CoordinatorStartFailed,
    CoordinatorUp,
    Effect,
    KeeperEvent,
    KillCoordinator,
    Say,
    StartCoordinator,
    Tick,
    Write,
)
from jaxft_launch.supervise.core.values import Tick as Time


class Kept:
    """A keeper whose coordinator starts as soon as it is to."""

    def __init__(self, silence_s: float = 20.0) -> None:
        self.keeper, self.now_s, self.waits_s = (
            Keeper(address="localhost:1", silence_s=silence_s),
            0.0,
            list[float](),
        )
        self.after(0.0)

    def send(self, event: KeeperEvent | Tick) -> list[Effect]:
        self.keeper, effects = core.step(self.keeper, event, self.now_s)
        for effect in effects:
            if isinstance(effect, StartCoordinator):
                self.send(CoordinatorUp(7))
                self.send(CoordinatorListens())
            if isinstance(effect, Write) and isinstance(effect.entry, CoordinatorEnded):
                self.waits_s.append(effect.entry.wait_s)
        return list(effects)

    def after(self, seconds: float) -> list[Effect]:
        self.now_s += seconds
        return self.send(Time())


def test_a_coordinator_is_back_long_before_groups_end_for_it() -> None:
    """They wait for 60 s. A wait that doubles without a low limit ended the job at the seventh death."""
    one = Kept()
    for _ in range(100):
        one.after(30.0)
        one.send(CoordinatorDown(-9))
    assert one.waits_s[:4] == [1.0, 2.0, 4.0, 5.0]
    assert max(one.waits_s) == 5.0


def test_a_coordinator_that_has_lived_for_long_is_restarted_soon() -> None:
    """Three crashes in a day are no reason to let the job stand for longer."""
    one = Kept()
    for _ in range(3):
        one.after(10.0)
        one.send(CoordinatorDown(1))
    one.after(10.0)
    one.after(600.0)
    one.send(CoordinatorDown(1))
    assert one.waits_s == [1.0, 2.0, 4.0, 1.0]


def test_a_coordinator_that_cannot_be_started_is_tried_again() -> None:
    one = Kept()
    one.send(CoordinatorDown(1))
    one.keeper, _ = core.step(one.keeper, Time(), one.now_s + 1.0)
    (line,) = one.send(CoordinatorStartFailed("[Errno 24] Too many open files"))
    assert line == Say("the coordinator cannot be started: [Errno 24] Too many open files")
    assert StartCoordinator() in one.after(10.0)


@pytest.mark.parametrize("signs", [True, False])
def test_a_coordinator_that_gives_no_sign_any_more_is_killed(*, signs: bool) -> None:
    """Unless it has never given any sign."""
    one = Kept(silence_s=20.0)
    if signs:
        one.send(CoordinatorSigned())
    assert KillCoordinator() not in one.after(19.0)
    assert (KillCoordinator() in one.after(2.0)) is signs
    assert one.after(1.0) == []  # once


def test_a_next_life_has_its_own_first_sign() -> None:
    one = Kept(silence_s=20.0)
    one.send(CoordinatorSigned())
    one.send(CoordinatorDown(1))
    one.after(5.0)
    assert KillCoordinator() not in one.after(100.0)


def test_a_coordinator_that_does_not_listen_is_killed() -> None:
    keeper, _ = core.step(Keeper(address="localhost:1"), CoordinatorUp(7), 0.0)
    keeper, effects = core.step(keeper, Time(), 59.0)
    assert effects == ()
    _, effects = core.step(keeper, Time(), 61.0)
    assert KillCoordinator() in effects
