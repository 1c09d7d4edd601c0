"""Results as pages of the manual."""

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks._result import Goal, Result, Row, write

RESULTS = [
    Result("exchange", [Row("1 KB", "ms", 1.0, 2.0, 0.5, spread=0.1, goal=Goal(peer=1.3))], 1.0, ["quiet"]),
    Result("kill", [Row("20 ms", "ms", 80.0, 5000.0, goal=Goal(most=70.0)), Row("100 ms", "ms", 160.0)], 1.0),
]


@pytest.fixture
def tables(tmp_path: Path) -> str:
    write(RESULTS, tmp_path / "all.json")
    return report.tables(json.loads((tmp_path / "all.json").read_text()))


def test_what_fell_short_comes_first(tables: str):
    missed = tables.index("* `kill`, 20 ms: jaxft 80.0 ms, TorchFT 0.2.0 5000 ms; goal ≤ 70")
    assert missed < tables.index("### exchange")
    assert "`exchange`, 1 KB" not in tables[: tables.index("### exchange")]


def test_plots_are_drawn(tmp_path: Path):
    write(RESULTS, tmp_path / "all.json")
    assert report.main([str(tmp_path / "all.json"), str(tmp_path / "out")]) == 0
    for name in ("exchange", "kill"):
        assert (tmp_path / "out" / f"{name}.svg").read_text().count("<svg") == 1
