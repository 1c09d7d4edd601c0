"""The events that people see, for steps of the protocol's machine."""

import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jaxft_coordinator.http import _views
from jaxft_coordinator.observe._happened import Happened, happened
from jaxft_coordinator.observe._watched import GONE
from jaxft_coordinator.observe.observer import Observer, as_json
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Event, Job, Options, PauseAsked, SessionClosed
from jaxft_protocol.messages import Drain, GroupName, HaltKind, Heartbeat

from tests.protocol.coordinator.helpers import Desk, Done, digest_of, healing, running

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "events.schema.json").read_text())
VALID = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)


@dataclass
class Watching(Desk):
    """A desk whose every event is observed, as the coordinator's shell does it."""

    observer: Observer = field(default_factory=Observer)
    seen: list[Happened] = field(default_factory=list)
    before: Job | None = None

    def __post_init__(self) -> None:
        self.heard_s = self.observer.heard_s

    def do(self, event: Event) -> Done:
        before = self.job
        done = super().do(event)
        if self.observer.interested(before, self.job, event, done.effects):
            news = list(happened(self.before, self.job, event, done.effects))
            self.seen += news
            self.before = self.job
            for each in news:
                VALID.validate(as_json("job", each, 1.0))
            self.observer.saw(self.job, event, done.effects, self.now_s)
            assert self.observer.errors == 0
        return done

    def news(self) -> list[str]:
        """The events since the last call, as short texts."""
        seen, self.seen = self.seen, []
        return [f"{each.event} {each.group}".strip() for each in seen]


def watching(*names: str, **options: float) -> Watching:
    """A job in its first quorum."""
    desk = running(*names, **options)
    watched = Watching(desk.job, desk.now_s, desk.sessions, desk.names)
    watched.before = desk.job
    watched.observer.saw(desk.job, None, (), desk.now_s)
    return watched


def told_of(desk: Watching) -> dict[str, Any]:
    """The job in the API."""
    jobs = Server("localhost:0", Options()).jobs
    return _views.detail(desk.observer.jobs["job"], jobs, desk.now_s, history=False)


def test_a_job_begins():
    desk = Watching(Desk.open(min_replicas=2).job)
    desk.come("a")
    desk.come("b")
    assert desk.news() == [
        "group_present a",
        "group_joined a",
        "group_present b",
        "job_founded",
        "quorum_changed",
    ]
    watched = desk.observer.jobs["job"]
    assert [group.state for group in watched.groups.values()] == ["member", "member"]
    assert watched.account.standing.value == "training"


def test_a_loss_says_who_why_and_that_the_step_is_retried():
    desk = watching("a", "b", "c")
    desk.commit()
    desk.close("b")
    assert [(each.event, each.group) for each in desk.seen] == [
        ("group_lost", "b"),
        ("step_retried", ""),
        ("quorum_changed", ""),
    ]
    assert desk.seen[0].reason
    assert desk.seen[0].step == desk.seen[1].step == 1
    assert desk.seen[1].reason.startswith("b: ")
    assert desk.seen[2].more["members"] == 2
    watched = desk.observer.jobs["job"]
    assert watched.retried == {"lost a member": 1}
    assert watched.departures == {"lost": 1}
    assert (watched.groups[GroupName("b")].state, watched.groups[GroupName("b")].losses) == (GONE, 1)


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "spare"])), ids="-".join)
def test_groups_that_finish_one_after_the_other_retry_no_step(order: tuple[str, ...]):
    """A spare that has taken the place of a drained group finishes, too."""
    desk = Watching(Desk.open(min_replicas=1).job)
    for name in ("a", "b", "c"):
        desk.come(name)
    desk.wait(0.2)
    desk.commit()
    desk.come("spare", digest="fresh", spare=True)
    desk.tick()
    desk.ready("spare")
    desk.say("c", Drain())
    desk.commit()
    assert {member.group for member in desk.quorum.members} == {"a", "b", "spare"}
    desk.commit()
    desk.news()
    for name in order:
        desk.leave(name, finished=True)
        desk.wait(0.2)
    news = desk.news()
    assert "quorum_changed" in news
    assert "step_retried" not in news
    assert "job_finished" in news


def test_a_loss_while_groups_finish_is_still_one():
    desk = watching("a", "b", "c")
    desk.commit()
    desk.leave("a", finished=True)
    desk.wait(0.2)
    assert "step_retried" not in desk.news()
    desk.close("b")
    desk.wait(0.2)
    assert "step_retried" in desk.news()


def test_a_joiner_heals_and_enters():
    desk = watching("a", "b")
    desk.commit()
    healing(desk, "c")
    assert desk.news() == ["group_present c", "heal_began c"]
    desk.ready("c")
    desk.commit()
    assert desk.news() == ["group_ready c", "quorum_changed"]
    assert desk.observer.jobs["job"].groups[GroupName("c")].state == "member"


def test_a_silent_group_is_evicted_with_the_reason():
    desk = watching("a", "b", heartbeat_timeout_s=2.0)
    desk.wait(3.0, silent=("b",))
    evicted = next(each for each in desk.seen if each.event == "group_evicted")
    assert (evicted.group, evicted.reason[:16]) == ("b", "no heartbeat for")


def test_one_that_leaves_is_not_lost():
    desk = watching("a", "b")
    desk.commit()
    desk.leave("b")
    assert {each.step for each in desk.seen if each.group == "b"} == {1}
    assert "group_left b" in desk.news()
    desk.close("b")
    assert desk.observer.jobs["job"].departures.get("lost", 0) == 0


def test_a_job_without_a_quorum_waits_and_its_time_is_lost():
    desk = watching("a", "b", min_replicas=2)
    desk.commit()
    desk.close("b")
    desk.wait(0.1)
    assert [text for text in desk.news() if text != "group_lost b"] == ["quorum_ended", "job_waiting"]
    desk.now_s += 30.0
    _, lost_s = desk.observer.jobs["job"].account.seconds(desk.now_s)
    assert max(lost_s, key=lambda source: lost_s[source]).value == "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"


def test_different_states_halt_the_job_with_the_kind():
    desk = watching("a", "b")
    desk.votes(a=digest_of("x"), b=digest_of("y"))
    halted = next(each for each in desk.seen if each.event == "job_halted")
    assert halted.more == {"kind": "diverged"}
    assert "different states" in halted.reason


@pytest.mark.parametrize("kind", HaltKind)
def test_every_kind_of_halt_is_in_the_schema_and_in_the_docs(kind: HaltKind) -> None:
    name = kind.name.lower()
    VALID.validate(as_json("job", Happened("job_halted", step=1, reason="why", more={"kind": name}), 1.0))
    line = next(line for line in (DOCS / "operate-api.md").read_text().splitlines() if "`job_halted`" in line)
    assert f"`{name}`" in line


def test_a_drain_and_a_pause_are_told_and_retry_no_step():
    desk = watching("a", "b")
    desk.say("b", Drain())
    assert desk.news() == ["group_drains b"]
    desk.commit()
    assert desk.news() == ["group_leaves b", "quorum_changed"]
    desk.leave("b")
    assert desk.seen[-1].reason == desk.observer.jobs["job"].groups[GroupName("b")].reason == "it was drained"
    assert desk.news() == ["group_left b"]
    desk.do(PauseAsked(paused=True))
    desk.commit()
    desk.tick()
    assert desk.news() == ["job_paused", "quorum_ended", "job_waiting"]
    desk.do(PauseAsked(paused=False))
    assert desk.news() == ["job_unpaused", "quorum_changed"]


def test_a_group_that_was_drained_and_dies_while_it_serves_joiners_has_left():
    desk = watching("a", "b")
    desk.say("b", Drain())
    desk.commit()
    desk.close("b")
    assert (desk.seen[-1].event, desk.seen[-1].reason) == ("group_left", "it was drained")


def test_people_see_that_a_group_is_away_from_training_and_that_it_is_back():
    desk = watching("a", "b")
    seen: list[bool] = []
    for away in (False, True, True, False):
        desk.say("a", Heartbeat(away=away, moves=True))
        answer, _ = told_of(desk)["group_list"]
        seen.append(answer["away"])  # pyright: ignore
    assert seen == [False, True, True, False]


def test_people_see_when_a_group_last_sent_anything():
    desk = watching("a", "b")
    desk.now_s += 1.0
    desk.say("a", Heartbeat())
    desk.now_s += 2.0
    answer = told_of(desk)["group_list"]
    assert [each["heard_s_ago"] for each in answer] == [2.0, 3.0]  # pyright: ignore


def test_an_event_and_the_state_after_it_have_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page puts both into one time line: a state before its event, and not only at it, would be there twice."""
    clock = itertools.count(1000)
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    desk, answer = watching("a", "b"), []
    desk.observer.listen(lambda *output: answer.append(json.loads(output[-1])))
    desk.close("b")
    (lost,) = (event for event in answer if event["event"] == "group_lost")
    groups = told_of(desk)["group_list"]
    (gone,) = (group for group in groups if group["group"] == "b")  # pyright: ignore[reportGeneralTypeIssues]
    assert (lost["t"], gone["state"]) == (gone["since"], GONE)


def test_a_storm_that_lasts_is_counted_to_the_last_event(monkeypatch):
    observer, answer = Observer(), []
    observer.listen(lambda *output: answer.append(json.loads(output[-1])))
    clock = [1000.0]
    monkeypatch.setattr("jaxft_coordinator.observe.observer.BURST", 5)
    monkeypatch.setattr("jaxft_coordinator.observe.observer.time.time", lambda: clock[0])
    for _ in range(1000):
        clock[0] += 0.01  # twice as many as allowed
        observer.tell("job", Happened("group_present", "a"))
    clock[0] += 10.0
    observer.tell("job", Happened("group_present", "b"))
    counts = [each["count"] for each in answer if each["event"] == "events_dropped"]
    assert sum(counts) + len(answer) - len(counts) == 1001
    assert sum(counts) == observer.dropped
    assert len(answer) <= 5 + 50 * 20.0
    assert all(VALID.is_valid(each) for each in answer if each["event"] == "events_dropped")


def test_an_error_in_the_observer_is_counted_and_reaches_no_job():
    desk = watching("a", "b")
    desk.observer.listen(lambda *_: 1 / 0)  # pyright: ignore[reportArgumentType]
    Desk.do(desk, SessionClosed(desk.sessions["b"], "gone"))
    desk.observer.saw(desk.job, None, (), desk.now_s)
    assert desk.observer.errors == 1


def test_the_documented_events_are_those_of_the_schema():
    table = (DOCS / "operate-api.md").read_text().partition("## Events")[2]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert list(dict.fromkeys(documented)) == [each["title"] for each in SCHEMA["oneOf"]]
