"""A run's own events as inputs of a plan, and its charts."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.__main__ import main
from jaxft_launch.plan.events import measure, read
from jaxft_launch.processes._checks import LaunchError

NAMES = ["group-0", "group-1", "group-2", "group-3"]
STEP_S, AWAY_S, EVERY_S, KILLS = 2.0, 100.0, 1000.0, 10


def quorum(t: float, number: int, step: int, members: list[str], joined: list[str]) -> dict[str, Any]:
    event = {"t": t, "event": "quorum_changed", "job": "run", "quorum_id": number, "step": step}
    return {**event, "members": len(members), **({"joined": joined} if joined else {})}


def run() -> Iterator[dict[str, Any]]:
    """Four groups of eight shards, one away for a tenth of the time: then a step takes 11/8 as long."""
    t, step = 1e9, 0
    yield quorum(t, 1, 0, NAMES, NAMES)
    for kill in range(KILLS):
        t, step = t + EVERY_S - AWAY_S, step + round((EVERY_S - AWAY_S) / STEP_S)
        lost = {"t": t, "event": "group_lost", "job": "run", "group": NAMES[kill % 4], "step": step}
        yield {**lost, "reason": "its connection closed"}
        others = [name for name in NAMES if name != NAMES[kill % 4]]
        yield quorum(t + 0.01, 2 * kill + 2, step, others, [])
        t, step = t + AWAY_S, step + round(AWAY_S / (STEP_S * 11 / 8))
        yield quorum(t, 2 * kill + 3, step, NAMES, [NAMES[kill % 4]])


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return path


def test_a_run_is_measured_by_its_coordinators_events(tmp_path: Path) -> None:
    found = measure(read([write(tmp_path / "events.jsonl", *run())]), 8)
    assert (found.groups, found.spares, found.failures) == (4, 0, KILLS)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.return_s == pytest.approx(AWAY_S)
    assert found.lasted_s == pytest.approx(KILLS * EVERY_S)
    assert found.goodput == pytest.approx(0.9 + 0.1 * 8 / 11, rel=0.01)


def test_the_groups_own_events_tell_steps_and_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", *run())
    done = {
        "event": "step_done",
        "job": "run",
        "group": "group-0",
        "quorum_id": 1,
        "members": 4,
        "attempts": 1,
        "shards": [0, 1, 2, 3, 4],
    }
    own = write(
        tmp_path / "own.jsonl", *({**done, "t": 1e9 + 2.5 * number, "step": number} for number in range(1, 9))
    )
    found = measure(read([path, own]), 8)
    assert (found.step_s, found.shards_per_group) == (2.5, 5)


def test_the_command_compares_a_run_with_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = write(tmp_path / "events.jsonl", *run()), tmp_path / "plan.svg"
    with pytest.raises(SystemExit) as end:
        main(["plan", "--from", str(path), "--plot", str(plot), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert found["measured"]["predicted"] == pytest.approx(found["measured"]["goodput"], rel=0.01)
    assert (found["job"]["groups"], found["job"]["return_s"]) == (4, pytest.approx(AWAY_S))
    (same,) = (each for each in found["outcomes"] if each["name"] == "jaxft, 0 spares")
    assert same["time"] == pytest.approx(found["measured"]["predicted"], rel=0.01)  # the exchange counts once
    drawing = ElementTree.fromstring(plot.read_text())
    assert len(drawing.findall(".//{*}polyline")) == 2 * len(found["outcomes"])
    assert len(drawing.findall(".//{*}circle")) == 2  # the measured goodput, in both panels


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no event\n", "events.jsonl, line 1, is no event of jaxft: 'no event'"),
        ('{"t": 1, "event": "leads", "term": 1}\n', "show no steps of a full quorum"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_events_are_refused(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "events.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError, match=why):
        measure(read([path]), 8)
