"""Each benchmark runs at a tiny size, without the peer, and fills its rows. The figures are not checked."""

import importlib
from typing import Any

import pytest

from benchmarks import _peer
from benchmarks._result import Row

STEPS: dict[str, Any] = {"megabytes": 0.1, "warm_ups": 0}
TINY: dict[str, dict[str, Any]] = {
    "exchange": {
        "groups": (3,),
        "sizes": (4096, 1 << 20),
        "half_sizes": (4096,),
        "llama": False,
        "rounds": 2,
    },
    "join": {**STEPS, "step_ms": 20.0, "joins": 1, "unrelated": 1, "settled": 2},
    "kill": {**STEPS, "step_ms": (20.0,), "megabytes": (0.1,), "kills": 1},
    "overhead": {"step_ms": (1.0,), "groups": (2,), "megabytes": 0.1, "rounds": 4, "leaves": 3, "calls": 20},
    "overlap": {
        **{"overlaps": (2,), "step_ms": 4.0, "megabytes": (0.1,)},
        **{"leaves": 4, "turns": 1, "rounds": 4},
    },
    "rendezvous": {
        **{"groups": (2, 3), "turns": 1, "seconds": 0.001},
        **{"idle_s": 0.05, "state": False, "watched": False},
    },
    "restart": {**STEPS, "step_ms": 20.0, "restarts": 1},
    "spare": {**STEPS, "step_ms": (20.0,), "rounds": 1},
}


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(_peer, "python", lambda: None)
    module = importlib.import_module(f"benchmarks.{name}")
    rows, _ = module.run(module.Options(**TINY[name]))
    assert rows
    assert all(row.ours is not None and row.peer is None for row in rows), rows
    assert len({(row.case, row.unit) for row in rows}) == len(rows)
    return rows


@pytest.mark.long
@pytest.mark.parametrize("name", ["exchange", "join", "overhead", "overlap", "rendezvous", "restart"])
def test_a_benchmark_fills_its_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, monkeypatch)


@pytest.mark.long
def test_a_kill_discards_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run("kill", monkeypatch)
    assert [row.case.rpartition(": ")[2] for row in rows] == ["median", "slowest", "discarded"]
    assert rows[2].ours == 0


@pytest.mark.long
def test_a_spare_is_in_the_first_step_without_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run("spare", monkeypatch)
    kill, drain = rows[:5], rows[5:]
    assert kill[0].ours == drain[0].ours == 0
    assert kill[1].met
    assert drain[1].ours is not None
    assert drain[1].ours <= 2  # a request that comes just after a decision is a step later
    assert drain[2].ours == 0  # nothing is tried again
