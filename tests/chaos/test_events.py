"""The event file of a group, which is read while it is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.storm._events import EventError, EventFile, FinishedEvent, StepEvent, parse_event

STEP: dict[str, Any] = {
    **{"t": 1000.5, "event": "step", "step": 7, "loss": 4.25, "attempts": 2},
    **{"compute_s": 0.5, "exchange_s": 0.25, "vote_s": 0.125, "apply_s": 0.0625},
    **{"shards": [0, 3, 5], "quorum_id": 4, "members": ["group-0", "group-2"]},
}


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def test_a_step() -> None:
    event = parse_event(line(**STEP, tokens=3))
    assert event == StepEvent(
        **{"t_s": 1000.5, "step": 7, "loss": 4.25, "attempts": 2, "seconds": 0.9375, "quorum_id": 4},
        shards=(0, 3, 5),
        members=("group-0", "group-2"),
    )
    assert parse_event(line(t=2.0, event="quorum_changed", quorum_id=8)) is None


def test_the_end_with_a_ledger_or_without() -> None:
    end = {"t": 2.0, "event": "finished", "step": 6, "digest": "d"}
    assert parse_event(line(**end)) == FinishedEvent(t_s=2.0, step=6, digest="d")
    event = parse_event(line(**end, ledger=False, ledger_text="3 lost"))
    assert event == FinishedEvent(t_s=2.0, step=6, digest="d", ledger=False, ledger_text="3 lost")


@pytest.mark.parametrize(
    "text", [b"{", b"[1, 2]", b"7", b'{"t": 1}', b'{"event": "step", "t": 1}', b"\xff{}"]
)
def test_a_line_that_is_no_event_is_refused_and_quoted(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(EventError, match="is not an event"):
        parse_event(text)
    path = tmp_path / "group-1.0.jsonl"
    path.write_bytes(line(**STEP) + text + b"\n")
    with pytest.raises(EventError, match=r"group-1\.0\.jsonl"):
        EventFile(path).read()


def test_each_event_is_read_once_and_an_incomplete_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventFile(path)
    assert events.read() == []
    whole = line(**STEP)
    for cut in range(1, len(whole)):
        with path.open("ab") as file:
            file.write(whole[cut - 1 : cut])
        assert events.read() == []
    with path.open("ab") as file:
        file.write(whole[-1:] + line(**{**STEP, "step": 8}) + whole[:20])
    assert [event.step for event in events.read()] == [7, 8]
    assert events.read() == []
