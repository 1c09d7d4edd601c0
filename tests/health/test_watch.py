"""What a watcher does with readings. The group is played; `tests/launch/test_health.py` has real ones."""

from dataclasses import dataclass, field

from jaxft_launch.check._readings import Level, Reading
from jaxft_launch.check._rules import Rule
from jaxft_launch.check._watch import Watch
from jaxft_launch.supervise._journal import Entry, HealthActed, HealthChanged
from tests import patience
from tests.health.rules import command_rule

CRITICAL = Reading(Level.CRITICAL, "bad")
OK = Reading(Level.OK, "fine")


@dataclass
class Played:
    """A group, and readings that a test gives one by one."""

    name: str = "group-1"
    running_life: int | None = 0
    may_go: bool = True
    acts: list[str] = field(default_factory=list)
    events: list[Entry] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    readings: list[Reading | None] = field(default_factory=list)
    sources: int = 0

    def retire(self) -> None:
        self.acts.append("retire")
        self.running_life = None

    def strike(self) -> None:
        self.acts.append("strike")
        self.running_life = None

    def watch(self, rule: Rule) -> Watch:
        return Watch(
            self,
            [rule],
            self.source_of,
            may_go=lambda: self.may_go,
            write=self.events.append,
            say=self.said.append,
        )

    def source_of(self, rule: Rule) -> "Played":
        self.sources += 1
        return self

    def read(self) -> Reading | None:
        return self.readings.pop(0) if self.readings else None

    def end(self) -> None:
        pass

    def give(self, watch: Watch, *readings: Reading | None) -> None:
        """Poll until these readings have been taken and used."""
        self.readings += [*readings, None]

        def used() -> bool:
            watch.poll()
            return not self.readings or self.running_life is None

        patience.until(used, "the readings")
        self.readings.clear()

    @property
    def changes(self) -> list[tuple[str, str]]:
        return [(one.before, one.level) for one in self.events if isinstance(one, HealthChanged)]

    @property
    def actions(self) -> list[tuple[int, str]]:
        return [(one.life, one.action) for one in self.events if isinstance(one, HealthActed)]


def rule(action: str, consecutive: int = 1) -> Rule:
    return command_rule("true", action=action, consecutive=consecutive, interval_s=0.1)


def test_one_event_for_each_change() -> None:
    group = Played()
    watch = group.watch(rule("warn"))
    group.give(watch, OK, OK, CRITICAL, CRITICAL, None, CRITICAL, OK, OK, Reading(Level.UNKNOWN, "broken"))
    assert group.changes == [("ok", "critical"), ("critical", "ok"), ("ok", "unknown")]
    assert group.events[0] == HealthChanged(
        group="group-1", rule="check", level="critical", before="ok", text="bad"
    )
    assert group.said[0] == "group-1, rule 'check': critical (was ok): bad"
    assert group.acts == []


def test_a_rule_drains_a_group_once() -> None:
    group = Played()
    watch = group.watch(rule("drain", consecutive=2))
    group.give(watch, CRITICAL, OK, CRITICAL)
    assert group.acts == []
    group.give(watch, CRITICAL, CRITICAL, CRITICAL, CRITICAL)
    for _ in range(10):
        watch.poll()
    assert group.acts == ["retire"]
    assert group.actions == [(0, "drain")]


def test_a_rule_kills_each_life_and_counts_again_in_each() -> None:
    group = Played()
    watch = group.watch(rule("kill", consecutive=2))
    group.give(watch, CRITICAL, CRITICAL)
    group.running_life = 1
    group.give(watch, CRITICAL)
    assert group.acts == ["strike"]
    group.give(watch, CRITICAL)
    assert group.acts == ["strike", "strike"]
    assert group.actions == [(0, "kill"), (1, "kill")]
    assert group.changes == [("ok", "critical")]  # it has never been well since
    assert group.sources == 2


def test_unknown_and_warning_end_no_group() -> None:
    group = Played()
    watch = group.watch(rule("kill"))
    group.give(watch, Reading(Level.UNKNOWN, "broken"), Reading(Level.WARNING, "nearly"))
    assert group.changes == [("ok", "unknown"), ("unknown", "warning")]
    assert group.acts == []


def test_the_last_group_is_kept_until_another_holds_the_state() -> None:
    group = Played(may_go=False)
    watch = group.watch(rule("drain"))
    group.give(watch, CRITICAL, CRITICAL, CRITICAL)
    assert group.acts == []
    assert [text for text in group.said if "is kept" in text] == [
        "group-1, rule 'check': no other group of this launch holds the job's state, so group-1 is kept until one "
        "does. It is still critical: bad"
    ]
    group.may_go = True
    group.give(watch, CRITICAL)
    assert group.acts == ["retire"]


def test_a_group_that_does_not_run_is_not_checked() -> None:
    group = Played(running_life=None)
    watch = group.watch(rule("drain"))
    for _ in range(10):
        watch.poll()
    assert group.sources == 0
