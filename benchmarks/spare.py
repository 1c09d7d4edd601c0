"""SIGKILL or a drain of a group of two with a spare: until a commit includes the spare's contribution.

Steps are counted from the one under way, and from the first that is committed without the group. For a kill, 0 after
the latter means that the spare computed shards of the very step in which the group was lost, or of the next if that
one was decided already. A drained group (SIGTERM) finishes its step, so the spare contributes to the next one.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._job import Group, Job, Shape, cached
from benchmarks._result import Goal, Row

SPARE = "spare-0"
KILL, DRAIN = "kill -9", "drain"


@dataclass(frozen=True)
class Options:
    """Kill and drain groups that have a spare."""

    step_ms: tuple[float, ...] = (20.0, 100.0)
    """Steps to measure, in milliseconds of a device."""
    megabytes: float = 8.0
    """Gradients, in MiB."""
    rounds: int = 10
    """Rounds of one kill and one drain in each case."""
    warm_ups: int = 1
    """Rounds in each case that are done first and not counted."""


@dataclass(frozen=True)
class Handover:
    """The cost of a kill or a drain.

    Attributes:
        later: steps from the first commit without the group to the spare's contribution.
        steps: the same from the step that was under way.
        tried_again: attempts at these steps beyond the first of each.
        after_ms: from the kill or the drain to the spare's contribution.
        longest_ms: the other group's longest step until then.
    """

    later: int
    steps: int
    tried_again: int
    after_ms: float
    longest_ms: float


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    with cached() as side:
        for step_ms in options.step_ms:
            shape = Shape(step_ms, options.megabytes, groups=2)
            with Job(side, shape) as job:
                found, normal_ms = measure(job, options)
            for how, handovers in found.items():
                case = f"{step_ms:g} ms steps, {options.megabytes:g} MB, {how}"
                rows += rows_of(case, handovers, normal_ms, drained=how == DRAIN)
    return rows, [
        "limit: a normal step of two groups. TorchFT's spares do not heal in advance, so they are not comparable."
    ]


def measure(job: Job, options: Options) -> tuple[dict[str, list[Handover]], float]:
    """What each kill and each drain cost, and a normal step in milliseconds."""
    phases = random.Random(0)
    job.start()
    job.prepare(SPARE, spare=True)
    spare = job.enter(SPARE)
    spare.event("commit")
    found: dict[str, list[Handover]] = {KILL: [], DRAIN: []}
    normal_ms: list[float] = []
    for number in range(options.warm_ups + options.rounds):
        name, other = job.names if number % 2 else reversed(job.names)
        for how, handovers in found.items():
            job.prepare(name)
            survivor = job.groups[other]
            _stands_by(spare)
            job.whole(survivor)
            normal_ms += [step["took_s"] * 1e3 for step in survivor.commits(3)]
            time.sleep(phases.uniform(0.0, statistics.median(normal_ms) / 1e3))
            began_s = job.kill(name) if how == KILL else job.drain(name)
            one = _handover(survivor, spare, name, began_s)
            if number >= options.warm_ups:
                handovers.append(one)
            job.enter(name).contribution()
    job.finish()
    return found, statistics.median(normal_ms)


def rows_of(case: str, found: Sequence[Handover], normal_ms: float, *, drained: bool) -> list[Row]:
    def most(what: str, values: Sequence[int], goal: float | None) -> Row:
        return Row(f"{case}: {what}, most", "steps", max(values), goal=Goal(most=goal), rounds=len(found))

    after_ms = [each.after_ms for each in found]
    longest_ms = [each.longest_ms for each in found]
    return [
        most("later than the first step without the group", [each.later for each in found], 0.0),
        most("after the step under way", [each.steps for each in found], 1.0),
        most("tried again", [each.tried_again for each in found], 0.0 if drained else None),
        Row.of(f"{case}: to the spare's contribution", "ms", after_ms, limit=[normal_ms]),
        Row.of(f"{case}: the other group's longest step", "ms", longest_ms, limit=[normal_ms]),
    ]


def _handover(survivor: Group, spare: Group, name: str, began_s: float) -> Handover:
    first = spare.contribution()
    steps = [survivor.event("commit")]
    while steps[-1]["step"] < first["step"]:
        steps.append(survivor.event("commit"))
    steps = [step for step in steps if step["at_s"] > began_s]
    without = next(step for step in steps if name not in step["names"])
    return Handover(
        first["step"] - without["step"],
        first["step"] - steps[0]["step"],
        sum(step["attempts"] - 1 for step in steps),
        (first["at_s"] - began_s) * 1e3,
        max(step["took_s"] for step in steps) * 1e3,
    )


def _stands_by(spare: Group) -> None:
    spare.commit(lambda step: not step["shards"], time.monotonic())
