"""The cost of a joiner for the other groups: their step time during a join, compared with a normal step.

Of three groups, one is repeatedly killed and comes back. Its interpreter, imports and first state are ready before,
so that only the join is measured: handshake, compiling (from the cache), the transfer of a state with two moments,
and joining the quorum. Each group brings its own shard, as TorchFT's groups do.

If a joiner shares cores with the others, its start is most of the cost. So the start is also measured without a join:
of an unrelated group, which starts a separate job on the same machine. And joins are measured once more with a core
for the joiner alone, as a group on another host has: the other groups then share one core.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks._job import EVENT_TIMEOUT_S, STEADY, Event, Group, Job, Shape, Side, cached, of_peer, torchft
from benchmarks._result import Goal, Row
from benchmarks._worker import WorkerFailed


@dataclass(frozen=True)
class Options:
    """Let a group join, and watch the steps of the others."""

    step_ms: float = 100.0
    """A step, in milliseconds of a device."""
    megabytes: float = 21.0
    """Gradients, in MiB; the state is three times as large."""
    joins: int = 10
    """Joins of ours."""
    peer_joins: int = 5
    """Joins of TorchFT."""
    unrelated: int = 5
    """Starts of an unrelated group."""
    warm_ups: int = 1
    """Joins in each case that are done first and not counted."""
    settled: int = 8
    """Normal steps to take before and after each kill."""


@dataclass
class Joins:
    """The times of the joins: one value per join, in milliseconds.

    Attributes:
        mean_ms: the mean step of the survivors during the join.
        slowest_ms: the slowest of these.
        expected_ms: the mean normal step of as many groups.
        lasted_ms: from the joiner's first message to its first contribution.
        heal_ms: of this, the transfer and the replay; only for ours.
        beside_ms: the mean step of two groups while an unrelated group started on the same machine; only for ours.
    """

    mean_ms: list[float] = field(default_factory=list)
    slowest_ms: list[float] = field(default_factory=list)
    expected_ms: list[float] = field(default_factory=list)
    lasted_ms: list[float] = field(default_factory=list)
    heal_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    for own_core in (False, True)[: len(os.sched_getaffinity(0))]:
        more_rows, more_notes = _compared(options, own_core=own_core)
        rows += more_rows
        notes += more_notes
    return rows, notes


def _compared(options: Options, *, own_core: bool) -> tuple[list[Row], list[str]]:
    shape = Shape(options.step_ms, options.megabytes, shards_each=None, moments=True)
    unrelated = 0 if own_core else options.unrelated
    with cached() as side:
        ours = measure(side, shape, options.joins, options, unrelated=unrelated, own_core=own_core)
    peer = of_peer(
        torchft(STEADY), lambda side: measure(side, shape, options.peer_joins, options, own_core=own_core)
    )
    peer = peer or Joins()
    case = f"{options.step_ms:g} ms steps, {3 * options.megabytes:g} MB state"
    if own_core:
        case += ", the joiner on its own core"
    mean_goal, slowest_goal = (Goal(limit=1 / 1.05), Goal(limit=1 / 1.5)) if own_core else (None, None)
    cases = (
        ("mean step during a join", ours.mean_ms, peer.mean_ms, ours.expected_ms, mean_goal),
        ("slowest step of a join", ours.slowest_ms, peer.slowest_ms, ours.expected_ms, slowest_goal),
        ("mean step while an unrelated group starts", ours.beside_ms, (), ours.expected_ms, None),
        ("first message to first contribution", ours.lasted_ms, peer.lasted_ms, (), None),
    )
    rows = [
        Row.of(f"{case}: {what}", "ms", mine, peer=theirs, limit=limit, goal=goal)
        for what, mine, theirs, limit, goal in cases
        if mine
    ]
    notes = [
        f"{case}: limit: their normal step. Ours: healing itself takes {statistics.median(ours.heal_ms):.0f} ms of a "
        "join."
    ]
    if peer.mean_ms:
        normal_ms, mean_ms = map(statistics.median, (peer.expected_ms, peer.mean_ms))
        notes.append(
            f"{case}: TorchFT (heartbeats of 1 s): normal step {normal_ms:.0f} ms, during a join "
            f"{mean_ms / normal_ms:.2f} times that; ours "
            f"{statistics.median(ours.mean_ms) / statistics.median(ours.expected_ms):.2f} times."
        )
    return rows, notes


def measure(
    side: Side, shape: Shape, count: int, options: Options, *, unrelated: int = 0, own_core: bool = False
) -> Joins:
    """Let groups join in turn, or always the one with its own core; before some joins, start an unrelated group."""
    found = Joins()
    with Job(side, shape) as job:
        *others, last = job.names
        if own_core:
            first_core, last_core = sorted(os.sched_getaffinity(0))[:2]
            job.cores = {last: last_core, **dict.fromkeys(others, first_core)}
        job.start()
        for number in range(options.warm_ups + count):
            unrelated_too = options.warm_ups <= number < options.warm_ups + unrelated
            joiner = last if own_core else job.names[number % shape.groups]
            one = _join(job, joiner, options.settled, unrelated_too=unrelated_too)
            if number >= options.warm_ups:
                for name, values in vars(one).items():
                    getattr(found, name).extend(values)
        job.finish()
    return found


def _join(job: Job, name: str, settled: int, *, unrelated_too: bool) -> Joins:
    job.prepare(name)
    watched = next(group for other, group in job.groups.items() if other != name)
    normal_ms = {job.shape.groups: _normal_ms(watched, job.shape.groups, settled)}
    job.kill(name)
    normal_ms[job.shape.groups - 1] = _normal_ms(watched, job.shape.groups - 1, settled)
    beside_ms = [_beside_an_unrelated_group(job, watched)] if unrelated_too else []
    joiner = job.enter(name)
    entered_s = joiner.event("entering")["at_s"]
    first, heal_ms = _first_contribution(joiner)
    steps = _steps_until(watched, entered_s, lambda step: step["step"] >= first["step"])
    took_ms = [event["took_s"] * 1e3 for event in steps]
    return Joins(
        [statistics.mean(took_ms)],
        [max(took_ms)],
        [statistics.mean(normal_ms[event["members"]] for event in steps)],
        [(first["at_s"] - entered_s) * 1e3],
        heal_ms,
        beside_ms,
    )


def _beside_an_unrelated_group(job: Job, watched: Group) -> float:
    with job.unrelated() as unrelated:
        entered_s = unrelated.event("entering")["at_s"]
        first_s = unrelated.contribution()["at_s"]
        steps = _steps_until(watched, entered_s, lambda step: step["at_s"] >= first_s)
    return statistics.mean(step["took_s"] * 1e3 for step in steps)


def _normal_ms(group: Group, members: int, count: int) -> float:
    """The median of the next steps with this many members, except for those with a new quorum."""
    took_ms: list[float] = []
    before = 0
    until_s = time.monotonic() + EVENT_TIMEOUT_S
    while len(took_ms) < count:
        if time.monotonic() > until_s:
            raise WorkerFailed(f"{members} groups do not stay together")
        step = group.event("commit")
        if before == step["members"] == members:
            took_ms.append(step["took_s"] * 1e3)
        before = step["members"]
    return statistics.median(took_ms)


def _first_contribution(joiner: Group) -> tuple[Event, list[float]]:
    heal_ms: list[float] = []
    while True:
        event = joiner.event("commit")
        if event.get("heal") is not None:
            heal_ms.append(event["heal"]["seconds"] * 1e3)
        if event["shards"]:
            return event, heal_ms


def _steps_until(group: Group, since_s: float, is_last: Callable[[Event], bool]) -> list[Event]:
    steps: list[Event] = []
    while True:
        steps.append(group.commit(since_s=since_s))
        if is_last(steps[-1]):
            return steps
