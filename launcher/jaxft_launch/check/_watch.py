"""The watcher beside a group: applies all rules to it, and warns, drains or kills."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxft_launch.check._check import Check
from jaxft_launch.check._readings import Level, Reading, Standing
from jaxft_launch.check._rules import Action, Rule
from jaxft_launch.check._sources import Source
from jaxft_launch.supervise._journal import Entry, HealthActed, HealthChanged


class Group(Protocol):
    """The group that is watched: what a supervisor offers of it."""

    @property
    def name(self) -> str: ...

    @property
    def running_life(self) -> int | None:
        """The number of its current life; None while it does not run, or ends."""
        ...

    def retire(self) -> None:
        """Drain it. It is not restarted."""
        ...

    def strike(self) -> None:
        """Kill it. It is restarted like any group that was killed."""
        ...


class Watch:
    """Watches one group. Call `poll` often: it never waits."""

    def __init__(
        self,
        group: Group,
        rules: Sequence[Rule],
        source_of: Callable[[Rule], Source],
        *,
        may_go: Callable[[], bool],
        write: Callable[[Entry], None],
        say: Callable[[str], None],
    ) -> None:
        """Begin to watch.

        Args:
            group: the group.
            rules: what is checked.
            source_of: makes what takes the readings of a rule in one life of the group.
            may_go: whether the job keeps its state without this group.
            write: gets the events.
            say: gets what people should read.
        """
        self._group = group
        self._rules = tuple(rules)
        self._source_of = source_of
        self._may_go = may_go
        self._write = write
        self._say = say
        self._standings = {rule.name: Standing() for rule in rules}
        self._checks: list[Check] = []
        self._life: int | None = None
        self._done: set[str] = set()  # rules that have acted, or said that they cannot, in this life
        self._kept: set[str] = set()

    def poll(self) -> None:
        """Take new readings, and do what they call for."""
        life = self._group.running_life
        if life != self._life:
            self._begin(life)
        for check in self._checks:
            if (reading := check.poll()) is not None:
                self._take(check.rule, reading)
            if self._group.running_life is None:
                return

    def end(self) -> None:
        """End the readings that are under way."""
        for check in self._checks:
            check.end()
        self._checks = []

    def _begin(self, life: int | None) -> None:
        """Start afresh with a new life: counts of errors and of readings belong to the one before."""
        self.end()
        self._life = life
        self._done, self._kept = set(), set()
        if life is not None:
            self._standings = {name: one.in_new_life() for name, one in self._standings.items()}
            self._checks = [Check(rule, self._source_of(rule)) for rule in self._rules]

    def _take(self, rule: Rule, reading: Reading) -> None:
        before = self._standings[rule.name].level
        now = self._standings[rule.name].after(reading.level, consecutive=rule.consecutive)
        self._standings[rule.name] = now
        if now.level is not before:
            self._tell(rule, before, reading)
        if rule.action is not Action.WARN and now.calls_for_action(consecutive=rule.consecutive):
            self._act(rule, reading)

    def _tell(self, rule: Rule, before: Level, reading: Reading) -> None:
        name = self._group.name
        self._say(f"{name}, rule {rule.name!r}: {reading.level} (was {before}): {reading.text}")
        self._write(
            HealthChanged(group=name, rule=rule.name, level=reading.level, before=before, text=reading.text)
        )

    def _act(self, rule: Rule, reading: Reading) -> None:
        if rule.name in self._done:
            return
        name, life = self._group.name, self._life
        assert life is not None
        if not self._may_go():
            if rule.name not in self._kept:
                self._kept.add(rule.name)
                self._say(
                    f"{name}, rule {rule.name!r}: no other group of this launch holds the job's state, so {name} is "
                    f"kept until one does. It is still critical: {reading.text}"
                )
            return
        self._done.add(rule.name)
        if rule.action is Action.DRAIN:
            self._say(f"{name}, rule {rule.name!r}: it finishes its step and leaves")
            self._write(HealthActed(group=name, life=life, rule=rule.name, action=rule.action))
            self._group.retire()
        else:
            self._say(f"{name}, rule {rule.name!r}: it is killed, and restarted")
            self._write(HealthActed(group=name, life=life, rule=rule.name, action=rule.action))
            self._group.strike()
