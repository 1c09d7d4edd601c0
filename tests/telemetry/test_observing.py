"""What a group tells of its steps: its events follow the schema, its spans go to OpenTelemetry's own SDK."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jaxft_protocol.messages import GroupName, Incarnation
from jaxft_protocol.replica.state import Identity
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jaxft import ConfigurationError, HealReport, StepReport
from jaxft._replica._config import GroupConfig
from jaxft._telemetry._events import MAX_LISTED, MAX_REASON_LENGTH
from jaxft._telemetry._observer import Observers, observers_of

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "events.schema.json").read_text())
# Made once: `jsonschema.validate` checks the schema itself each time.
VALID = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
ME = Identity("toy", GroupName("group-0"), Incarnation(0xABC), "here:1", "there:2")
STEP = StepReport(
    step=8, attempts=2, quorum_id=3, members=("group-0", "group-1"), shards=(0, 1, 3), exchange_s=0.25
)
HEALED = StepReport(step=20, heal=HealReport(15, 5, 4096, 1.5, ("group-1",)))


def events(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for event in found:
        VALID.validate(event)
        assert (event["job"], event["group"]) == ("toy", "group-0")
    return found


def config(**settings: Any) -> GroupConfig:
    return GroupConfig(coordinator="there:2", group="group-0", job="toy", **settings)


def tell(observers: Observers, before: int, report: StepReport, error: Exception | None = None) -> None:
    with observers.calling(before) as reports:
        reports.append(report)
        if error is not None:
            raise error


def test_each_life_writes_its_steps_and_what_happened_between(tmp_path: Path) -> None:
    path = tmp_path / "{group}.jsonl"
    observers = observers_of(config(events=path), ME, rank=0)
    tell(observers, 0, StepReport())  # it joins, and no step is done
    tell(observers, 0, HEALED)
    tell(observers, 7, STEP)
    many = tuple((f"group-{number}", "its connection closed" * 500) for number in range(1, 100))
    tell(observers, 8, StepReport(step=9, attempts=1, quorum_id=4, members=("group-0",), left=many))
    tell(observers, 9, StepReport(step=12))  # as a spare does it
    with pytest.raises(OSError, match="sample 17"):
        tell(observers, 12, StepReport(step=12), OSError("cannot read sample 17"))
    observers.close("KeyboardInterrupt()")

    began, healed, _, done, changed, again, replayed, raised, ended = events(tmp_path / "group-0.jsonl")
    assert (began["event"], began["incarnation"]) == ("life_began", "0000000000000abc")
    assert (healed["event"], healed["step"], healed["transferred_bytes"]) == ("heal_done", 20, 4096)
    assert (done["event"], done["attempts"], done["shards"]) == ("step_done", 2, [0, 1, 3])
    assert (done["members"], done["exchange_s"]) == (2, 0.25)
    assert (changed["event"], len(changed["left"])) == ("members_changed", MAX_LISTED)
    assert len(changed["left"][0]["reason"]) == MAX_REASON_LENGTH
    assert (again["event"], again["step"]) == ("step_done", 9)
    assert (replayed["event"], replayed["steps"]) == ("caught_up", 3)
    assert (raised["event"], raised["reason"]) == ("step_raised", "OSError: cannot read sample 17")
    assert (ended["event"], ended["step"], ended["reason"]) == ("life_ended", 12, "KeyboardInterrupt()")


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFT_EVENTS", str(tmp_path / "{group}.jsonl"))
    observers_of(config(), ME, rank=1).close("")
    assert not list(tmp_path.iterdir())  # rank 0 writes for its group
    observers_of(config(), ME, rank=0).close("")
    assert [event["event"] for event in events(tmp_path / "group-0.jsonl")] == ["life_began", "life_ended"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"events of group 'group-0' cannot be written to .*JAXFT_EVENTS"
    ):
        observers_of(config(events=tmp_path), ME, rank=0)


def test_each_call_is_a_span_of_the_users_tracer() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("a test")
    observers = observers_of(config(tracer=tracer), ME, rank=0)
    with tracer.start_as_current_span("epoch") as epoch:
        tell(observers, 0, StepReport())
        tell(observers, 0, HEALED)
        tell(observers, 7, STEP)
    tell(observers, 9, StepReport(step=12))
    left = (("group-1", "its connection closed"),)
    with pytest.raises(OSError, match="sample 17"):
        tell(observers, 12, StepReport(step=13, attempts=1, left=left), OSError("cannot read sample 17"))
    observers.close("")

    spans = {span.name: span for span in exporter.get_finished_spans() if span.name != "jaxft.step"}
    done, raised = [span for span in exporter.get_finished_spans() if span.name == "jaxft.step"]
    assert set(spans) == {"jaxft.join", "jaxft.heal", "jaxft.replay", "epoch"}
    assert done.parent == epoch.get_span_context()
    assert raised.parent is None
    wanted = {"jaxft.job": "toy", "jaxft.group": "group-0", "jaxft.step": 8, "jaxft.exchange_s": 0.25}
    assert wanted.items() <= dict(done.attributes or {}).items()
    assert dict(spans["jaxft.heal"].attributes or {})["jaxft.donors"] == ("group-1",)
    assert (done.status.status_code, raised.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert [event.name for event in raised.events] == ["jaxft.member_left", "exception"]
    assert dict(raised.events[0].attributes or {})["jaxft.reason"] == "its connection closed"
    assert all(span.start_time <= span.end_time for span in exporter.get_finished_spans())
