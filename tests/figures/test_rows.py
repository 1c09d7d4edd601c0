"""The comparison of large quorums runs at a tiny size; the times are not checked."""

import pytest

from lab import rows
from lab._needs import needs
from lab.rows import Arguments


@pytest.mark.processes
def test_it_tells_what_each_way_takes_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    rows.main(Arguments(members=(5,), kilobytes=(1,), rounds=1, groups=50, gradients_mb=2))
    said = capsys.readouterr().out.splitlines()
    assert said[2].startswith("| 5 | connect | ")
    assert said[3].startswith("| 5 | 1 KB | ")
    assert [line.split(" | ")[0] for line in said[-2:]] == ["| all to all", "| rows"]


def test_rows_need_few_connections_senders_and_frames() -> None:
    found = needs(1000, 250)
    flat, grid = found["all to all"], found["rows"]
    assert (flat.connections, grid.connections) == (999, 62)
    assert grid.senders <= 32
    assert grid.frames < flat.frames / 8
    assert grid.waiting_mb < flat.waiting_mb / 10
    assert grid.scratch_mb < 270
