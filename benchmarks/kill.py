"""SIGKILL of one group of three at a random phase: until every survivor has committed a step without it.

Times start at the kill, so they include the rest of the step (half of it, on average), the dead group's shards, which
the survivors compute, and the cost of the failure itself. The limit is a whole normal step and the recomputed shards.
"""

import math
import random
import statistics
import time
from dataclasses import dataclass, field

from benchmarks._job import (
    BEST,
    Event,
    Group,
    Job,
    Shape,
    Side,
    TorchFT,
    WrongResult,
    cached,
    of_peer,
    torchft,
)
from benchmarks._result import Goal, Row

P50_ABOVE_MS, WORST_ABOVE_MS = 50.0, 250.0
# This many incarnations are started before they are needed, so that no start disturbs a measurement.
AHEAD = 6
SLOW_STEP_MS = 500.0
# The case in which TorchFT is also measured with its default timeouts: a kill takes it a minute.
USUAL = (100.0, 8.0)


@dataclass(frozen=True)
class Options:
    """Kill groups, and measure how long the others take."""

    step_ms: tuple[float, ...] = (20.0, 100.0, 500.0)
    """Steps to measure, in milliseconds of a device."""
    megabytes: tuple[float, ...] = (8.0, 64.0)
    """Gradients, in MiB."""
    kills: int = 30
    """Kills of ours in each case."""
    slow_kills: int = 10
    """The same for steps of half a second or more, which would take most of the time of all benchmarks."""
    peer_kills: int = 2
    """Kills of TorchFT with its default timeouts, for 100 ms and 8 MB."""
    peer_best_kills: int = 3
    """Kills of TorchFT with its best timeouts, in each case."""
    warm_ups: int = 1
    """Kills in each case that are done first and not counted."""
    peer_seconds: float = 20.0
    """The most seconds for TorchFT's kills, in each case and for each of its settings."""


@dataclass
class Kills:
    """The times of the kills of one case.

    Attributes:
        after_ms: from each kill to the last survivor's first commit without the dead group.
        normal_ms: steps of all groups, undisturbed.
        discarded: attempts at a step whose gradients were thrown away.
    """

    after_ms: list[float] = field(default_factory=list)
    normal_ms: list[float] = field(default_factory=list)
    discarded: int = 0


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    default, best = torchft(), torchft(BEST)
    with cached() as ours:
        for megabytes in options.megabytes:
            for step_ms in options.step_ms:
                shape = Shape(step_ms, megabytes)
                count = options.kills if step_ms < SLOW_STEP_MS else options.slow_kills
                kills = measure(ours, shape, count, options)
                usual = (step_ms, megabytes) == USUAL
                slow = measure_peer(default, shape, options.peer_kills, options) if usual else None
                fast = measure_peer(best, shape, options.peer_best_kills, options)
                rows += rows_of(shape, kills, fast)
                notes.append(note_of(shape, kills, slow, fast))
    return rows, notes


def measure_peer(side: TorchFT | None, shape: Shape, count: int, options: Options) -> Kills | None:
    """As many kills as fit into the peer's time; None if it survived none."""
    found = Kills()
    until_s = time.monotonic() + options.peer_seconds
    of_peer(side, lambda side: measure(side, shape, count, options, found, until_s))
    return found if found.after_ms else None


def measure(
    side: Side,
    shape: Shape,
    count: int,
    options: Options,
    found: Kills | None = None,
    until_s: float = math.inf,
) -> Kills:
    """Kill groups in turn."""
    phases = random.Random(0)
    found = found or Kills()
    with Job(side, shape) as job:
        job.start()
        names = [job.names[number % shape.groups] for number in range(options.warm_ups + count)]
        for number, name in enumerate(names):
            if time.monotonic() > until_s:
                break
            if number % AHEAD == 0:
                job.prepare(*names[number : number + AHEAD])
            _settle(job, found)
            time.sleep(phases.uniform(0.0, statistics.median(found.normal_ms) / 1e3))
            took_ms, discarded = _kill(job, name)
            if number >= options.warm_ups:
                found.after_ms.append(took_ms)
                found.discarded += discarded
            job.whole(job.enter(name))
        job.finish()
    return found


def _settle(job: Job, found: Kills) -> None:
    """Let all groups take undisturbed steps."""
    now_s = time.monotonic()
    group = next(iter(job.groups.values()))
    group.commit(since_s=now_s)
    job.whole(group)
    found.normal_ms += [event["took_s"] * 1e3 for event in (job.whole(group), job.whole(group))]


def _kill(job: Job, name: str) -> tuple[float, int]:
    killed_s = job.kill(name)
    ends = [_survive(job, group, killed_s) for group in job.groups.values()]
    return (max(at_s for at_s, _ in ends) - killed_s) * 1e3, max(discarded for _, discarded in ends)


def _survive(job: Job, group: Group, killed_s: float) -> tuple[float, int]:
    """When this group committed a step without the dead group, and how many attempts it discarded until then."""
    discarded = 0
    before: Event | None = None
    while True:
        event = group.until(lambda event: event["event"] in ("commit", "discarded"))
        if event["event"] == "discarded":
            discarded += event["at_s"] > killed_s
            continue
        if job.side.exact and before is not None and event["step"] != before["step"] + 1:
            raise WrongResult(f"after step {before['step']} came step {event['step']}")
        before = event
        if len(set(event["shards"])) != len(event["shards"]):
            discarded += 1  # a shard was computed twice
        if event["at_s"] > killed_s and event["members"] < job.shape.groups:
            return event["at_s"], discarded


def rows_of(shape: Shape, kills: Kills, peer: Kills | None) -> list[Row]:
    normal_ms = statistics.median(kills.normal_ms)
    limit_ms = normal_ms + shape.shard_ms
    case = f"{shape.step_ms:g} ms steps, {shape.megabytes:g} MB"
    theirs = [] if peer is None else peer.after_ms
    many = len(kills.after_ms)
    slowest = max(kills.after_ms), max(theirs, default=None), limit_ms
    discarded = kills.discarded / many, None if peer is None else peer.discarded / len(theirs)

    def above(more_ms: float) -> Goal:
        return Goal(most=round(limit_ms + more_ms, 1))

    goal = above(P50_ABOVE_MS)
    return [
        Row.of(f"{case}: median", "ms", kills.after_ms, peer=theirs, limit=[limit_ms], goal=goal),
        Row(f"{case}: slowest", "ms", *slowest, rounds=many, goal=above(WORST_ABOVE_MS)),
        Row(f"{case}: discarded", "steps a kill", *discarded, rounds=many, goal=Goal(most=0.0)),
    ]


def note_of(shape: Shape, kills: Kills, slow: Kills | None, fast: Kills | None) -> str:
    def words(name: str, found: Kills) -> str:
        return (
            f"{name}: normal step {statistics.median(found.normal_ms):.0f} ms, {len(found.after_ms)} kills, median "
            f"{statistics.median(found.after_ms):.0f}, slowest {max(found.after_ms):.0f} ms, "
            f"{found.discarded} discarded"
        )

    sides = (("ours", kills), ("TorchFT by default", slow), ("TorchFT at its best (in the table)", fast))
    text = "; ".join(words(name, found) for name, found in sides if found is not None)
    return f"{shape.step_ms:g} ms, {shape.megabytes:g} MB: {text}."
