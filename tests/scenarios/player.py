"""Plays a scenario: lines of commands to one job of the coordinator's machine, and its answer to each.

A file is made of comments (`# ...`), commands (`> ...`) and, indented below each command, its trace. The commands:

    settings NAME=VALUE ...   of the coordinator; before the first group comes
    come GROUP [step=N] [digest=D] [history=H] [incarnation=I] [spare]   sends Hello and Join
    hello GROUP [incarnation=I]      sends Hello only: it still compiles
    join GROUP [as for come]         sends Join, after its Hello
    found GROUP ...                  several come together and found the job
    vote GROUP [digest=N] [quorum=N] [step=N]
    fail GROUP ACCUSED ...           votes that its exchange failed, and whom it saw fail
    computed GROUP                   reports by a heartbeat that it waits for the others
    ready GROUP [step=N]             has caught up
    heal_failed GROUP                no donor answers
    leave GROUP | finish GROUP       leaves on purpose; because its training is done
    lost GROUP                       its connection closes
    wait SECONDS [silent GROUP ...]  time passes; all but the silent send heartbeats
    restart                          the coordinator dies, and restarts with its records
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator import job as j

from tests.protocol.coordinator.helpers import Desk, Done

INDENT = "    "


@dataclass
class Player:
    options: dict[str, float] = field(default_factory=lambda: {"min_replicas": 1, "join_timeout_s": 10.0})
    known: dict[str, j.Saved] = field(default_factory=dict)
    term: int = 1

    def __post_init__(self) -> None:
        self.desk = Desk.open(**self.options, term=self.term)

    def play(self, text: str) -> str:
        """Return the scenario `text` with the traces that belong to its commands."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith(INDENT):
                continue
            lines.append(line)
            if line.startswith("> "):
                lines += [INDENT + heard for heard in self.command(line[2:])]
        return "\n".join(lines) + "\n"

    def command(self, line: str) -> list[str]:
        name, *words = line.split()
        plain = [word for word in words if "=" not in word]
        named = {
            key: _value(value) for key, _, value in (word.partition("=") for word in words if "=" in word)
        }
        act: Callable[..., Iterator[Done]] = getattr(self, f"_{name}")
        heard: list[str] = []
        for done in act(*plain, **named):
            for effect in done.effects:
                if isinstance(effect, j.Persist):
                    self.known = durable.fold(self.known, effect.record)
                heard += _told(effect, done)
        return _grouped(heard)

    def _settings(self, **options: Any) -> Iterator[Done]:
        self.options |= options
        self.desk = Desk.open(**self.options, term=self.term)
        yield from ()

    def _hello(self, group: str, **named: Any) -> Iterator[Done]:
        yield self.desk.hello(group, **named)

    def _come(self, group: str, *flags: str, incarnation: int = 1, **named: Any) -> Iterator[Done]:
        if "history" in named:
            named["history"] = m.HistoryId(named["history"])
        yield self.desk.hello(group, incarnation)
        yield self.desk.join(group, **named, **dict.fromkeys(flags, True))

    def _join(self, group: str, *flags: str, **named: Any) -> Iterator[Done]:
        yield self.desk.join(group, **named, **dict.fromkeys(flags, True))

    def _found(self, *groups: str) -> Iterator[Done]:
        for group in groups:
            yield self.desk.hello(group)
        for group in groups:
            yield self.desk.join(group)

    def _vote(self, group: str, quorum: int | None = None, **named: Any) -> Iterator[Done]:
        yield self.desk.vote(group, quorum_id=quorum, **named)

    def _fail(self, group: str, *accused: str) -> Iterator[Done]:
        yield self.desk.fail(group, *accused)

    def _computed(self, group: str) -> Iterator[Done]:
        yield self.desk.say(group, m.Heartbeat(self.desk.quorum.quorum_id, self.desk.step))

    def _away(self, seconds: str, *groups: str) -> Iterator[Done]:
        yield from self.desk.wait(float(seconds), away=groups)

    def _ready(self, group: str, **named: Any) -> Iterator[Done]:
        yield self.desk.ready(group, **named)

    def _heal_failed(self, group: str) -> Iterator[Done]:
        yield self.desk.heal_failed(group)

    def _leave(self, group: str) -> Iterator[Done]:
        yield self.desk.leave(group)

    def _finish(self, group: str) -> Iterator[Done]:
        yield self.desk.leave(group, finished=True)

    def _lost(self, group: str) -> Iterator[Done]:
        yield self.desk.close(group)

    def _wait(self, seconds: str, *silent: str) -> Iterator[Done]:
        yield from self.desk.wait(float(seconds), silent=silent[1:])

    def _restart(self) -> Iterator[Done]:
        self.term += 1
        options = j.Options(**self.options, term=self.term)  # pyright: ignore[reportArgumentType]
        job = durable.restored(self.known["job"], options, self.desk.now_s)
        self.desk = Desk(job, self.desk.now_s)
        yield from ()


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _told(effect: j.Effect, done: Done) -> list[str]:
    match effect:
        case j.Persist(j.Moved(_, step, quorum_id)):
            return [f"writes down: state {step}, committed by quorum {quorum_id}"]
        case j.Persist(j.Saved()):
            return ["writes down: all of the job"]
        case j.Persist(j.Forgotten()):
            return ["writes down: the job is forgotten"]
        case j.Send(session, message):
            return [f"to {done.names[session]}: {_text(message)}"]
        case j.Close(session):
            return [f"ends the session of {done.names[session]}"]
        case j.Log(text):
            return [f"log: {re.sub(r'^.job. ', '', text)}"]
    raise AssertionError(effect)


def _text(message: m.CoordinatorMessage) -> str:
    """A message in the order of its fields, without the empty ones."""
    shown = [
        f"{field.name}={_short(getattr(message, field.name))}"
        for field in fields(message)
        if getattr(message, field.name) != field.default and field.name != "history"
    ]
    return f"{type(message).__name__} {' '.join(shown)}".rstrip()


def _short(value: Any) -> str:
    match value:
        case m.NewQuorum():
            return f"({_text(value)})"
        case m.Member(group, _, _, shards):
            return f"{group}{list(shards)}" if shards else str(group)
        case m.Change(group, reason):
            return f"{group} ({reason})" if reason else str(group)
        case tuple():
            return "[" + ", ".join(_short(each) for each in value) + "]"
        case str() if " " in value:
            return repr(value)
        case _:
            return str(value)


def _grouped(heard: list[str]) -> list[str]:
    """The same message to several groups on one line."""
    lines: list[str] = []
    receivers: dict[str, list[str]] = {}
    for line in heard:
        if not line.startswith("to "):
            lines.append(line)
            continue
        group, message = line[3:].split(": ", 1)
        if message not in receivers:
            receivers[message] = []
            lines.append(f"to \0{message}")
        receivers[message].append(group)
    return [
        f"to {', '.join(receivers[line[4:]])}: {line[4:]}" if line.startswith("to \0") else line
        for line in lines
    ]
