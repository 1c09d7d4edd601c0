import json
import typing
from dataclasses import fields
from pathlib import Path

from jaxft_launch.supervise._folder import Journal
from jaxft_launch.supervise.core.entries import Entry, GroupRestarts, name_of
from jaxft_launch.supervise.core.life import DEADLINES_S

MANUAL = Path(__file__).parents[2] / "docs" / "clusters.md"


def no_words(text: str) -> None:
    raise AssertionError(text)


def test_an_event_is_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", no_words)
    journal.write(GroupRestarts(group="group-1", life=2, wait_s=1.5))
    first = json.loads((tmp_path / "events.jsonl").read_text())
    assert first.pop("t") > 1e9
    assert first == {"event": "group_restarts", "group": "group-1", "life": 2, "wait_s": 1.5}


def test_a_second_launch_in_the_same_folder_appends(tmp_path: Path) -> None:
    for life in range(2):
        journal = Journal(tmp_path / "events.jsonl", no_words)
        journal.write(GroupRestarts(group="group-1", life=life, wait_s=0.0))
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_a_full_disk_costs_events_and_says_so_once() -> None:
    lines: list[str] = []
    journal = Journal(Path("/dev/full"), lines.append)
    for life in range(3):
        journal.write(GroupRestarts(group="group-1", life=life, wait_s=0.0))
    (text,) = lines
    assert "events cannot be written to /dev/full, and are lost until they can" in text
    assert "No space left on device" in text


def test_the_manual_has_each_event_with_its_fields() -> None:
    manual = MANUAL.read_text()
    for kind in typing.get_args(Entry):
        names = ", ".join(f"`{field.name}`" for field in fields(kind))
        assert f"| `{name_of(kind)}` | {names} |" in manual, name_of(kind)
    assert manual.count("\n| `") >= len(typing.get_args(Entry))


def test_the_manual_has_each_deadline() -> None:
    manual = MANUAL.read_text()
    for phase, seconds in DEADLINES_S.items():
        text = "none" if seconds == float("inf") else f"{seconds:g} s"
        assert f"| `{phase}` | {text} |" in manual, phase
