"""A step whose gradients are exchanged in parts while the device computes the rest, compared with `overlap=1`.

The device is simulated within the program: it sleeps for a third of the step, and then before each leaf of the
gradients. The host is idle meanwhile, as with an accelerator, so that it can exchange.
"""

import statistics
from dataclasses import dataclass, replace

from benchmarks._job import Event, Ours, Shape
from benchmarks._result import Row
from benchmarks.overhead import measure


@dataclass(frozen=True)
class Options:
    """Compare an overlapped step with an ordinary one."""

    overlaps: tuple[int, ...] = (2, 4, 8)
    """Numbers of parts."""
    step_ms: float = 200.0
    """The device time of a step, in milliseconds."""
    megabytes: tuple[float, ...] = (8.0, 64.0)
    """Gradients, in MiB."""
    leaves: int = 16
    """Of the gradients."""
    turns: int = 3
    """Jobs of each kind, in turn."""
    rounds: int = 20
    """Steps to count in each of them."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    for megabytes in options.megabytes:
        shape = Shape(options.step_ms, megabytes, groups=2, shards_each=1, leaves=options.leaves)
        steps: dict[int, list[Event]] = {overlap: [] for overlap in (1, *options.overlaps)}
        for _ in range(options.turns):
            for overlap, found in steps.items():
                found += measure(Ours(), replace(shape, overlap=overlap), options.rounds)
        whole_s = statistics.median(step["took_s"] for step in steps[1])
        rows += [_row(shape, overlap, found, whole_s) for overlap, found in steps.items()]
    return rows, []


def _row(shape: Shape, overlap: int, steps: list[Event], whole_s: float) -> Row:
    took_s = [step["took_s"] for step in steps]
    parts = ("compute", "exchange", "vote", "apply")
    spent = ", ".join(
        f"{part} {1e3 * statistics.median(step[f'{part}_s'] for step in steps):.0f}" for part in parts
    )
    return Row.of(
        f"2 groups, {shape.step_ms:g} ms steps, {shape.megabytes:g} MB: overlap={overlap}",
        "ms",
        [1e3 * each for each in took_s],
        limit=[shape.step_ms],
        note=f"{whole_s / statistics.median(took_s):.2f} times as fast as overlap=1 ({spent} ms)",
    )
