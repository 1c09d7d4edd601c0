"""What the log says of events that could not be written to the coordinator's file."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from jaxft_coordinator.observe import _event_file
from jaxft_coordinator.observe._event_file import MAX_WAITING, EventFile

from tests import patience
from tests.coordinator.test_server import run


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "jaxft_coordinator.observe"]


def test_events_that_a_slow_disk_had_no_time_for_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"

    async def scenario() -> None:
        events = EventFile(path)
        for number in range(MAX_WAITING + 5):
            events.put("job", number, str(number))
        writing = asyncio.create_task(events.run())
        await asyncio.to_thread(patience.until, lambda: told(caplog), "the loss to be told")
        writing.cancel()
        events.close()

    run(scenario)
    assert told(caplog) == [
        f"5 events so far could not be written to {path}: the disk was too slow for them. Training is not affected"
    ]
    assert path.read_text().splitlines()[0] == "5"


def test_what_was_lost_after_the_last_message_is_told_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"

    async def scenario() -> None:
        events = EventFile(path)
        path.unlink()
        path.mkdir()  # as a full disk: nothing can be appended
        writing = asyncio.create_task(events.run())
        for number in range(3):
            events.put("job", number, str(number))
            await asyncio.to_thread(
                patience.until, lambda number=number: events.lost == number + 1, "the next loss"
            )
        writing.cancel()
        events.put("job", 3, "3")
        events.close()

    run(scenario)
    first, last = told(caplog)
    assert first.startswith(f"1 events so far could not be written to {path}: ")
    assert last == f"4 events in all could not be written to {path}"


def test_a_disk_that_has_failed_is_not_called_slow_once_it_takes_events_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "events.jsonl", SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(_event_file, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    async def scenario() -> None:
        events = EventFile(path)
        path.unlink()
        path.mkdir()
        writing = asyncio.create_task(events.run())
        for number in range(2):
            events.put("job", number, str(number))
            await asyncio.to_thread(
                patience.until, lambda number=number: events.lost == number + 1, "the next loss"
            )
        path.rmdir()
        clock.now_s += _event_file.MENTION_EVERY_S
        events.put("job", 2, "2")
        await asyncio.to_thread(patience.until, lambda: len(told(caplog)) == 2, "the second loss to be told")
        writing.cancel()
        events.close()

    run(scenario)
    first, second = told(caplog)
    assert second == first.replace("1 events", "2 events")
    assert "directory" in first


def test_nothing_is_told_of_events_that_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    events = EventFile(path)
    events.put("job", 1, "one")
    events.close()
    assert (path.read_text(), told(caplog)) == ("one\n", [])
