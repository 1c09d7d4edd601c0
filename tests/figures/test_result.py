"""A row of figures: ratios, spread, and whether a goal was reached."""

import pytest
from rich.console import Console

from benchmarks._result import Goal, Result, Row, show


def test_a_row_is_made_of_medians():
    row = Row.of("64 MB", "ms", [30.0, 10.0, 20.0], peer=[50.0, 30.0, 40.0], limit=[10.0])
    assert (row.ours, row.peer, row.limit, row.rounds) == (20.0, 40.0, 10.0, 3)
    assert (row.ratio_to_peer, row.ratio_to_limit) == (2.0, 0.5)
    assert row.spread is None


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal(), None),
        (Goal(peer=2.0), True),
        (Goal(peer=2.1), False),
        (Goal(limit=0.5, peer=2.0), True),
        (Goal(limit=0.6, peer=2.0), False),
        (Goal(most=20.0), True),
        (Goal(most=19.9), False),
    ],
)
def test_a_goal_is_met_or_not(goal: Goal, *, met: bool | None):
    assert Row("x", "ms", ours=20.0, peer=40.0, limit=10.0, goal=goal).met is met


def test_the_table_shows_what_fell_short():
    console = Console(width=160, record=True)
    rows = [
        Row("1 KB", "ms", 1.0, 2.0, goal=Goal(peer=1.3)),
        Row("1 MB", "ms", 1.0, 1.1, goal=Goal(peer=1.3)),
    ]
    show(Result("exchange", rows, 1.0), console)
    text = console.export_text()
    assert "✓ ≥ 1.3x the peer" in text
    assert "✗ ≥ 1.3x the peer" in text
    assert "2.00" in text
    assert "1.10" in text
