"""Plays a launch's core: events in, effects out, and a clock that the test moves."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxft_launch.supervise.core import launch as core
from jaxft_launch.supervise.core.entries import Entry
from jaxft_launch.supervise.core.group import Group, Phase, Rules
from jaxft_launch.supervise.core.keeper import Keeper
from jaxft_launch.supervise.core.ladder import Ladder
from jaxft_launch.supervise.core.values import (
    DevicesSeen,
    Effect,
    Ended,
    Event,
    RestSeen,
    Say,
    Signed,
    Start,
    Started,
    Tick,
    Write,
)

E = TypeVar("E", bound=Entry)
ADDRESS = "localhost:1"


@dataclass
class Play:
    """A launch, and all effects so far.

    While `starts`, each `Start` is answered at once. No process leaves anything behind.
    """

    launch: core.Launch
    now_s: float = 100.0
    effects: list[Effect] = field(default_factory=list)
    starts: bool = True
    pid: int = 1000
    mark: float = 0.0

    def send(self, event: Event) -> list[Effect]:
        """Return the effects of an event."""
        self.launch, effects = core.step(self.launch, event, self.now_s)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Start) and self.starts:
                ranks = len(self[effect.group].ranks)
                self.pid += ranks
                self.send(Started(effect.group, tuple(range(self.pid - ranks, self.pid))))
        return list(effects)

    def after(self, seconds: float) -> list[Effect]:
        """Let time pass; return what that has caused."""
        self.now_s += seconds
        effects = self.send(Tick())
        for group in self.launch.groups:
            if group.phase in (Phase.LINGERING, Phase.SWEPT):
                effects += self.send(RestSeen(group.name, ()))
        return effects

    def sign(
        self, group: str, phase: str, step: int, *, rank: int = 0, committed: int = 0, members: int = 0
    ) -> None:
        self.mark += 1.0
        self.send(
            Signed(
                group=group,
                rank=rank,
                phase=phase,
                step=step,
                members=members,
                committed=committed,
                phase_mark=self.mark,
                life_mark=self.mark,
            )
        )

    def commit(self, group: str, step: int) -> None:
        """A group takes part in a step, and commits it."""
        self.sign(group, "outside", step, committed=step, members=len(self.launch.groups))

    def end(self, group: str, status: int, *, rank: int = 0) -> list[Effect]:
        """A process ends, and leaves no child process."""
        effects = self.send(Ended(group, rank, status))
        return effects + self.after(0.0)

    def until(self, phase: Phase, group: str, within_s: float = 1e4) -> None:
        """Let time pass until a group is in a phase."""
        limit_s = self.now_s + within_s
        while self[group].phase is not phase:
            assert self.now_s < limit_s, self[group]
            self.after(0.5)

    def __getitem__(self, group: str) -> Group:
        return self.launch.group(group)

    def entries(self, kind: type[E]) -> list[E]:
        return [
            each.entry for each in self.effects if isinstance(each, Write) and isinstance(each.entry, kind)
        ]

    @property
    def lines(self) -> str:
        return "\n".join(effect.text for effect in self.effects if isinstance(effect, Say))


def no_deadlines(**rules: Any) -> Rules:
    return Rules(deadlines={}, **rules)


def play(
    count: int = 1,
    *,
    rules: Rules | None = None,
    ranks: int = 1,
    own_coordinator: bool = True,
    rungs: tuple[int, ...] = (),
    started: bool = True,
) -> Play:
    """Return a launch of some groups, whose processes run unless they wait for devices."""
    rules = no_deadlines() if rules is None else rules
    groups = tuple(
        Group(
            name=f"group-{number}",
            rules=rules,
            ranks=tuple(range(ranks)),
            ladder=_ladder(number, rungs) if rungs else None,
        )
        for number in range(count)
    )
    keeper = Keeper(address=ADDRESS) if own_coordinator else None
    one = Play(core.Launch(groups=groups, rules=rules, keeper=keeper))
    if started:
        one.after(0.0)
    return one


def _ladder(number: int, rungs: tuple[int, ...]) -> Ladder:
    devices = tuple(str(number * rungs[0] + index) for index in range(rungs[0]))
    return Ladder(devices, rungs, patience_s=60.0)


def works(one: Play, *devices: int) -> None:
    """The probe answers now with these devices."""
    one.send(DevicesSeen(frozenset(map(str, devices)), one.now_s))
    one.after(0.0)
