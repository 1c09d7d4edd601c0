"""The cost of fault tolerance without failures: a step in a job of one and of two groups, compared with a plain step.

Each step of the job is followed by a plain step of the same sizes in the same process. The exchange is reported
separately: the rest is the cut, packing, the vote and the engine. The engine is also measured alone: a call of a step
with many small leaves, without a job.
"""

import statistics
from dataclasses import dataclass

from benchmarks._job import Event, Job, Ours, Shape, Side, torchft_default
from benchmarks._result import Goal, Row
from benchmarks._worker import Worker, workers

MOST_DISPATCH_US = 200.0
# The goal, 1 % beyond the exchange, applies to steps of this length.
GOAL_STEP_MS = 100.0


@dataclass(frozen=True)
class Options:
    """Compare a step in a job with the plain one."""

    step_ms: tuple[float, ...] = (20.0, 100.0, 500.0)
    """Steps to measure, in milliseconds of a device."""
    groups: tuple[int, ...] = (1, 2)
    """Jobs to measure, in groups."""
    megabytes: float = 8.0
    """Gradients, in MiB."""
    rounds: int = 60
    """Steps to count; of a slow step as many as fit into `seconds`."""
    seconds: float = 8.0
    """The most seconds for one case."""
    leaves: int = 300
    """Of the state whose dispatch is measured."""
    calls: int = 500
    """Calls of it."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    peer = torchft_default()
    for groups in options.groups:
        for step_ms in options.step_ms:
            shape = Shape(step_ms, options.megabytes, groups=groups, shards_each=1, plain=True)
            count = max(4, min(options.rounds, int(options.seconds * 500 / step_ms)))
            ours = measure(Ours(), shape, count)
            theirs = [] if peer is None else measure(peer, shape, count)
            rows += rows_of(shape, ours, theirs)
            notes.append(note_of(shape, ours, theirs))
    rows.append(dispatch(options.leaves, options.calls))
    return rows, notes


def measure(side: Side, shape: Shape, count: int) -> list[Event]:
    with Job(side, shape) as job:
        job.start()
        group = next(iter(job.groups.values()))
        group.commits(3)
        steps = group.commits(count)
        job.finish()
    return steps


def rows_of(shape: Shape, ours: list[Event], theirs: list[Event]) -> list[Row]:
    case = f"{shape.groups} group{'s' * (shape.groups > 1)}, {shape.step_ms:g} ms steps"
    plain_ms = [step["plain_s"] * 1e3 for step in ours]
    goal = Goal(limit=round(1 / 1.01, 3)) if shape.step_ms == GOAL_STEP_MS else None
    return [
        Row.of(
            f"{case}: step",
            "ms",
            [step["took_s"] * 1e3 for step in ours],
            peer=[step["took_s"] * 1e3 for step in theirs],
            limit=plain_ms,
        ),
        Row.of(
            f"{case}: without the exchange",
            "ms",
            [(step["took_s"] - step["exchange_s"]) * 1e3 for step in ours],
            peer=[(step["took_s"] - step["exchange_s"]) * 1e3 for step in theirs],
            limit=plain_ms,
            goal=goal,
        ),
    ]


def note_of(shape: Shape, ours: list[Event], theirs: list[Event]) -> str:
    def median(steps: list[Event], name: str) -> float:
        return statistics.median(step[f"{name}_s"] * 1e3 for step in steps)

    def beyond(steps: list[Event]) -> float:
        return statistics.median(
            (step["took_s"] - step["exchange_s"] - step["plain_s"]) * 1e3 for step in steps
        )

    text = (
        f"{shape.groups} x {shape.step_ms:g} ms: ours {beyond(ours):+.2f} ms beyond plain and exchange; exchange "
        f"{median(ours, 'exchange'):.2f}, vote {median(ours, 'vote'):.2f}, apply {median(ours, 'apply'):.2f} ms"
    )
    if theirs:
        text += (
            f". TorchFT {beyond(theirs):+.2f} ms beyond its own plain step ({median(theirs, 'plain'):.1f} ms) and "
            f"exchange ({median(theirs, 'exchange'):.2f} ms)"
        )
    return text + "."


def dispatch(leaves: int, calls: int) -> Row:
    with workers(Worker("benchmarks._ours.dispatch")) as (worker,):
        took_us = worker.ask("measure", leaves=leaves, calls=calls)
    pairs = zip(took_us["wrapped"], took_us["bare"], strict=True)
    median_us = {name: statistics.median(values) for name, values in took_us.items()}
    return Row.of(
        f"dispatch beyond the two compiled programs, {leaves} leaves",
        "µs",
        [wrapped - bare for wrapped, bare in pairs],
        goal=Goal(most=MOST_DISPATCH_US),
        note="a whole call: {wrapped:.0f} µs, the two programs alone {bare:.0f}, plain jit {plain:.0f}".format(
            **median_us
        ),
    )
