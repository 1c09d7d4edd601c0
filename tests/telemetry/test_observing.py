"""A group's reports of its steps: its events follow the schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jaxft_protocol.messages import GroupName, Incarnation
from jaxft_protocol.replica.state import Identity

from jaxft import ConfigurationError, StepReport
from jaxft._report import HealReport
from jaxft._telemetry._call import Call, Observers
from jaxft._telemetry._events import MAX_LISTED, MAX_REASON_LENGTH, events_of

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


def observing(path: Path) -> Observers:
    return Observers([events_of(ME, path, step=0, spare=False)])


def tell(observers: Observers, before: int, report: StepReport, error: Exception | None = None) -> None:
    with observers.calling(before) as calling:
        calling.ended(report)
        if error is not None:
            raise error


def test_each_life_writes_its_steps_and_what_happened_between(tmp_path: Path) -> None:
    path = tmp_path / "{group}.jsonl"
    observers = observing(path)
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


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"events of group 'group-0' cannot be written to .*`events`"
    ):
        observing(tmp_path)


def test_who_sees_phases_sees_them_between_the_beginning_and_the_end_of_a_call() -> None:
    class Watching:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def begins(self, step: int) -> None:
            self.seen.append(("begins", step))

        def enters(self, phase: str, step: int) -> None:
            self.seen.append((phase, step))

        def called(self, call: Call) -> None:
            self.seen.append(("ends", call.report.step, call.state, call.shards, call.joins))

        def close(self, reason: str) -> None:
            self.seen.append(("closes", reason))

    watching = Watching()
    observers = Observers([watching])
    with observers.calling(7, shards=4, joins=True) as calling:
        observers.enters("wait", 7)
        observers.enters("compute", 7, " shard 3")
        calling.ended(STEP, ["leaf"])
    observers.close("")
    assert watching.seen == [
        ("begins", 7),
        ("wait", 7),
        ("compute", 7),
        ("ends", 8, ["leaf"], 4, True),
        ("closes", ""),
    ]
