"""SIGKILL of one of two groups with a spare: until a commit includes the spare's contribution.

In steps: how many later than the first step that is committed without the dead group. 0 means that the spare computed
shards of the very step in which the group was lost, or of the next if that one was decided already.
"""

import random
import statistics
import time
from dataclasses import dataclass

from benchmarks._job import Event, Group, Job, Shape, cached, log
from benchmarks._result import Goal, Row

SPARE = "spare-0"


@dataclass(frozen=True)
class Options:
    """Kill a group that has a spare."""

    step_ms: tuple[float, ...] = (20.0, 100.0)
    """Steps to measure, in milliseconds of a device."""
    megabytes: float = 8.0
    """Gradients, in MiB."""
    kills: int = 10
    """Kills in each case."""
    warm_ups: int = 1
    """Kills in each case that are done first and not counted."""
    seed: int = 0
    """Of the phases."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    with cached() as side:
        for step_ms in options.step_ms:
            shape = Shape(step_ms, options.megabytes, groups=2)
            with Job(side, shape) as job:
                later, after_ms, normal_ms = measure(job, options)
            case = f"{step_ms:g} ms steps, {options.megabytes:g} MB"
            rows += [
                Row(
                    f"{case}: later than the first step without the dead, most",
                    "steps",
                    max(later),
                    goal=Goal(most=0.0),
                    rounds=len(later),
                ),
                Row.of(f"{case}: kill to the spare's contribution", "ms", after_ms, limit=[normal_ms]),
            ]
    return rows, [
        "limit: a normal step of two groups. TorchFT's spares do not heal in advance, so they are not comparable."
    ]


def measure(job: Job, options: Options) -> tuple[list[float], list[float], float]:
    """How many steps later, how many milliseconds after each kill, and a normal step."""
    phases = random.Random(options.seed)
    job.start()
    job.prepare(SPARE, spare=True)
    spare = job.enter(SPARE)
    spare.event("commit")
    later: list[float] = []
    after_ms: list[float] = []
    normal_ms: list[float] = []
    for number in range(options.warm_ups + options.kills):
        name = job.names[number % 2]
        job.prepare(name)
        survivor = job.groups[job.names[1 - number % 2]]
        _stands_by(spare)
        job.whole(survivor)
        normal_ms += [step["took_s"] * 1e3 for step in survivor.commits(3)]
        time.sleep(phases.uniform(0.0, statistics.median(normal_ms) / 1e3))
        killed_s = job.kill(name)
        without = _first_without(survivor, name, killed_s)
        first = spare.contribution()
        log(f"killed in step {without['step']}; the spare contributes to {first['step']}")
        if number >= options.warm_ups:
            later.append(first["step"] - without["step"])
            after_ms.append((first["at_s"] - killed_s) * 1e3)
        job.enter(name).contribution()
    job.finish()
    return later, after_ms, statistics.median(normal_ms)


def _first_without(survivor: Group, name: str, since_s: float) -> Event:
    return survivor.until(
        lambda event: event["event"] == "commit" and event["at_s"] > since_s and name not in event["names"]
    )


def _stands_by(spare: Group) -> None:
    now_s = time.monotonic()
    spare.until(lambda event: event["event"] == "commit" and event["at_s"] > now_s and not event["shards"])
