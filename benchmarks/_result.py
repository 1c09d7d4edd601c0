"""The results of a benchmark: rows of figures, as a table and as JSON.

Every figure is a cost: less is better. A ratio is how many times as fast ours is: 1.3 against a peer means that the
peer takes 1.3 times as long; 0.8 against a limit means that ours takes 1.25 times the least possible time.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import _machine


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a row: a ratio to the peer, a ratio to the limit, or a maximum."""

    peer: float | None = None
    limit: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        parts = (
            "" if self.peer is None else f"≥ {self.peer:g}x the peer",
            "" if self.limit is None else f"≥ {self.limit:g} of limit",
            "" if self.most is None else f"≤ {self.most:g}",
        )
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: medians of interleaved rounds; None where there is no figure.

    Attributes:
        case: the measured case; unique within its benchmark.
        unit: of the figures: ms, s, µs, CPU s/GB, MiB, ...
        ours: the cost of jaxft.
        peer: the cost of TorchFT.
        limit: the cost of the least that any implementation must do on this machine.
        spread: of ours, the middle half of its rounds over the median.
        rounds: the number of counted rounds.
        goal: the goal.
        note: for the reader of this row.
    """

    case: str
    unit: str
    ours: float | None
    peer: float | None = None
    limit: float | None = None
    spread: float | None = None
    rounds: int = 1
    goal: Goal = Goal()
    note: str = ""

    @classmethod
    def of(  # noqa: PLR0913 - the columns of a table
        cls,
        case: str,
        unit: str,
        ours: Sequence[float],
        *,
        peer: Sequence[float] = (),
        limit: Sequence[float] = (),
        goal: Goal | None = None,
        note: str = "",
    ) -> "Row":
        """A row of samples, one for each round."""
        mine, theirs, least = map(_median, (ours, peer, limit))
        return cls(case, unit, mine, theirs, least, _spread(ours), len(ours), goal or Goal(), note)

    @property
    def ratio_to_peer(self) -> float | None:
        return _ratio(self.peer, self.ours)

    @property
    def ratio_to_limit(self) -> float | None:
        return _ratio(self.limit, self.ours)

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None if there is none, or nothing to compare with."""
        pairs = (
            (self.goal.peer, self.ratio_to_peer),
            (self.goal.limit, self.ratio_to_limit),
            (None if self.goal.most is None else -self.goal.most, None if self.ours is None else -self.ours),
        )
        known = [got >= wanted for wanted, got in pairs if wanted is not None and got is not None]
        return all(known) if known else None


def times(variant: Sequence[float], other: Sequence[float], name: str = "the default") -> str:
    """The cost of a variant, compared with the default or with something else."""
    return f"{statistics.median(variant) / statistics.median(other):.2f} times {name}"


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    rows: Sequence[Row]
    seconds: float = 0.0
    notes: Sequence[str] = ()
    machine: dict[str, Any] = field(default_factory=_machine.describe)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                **dataclasses.asdict(row),
                "goal": str(row.goal),
                "ratio_to_peer": row.ratio_to_peer,
                "ratio_to_limit": row.ratio_to_limit,
                "met": row.met,
            }
            for row in self.rows
        ]
        return {
            "name": self.name,
            "rows": rows,
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "machine": self.machine,
        }


def write(results: Iterable[Result], path: Path) -> None:
    """One result is written as one object, several as a list of them."""
    found = [result.to_json() for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(found[0] if len(found) == 1 else found, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )


def show(result: Result, console: Console | None = None) -> None:
    table = Table(title=f"{result.name} ({result.seconds:.0f} s)", title_justify="left")
    table.add_column("case")
    for name in ("ours", "peer", "limit", "x the peer", "of limit", "spread", "rounds"):
        table.add_column(name, justify="right")
    table.add_column("goal")
    for row in result.rows:
        goal = {True: f"✓ {row.goal}", False: f"✗ {row.goal}", None: str(row.goal)}[row.met]
        table.add_row(
            f"{row.case}, {row.unit}",
            *(figure(value) for value in (row.ours, row.peer, row.limit)),
            *(figure(value) for value in (row.ratio_to_peer, row.ratio_to_limit)),
            "" if row.spread is None else f"{row.spread:.0%}",
            str(row.rounds),
            goal + (f"  ({row.note})" if row.note else ""),
        )
    console = console or Console(width=max(140, Console().width))
    console.print(table)
    for note in result.notes:
        console.print(f"  {note}")


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _spread(samples: Sequence[float]) -> float | None:
    if len(samples) < 4:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle if middle else None


def _ratio(other: float | None, ours: float | None) -> float | None:
    return None if other is None or not ours else other / ours


def figure(value: float | None) -> str:
    """A number with two or three digits that count."""
    if value is None:
        return ""
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"
