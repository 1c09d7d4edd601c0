"""Predict a job: goodput in time and in cost for each strategy, and which input matters.

*Time* is the share of wall time that advances the training at full speed, *cost* the share of the paid devices' time:
spares are paid for. At full speed all groups train, with no failure and a free exchange.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxft_launch.plan import forms
from jaxft_launch.plan.job import LONGEST_INTERVAL_S, Job

UNCERTAINTY = 0.25  # of published rates, from one cluster and month to the next
RESTART, DROPPED = "checkpoint-restart", "dropped replicas"
FILLED = 0.99  # of the time, enough spares leave no place empty
PAIRS = ((0, RESTART), (1, RESTART), (0, DROPPED), (1, "jaxft, 0 spares"))
Row = dict[str, Any]
LEAST_MTBF_DAYS, MOST_MTBF_DAYS = 0.01, 1e5
VARIED = "mtbf_node_days return_s step_s link_gbits save_s shards_per_group groups params exchange_threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A strategy's goodput in time, with P10 and P90, and in cost; `device_hours`: for 1,000 steps."""

    name: str
    spares: int
    time: float
    low: float
    high: float
    cost: float
    interval_s: float
    device_hours: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where a strategy overtakes another: below this MTBF of a node, in days; None: nowhere."""

    winner: str
    loser: str
    time_days: float | None
    cost_days: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    job: Job
    outcomes: tuple[Outcome, ...]
    swings: tuple[Row, ...]  # the goodput in cost with 25 % less and more of an input, the largest first
    break_evens: tuple[BreakEven, ...]
    sizes: tuple[Row, ...]  # the same devices as other numbers of groups


def forecast(job: Job) -> Forecast:
    """Compare the strategies for a job."""
    names = (RESTART, DROPPED, *(exact_name(count) for count in (0, 1, enough_spares(job))))
    outcomes = tuple(outcome(name, job) for name in names)
    best = max(outcomes[2:], key=lambda each: each.cost).name
    swings = [_swing(best, job, name) for name in VARIED.split()]
    return Forecast(
        job,
        outcomes,
        tuple(sorted(swings, key=lambda each: -abs(each["more"] - each["less"]))),
        tuple(_break_even(exact_name(spares), other, job) for spares, other in PAIRS),
        tuple(_sizes(best, job)),
    )


def exact_name(spares: int) -> str:
    return f"jaxft, {spares} spare{'' if spares == 1 else 's'}"


def enough_spares(job: Job) -> int:
    """Return the least number of spares, two at least, that keep all places filled nearly always."""
    for spares in range(2, job.groups):
        if sum(forms.away(job.groups + spares, job.group_failures, job.back_s)[: spares + 1]) >= FILLED:
            return spares
    return max(2, job.groups)


def outcome(name: str, job: Job) -> Outcome:
    """Return the result of a strategy, by its name."""
    spares = _spares(name)
    time = goodput(name, job)
    paid = (job.groups + spares) / job.groups
    hours = 1000 * job.step_s / 3600 * job.groups * job.devices_per_group * paid
    return Outcome(
        name=name,
        spares=spares,
        time=time,
        low=goodput(name, job.scaled(mtbf_node_days=1.0 / (1.0 + UNCERTAINTY))),
        high=goodput(name, job.scaled(mtbf_node_days=1.0 / (1.0 - UNCERTAINTY))),
        cost=time / paid,
        interval_s=checkpoint_interval_s(name, job),
        device_hours=hours / time if time > 0.0 else math.inf,
    )


def goodput(name: str, job: Job) -> float:
    """Return the goodput in time of a strategy.

    In checkpoint-restart, collectives need no processor. Of dropped replicas, as in TorchFT, a failure costs its
    detection and the whole step, and all wait while the returning group fetches the state.
    """
    if name == RESTART:
        return _restart(job)
    lost_s = job.detect_s + job.round_s + job.exchange_s + job.heal_s
    return (
        _replicas(job, 0, lost_s, lambda n: n / job.groups) if name == DROPPED else exact(job, _spares(name))
    )


def exact(job: Job, spares: int) -> float:
    """Return the goodput in time of exact replicas: the present groups do every step.

    A failure costs its detection, the lost shards, and another exchange. Spares fill the places of lost groups. When
    none is left, the others take the shards, and a step takes as long as the group with most of them.
    """
    shards = job.shards_per_group
    redone = shards if spares or job.groups == 1 else math.ceil(shards / (job.groups - 1))
    lost_s = job.detect_s + job.round_s * redone / shards + job.exchange_s
    return _replicas(job, spares, lost_s, lambda present: forms.exact_speed(job.groups, present, shards))


def _replicas(job: Job, spares: int, lost_s: float, speed: Callable[[int], float]) -> float:
    shares = forms.away(job.groups + spares, job.group_failures, job.back_s)
    standing = max(0.0, 1.0 - job.failures * lost_s)
    steady = job.round_s / (job.round_s + job.exchange_s)
    all_lost_s = forms.all_lost_mtbf_s(job.groups + spares, job.group_failures, job.back_s)
    saved = forms.restart_goodput(_interval_s(job, all_lost_s), job.save_s, all_lost_s, job.return_s)
    return steady * standing * saved * forms.mean_speed(shares, job.groups, spares, speed)


def _restart(job: Job) -> float:
    best_s = checkpoint_interval_s(RESTART, job)
    saved = forms.restart_goodput(best_s, job.save_s, 1.0 / job.failures, job.return_s)
    return saved * job.round_s / (job.round_s + job.link_s)


def checkpoint_interval_s(name: str, job: Job) -> float:
    """Return the best time between checkpoints; with replicas, only the loss of all groups needs one."""
    if name == RESTART:
        return forms.best_interval_s(job.save_s, 1.0 / job.failures, job.return_s)
    all_lost_s = forms.all_lost_mtbf_s(job.groups + _spares(name), job.group_failures, job.back_s)
    return _interval_s(job, all_lost_s)


def _interval_s(job: Job, all_lost_s: float) -> float:
    return min(LONGEST_INTERVAL_S, max(forms.young_s(job.save_s, all_lost_s), job.round_s))


def _spares(name: str) -> int:
    return int(name.split()[1]) if name.startswith("jaxft") else 0


def _break_even(winner: str, loser: str, job: Job) -> BreakEven:
    paid = (job.groups + _spares(winner)) / (job.groups + _spares(loser))

    def lead(days: float, price: float) -> float:
        at = replace(job, mtbf_node_days=days)
        return goodput(winner, at) / price - goodput(loser, at)

    def from_above(price: float) -> float | None:
        """The highest MTBF at which the lead changes hands; infinity if the winner leads from the start."""
        if lead(MOST_MTBF_DAYS, price) > 0.0:
            return math.inf
        rates = (1.0 / MOST_MTBF_DAYS, 1.0 / LEAST_MTBF_DAYS)
        found = forms.crossing(lambda rate: lead(1.0 / rate, price), *rates)
        return None if found is None else 1.0 / found

    return BreakEven(winner, loser, from_above(1.0), from_above(paid))


def _swing(best: str, job: Job, name: str) -> Row:
    less, more = (outcome(best, job.scaled(**{name: 1.0 + by})).cost for by in (-UNCERTAINTY, UNCERTAINTY))
    return {"name": name.replace("_", "-"), "less": less, "more": more}


def _sizes(best: str, job: Job) -> Iterator[Row]:
    """Larger groups compute their larger part of the batch in the same time."""
    for factor in (0.5, 1.0, 2.0):
        groups, devices = job.groups * factor, job.devices_per_group / factor
        if groups >= 2 and groups == int(groups) and devices >= 1 and devices == int(devices):
            found = outcome(best, replace(job, groups=int(groups), devices_per_group=int(devices)))
            yield {"groups": int(groups), "devices": int(devices), "time": found.time, "cost": found.cost}
