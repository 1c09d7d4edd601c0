"""Groups of two processes beside groups of one: a step, a restart, and a heal.

Two jobs train at the same time, one with groups of one process and one with groups of two, so that background load
affects both: what rank 0's orders and one vote for all ranks add to a step. The gradients are small. Then their
groups are killed in turn and start again, with a warm compilation cache.

A heal moves a state from a group that stands still: to one process, or half of each leaf to each of two, which begin
at the same time and end with the slower one. With as many busy processes as cores, two ranks share what one has.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._job import Event, Job, Shape, cached, log
from benchmarks._result import Row, times
from benchmarks._state import sizes
from benchmarks._worker import Worker, workers
from benchmarks.heal import HOST, WrongState, patience
from benchmarks.restart import PARTS, restart

RANKS = (1, 2)
LEAVES = 150
OUTSIDE = ("compute", "exchange", "vote", "apply")


@dataclass(frozen=True)
class Options:
    """Compare groups of two processes with groups of one."""

    step_ms: float = 50.0
    """A step, in milliseconds of a device."""
    megabytes: float = 0.25
    """Gradients, in MiB."""
    steps: int = 150
    """Steps to count."""
    restarts: int = 3
    """Restarts of each kind, after one that is not counted."""
    state_megabytes: tuple[float, ...] = (256.0,)
    """Sizes of the state to heal; 1000 takes about 6 GB of memory."""
    heals: int = 7
    """Heals of each kind, after one that is not counted."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows = _steps_and_restarts(options)
    for megabytes in options.state_megabytes:
        rows.append(heals(megabytes, options.heals))
    return rows, ["limit: the same with groups of one process"]


def _steps_and_restarts(options: Options) -> list[Row]:
    with contextlib.ExitStack() as stack:
        side = stack.enter_context(cached())
        jobs: list[Job] = []
        for ranks in RANKS:
            shape = Shape(options.step_ms, options.megabytes, groups=2, shards_each=1, ranks=ranks)
            jobs.append(stack.enter_context(Job(side, shape, forked=False)))
            jobs[-1].start()
        one, two = _steps(jobs, options.steps)
        parts: tuple[list[dict[str, float]], ...] = ([], [])
        for number in range(1 + options.restarts):
            for job, found in zip(jobs, parts, strict=True):
                took_ms = restart(job, job.names[number % 2])
                log(f"{job.shape.ranks} processes: {took_ms}")
                if number > 0:
                    found.append(took_ms)
        for job in jobs:
            job.finish()
    return [*_step_rows(f"{options.step_ms:g} ms steps", one, two), *_restart_rows(*parts)]


def _steps(jobs: Sequence[Job], count: int) -> list[list[Event]]:
    """The steps of a group of each job, from now on."""
    now_s = time.monotonic()
    groups = [next(iter(job.groups.values())) for job in jobs]
    for group in groups:
        group.until(lambda event: event["event"] == "commit" and event["at_s"] > now_s)
    return [group.commits(count) for group in groups]


def _step_rows(case: str, one: Sequence[Event], two: Sequence[Event]) -> list[Row]:
    def orders_s(step: Event) -> float:
        return step["took_s"] - sum(step[f"{part}_s"] for part in OUTSIDE)

    kinds = {
        "step": lambda step: step["took_s"],
        "vote": lambda step: step["vote_s"],
        "outside compute, exchange, vote and apply": orders_s,
    }
    return [
        _row(f"{case}: {name}", *([1e3 * seconds(step) for step in steps] for steps in (one, two)))
        for name, seconds in kinds.items()
    ]


def _restart_rows(one: Sequence[dict[str, float]], two: Sequence[dict[str, float]]) -> list[Row]:
    return [
        _row(f"restart with the cache: {part}", [took[part] for took in one], [took[part] for took in two])
        for part in PARTS
    ]


def heals(megabytes: float, count: int) -> Row:
    whole = sizes(megabytes, LEAVES)
    half = [size // 2 for size in whole]
    took_ms: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    with workers(*(Worker("benchmarks._ours.heal") for _ in range(5))) as (donor, *others):
        ways = {
            1: [_Part(donor, others[0], whole)],
            2: [_Part(*pair, half) for pair in zip(others[2:], others, strict=False)],
        }
        for number in range(1 + count):
            for ranks, parts in ways.items():
                for part in parts:
                    part.prepare()
                for part in parts:
                    part.begin()
                spans = [part.end() for part in parts]
                if number > 0:
                    took_ms[ranks].append(
                        1e3 * (max(end for _, end in spans) - min(began for began, _ in spans))
                    )
    return _row(f"{megabytes:g} MB: heal", took_ms[1], took_ms[2])


class _Part:
    """A rank that heals what it holds, and its donor."""

    def __init__(self, donor: Worker, joiner: Worker, leaves: list[int]) -> None:
        self._donor, self._joiner, self._leaves = donor, joiner, leaves
        arguments = {"sizes": leaves, "seed": 0, "host": HOST, "number": 0}
        self._held = donor.ask("hold", timeout_s=patience(leaves), **arguments)

    def prepare(self) -> None:
        self._donor.ask("pin")
        self._joiner.ask("make_room", size_bytes=4 * sum(self._leaves))

    def begin(self) -> None:
        self._joiner.tell("heal", addresses=self._held["addresses"][:1], sizes=self._leaves)

    def end(self) -> tuple[float, float]:
        found = self._joiner.hear(patience(self._leaves))
        if found["sums"] != self._held["sums"]:
            raise WrongState("a rank has healed to other values than its donor holds")
        return found["span"]


def _row(case: str, one: Sequence[float], two: Sequence[float]) -> Row:
    return Row.of(f"2 processes, {case}", "ms", two, limit=one, note=times(two, one, "one process"))
