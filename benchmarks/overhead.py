"""The cost of fault tolerance without failures: a step in a job of one and of two groups, compared with a plain step.

Each step of the job is followed by a plain step of the same sizes in the same process. The exchange is reported
separately: the rest is the cut, packing, the vote and the engine; in groups of several processes also rank 0's orders
to the others, and their reports to it, for one vote. The engine is also measured alone: a call of a step
with many small leaves, without a job.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks._job import Event, Job, Ours, Shape, Side, torchft
from benchmarks._result import Goal, Row
from benchmarks._worker import Worker, workers

MOST_DISPATCH_US = 200.0
# The goal of vote, engine and apply, beyond the exchange and a plain step, applies to steps of this length.
GOAL_STEP_MS = 100.0
MOST_BEYOND_MS = 1.5


@dataclass(frozen=True)
class Options:
    """Compare a step in a job with the plain one."""

    step_ms: tuple[float, ...] = (20.0, 100.0, 500.0)
    """Steps to measure, in milliseconds of a device."""
    groups: tuple[int, ...] = (1, 2)
    """Jobs to measure, in groups."""
    processes: tuple[int, ...] = (2,)
    """Also jobs of the most groups with these numbers of processes each."""
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
    peer = torchft()
    jobs = [(groups, 1) for groups in options.groups] + [(max(options.groups), n) for n in options.processes]
    for (groups, ranks), step_ms in itertools.product(jobs, options.step_ms):
        shape = Shape(step_ms, options.megabytes, groups=groups, shards_each=1, plain=True, ranks=ranks)
        count = max(4, min(options.rounds, int(options.seconds * 500 / step_ms)))
        ours = measure(Ours(), shape, count)
        theirs = [] if peer is None or ranks > 1 else measure(peer, shape, count)
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
    case = f"{_groups(shape)}, {shape.step_ms:g} ms steps"
    plain_ms = [step["plain_s"] * 1e3 for step in ours]
    goal = Goal(most=MOST_BEYOND_MS) if shape.step_ms == GOAL_STEP_MS else None

    def row(
        what: str, seconds: Callable[[Event], float], *, limit: list[float], goal: Goal | None = None
    ) -> Row:
        mine, peer = ([seconds(step) * 1e3 for step in steps] for steps in (ours, theirs))
        return Row.of(f"{case}: {what}", "ms", mine, peer=peer, limit=limit, goal=goal)

    return [
        row("step", lambda step: step["took_s"], limit=plain_ms),
        row(
            "beyond a plain step and the exchange",
            lambda step: step["took_s"] - step["exchange_s"] - step["plain_s"],
            limit=[],
            goal=goal,
        ),
    ]


def note_of(shape: Shape, ours: list[Event], theirs: list[Event]) -> str:
    def words(name: str, steps: list[Event]) -> str:
        def median(*less: str, of: str) -> float:
            return statistics.median(1e3 * (step[of] - sum(step[part] for part in less)) for step in steps)

        parts = [part for part in ("plain", "exchange", "vote", "apply") if f"{part}_s" in steps[0]]
        times_ms = ", ".join(f"{part} {median(of=f'{part}_s'):.2f}" for part in parts)
        beyond_ms = median("exchange_s", "plain_s", of="took_s")
        return f"{name} {beyond_ms:+.2f} ms beyond plain and exchange ({times_ms} ms)"

    texts = [words(name, steps) for name, steps in (("ours", ours), ("TorchFT", theirs)) if steps]
    return f"{_groups(shape)}, {shape.step_ms:g} ms: {'; '.join(texts)}."


def _groups(shape: Shape) -> str:
    processes = "" if shape.ranks == 1 else f" of {shape.ranks} processes"
    return f"{shape.groups} group{'s' * (shape.groups > 1)}{processes}"


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
