"""Closed forms: checkpoint intervals, and the goodput of a job whose machines fail. Pure functions of numbers.

Times are in seconds and rates per second. Failures are independent and come at a constant rate.
"""

import itertools
import math
from collections.abc import Callable, Sequence

DAY_S = 86400.0
_NEGLIGIBLE = 1e-15


def young_s(save_s: float, mtbf_s: float) -> float:
    """Return the best time between checkpoints (Young 1974)."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order interval (2006)."""
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2.0 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_s


def ettr(failures: float, restart_s: float, interval_s: float, save_s: float = 0.0) -> float:
    """Return the effective training time ratio of Kokolis et al. (2410.21680): first order in the failure rate."""
    return max(0.0, 1.0 - failures * (restart_s + interval_s / 2.0)) / (1.0 + save_s / interval_s)


def restart_goodput(interval_s: float, save_s: float, mtbf_s: float, return_s: float) -> float:
    """Return the goodput of checkpoint-restart, exactly: restarts may fail, too (Daly's complete model)."""
    exponent = (interval_s + save_s) / mtbf_s
    if exponent > 500.0 or return_s / mtbf_s > 500.0:
        return 0.0
    return interval_s / (mtbf_s * math.exp(return_s / mtbf_s) * math.expm1(exponent))


def best_interval_s(save_s: float, mtbf_s: float, return_s: float) -> float:
    """Return the interval of the highest goodput; 0 if saving is free."""
    if save_s <= 0.0:
        return 0.0
    return highest(
        lambda each: restart_goodput(each, save_s, mtbf_s, return_s), save_s / 100.0, 10.0 * mtbf_s
    )


def highest(value: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one maximum is highest: a ternary search over logarithms."""
    a, b = math.log(low), math.log(high)
    for _ in range(100):
        left, right = a + (b - a) / 3.0, b - (b - a) / 3.0
        if value(math.exp(left)) < value(math.exp(right)):
            a = left
        else:
            b = right
    return math.exp((a + b) / 2.0)


def crossing(value: Callable[[float], float], low: float, high: float) -> float | None:
    """Return where a function changes its sign first, from `low` on; None if it does not."""
    points = [low * (high / low) ** (number / 60.0) for number in range(61)]
    for left, right in itertools.pairwise(points):
        if value(left) * value(right) <= 0.0 and value(left) != value(right):
            return _bisect(value, left, right)
    return None


def _bisect(value: Callable[[float], float], left: float, right: float) -> float:
    sign = value(left)
    for _ in range(60):
        middle = math.sqrt(left * right)
        if (value(middle) > 0.0) == (sign > 0.0):
            left = middle
        else:
            right = middle
    return math.sqrt(left * right)


def away(groups: int, failures: float, return_s: float) -> list[float]:
    """Return the probability that 0, 1, 2, ... of the groups are away.

    Each group fails at the rate `failures` while it runs, and returns after `return_s`: groups alternate
    independently, so the number is binomial.
    """
    share = failures * return_s / (1.0 + failures * return_s)
    found: list[float] = []
    for number in range(groups + 1):
        found.append(math.exp(_log_binomial(groups, number, share)))
        if number > groups * share and found[-1] < _NEGLIGIBLE:
            break
    return found


def _log_binomial(groups: int, number: int, share: float) -> float:
    if share <= 0.0 or share >= 1.0:
        return 0.0 if number == (groups if share >= 1.0 else 0) else -math.inf
    choices = math.lgamma(groups + 1) - math.lgamma(number + 1) - math.lgamma(groups - number + 1)
    return choices + number * math.log(share) + (groups - number) * math.log1p(-share)


def exact_speed(groups: int, present: int, shards_per_group: int) -> float:
    """Return the speed of a step of fixed shards that the present groups divide among themselves."""
    if present <= 0:
        return 0.0
    most = -(-groups * shards_per_group // present)
    return shards_per_group / most


def mean_speed(shares: Sequence[float], groups: int, spares: int, speed: Callable[[int], float]) -> float:
    """Return the speed over the distribution of absent groups; spares take the place of lost groups."""
    return sum(
        share * speed(max(0, min(groups, groups + spares - absent))) for absent, share in enumerate(shares)
    )


def all_lost_mtbf_s(groups: int, failures: float, return_s: float) -> float:
    """Return the mean time until all groups are away together, so that only a checkpoint holds the state."""
    load = failures * return_s
    if load <= 0.0:
        return math.inf
    exponent = groups * (math.log1p(load) - math.log(load)) + math.log(return_s / groups)
    return math.inf if exponent > 700.0 else math.exp(exponent)


def tolerant_expense(job: float, blast: float, away_s: float, repair_s: float, mtbf_s: float) -> float:
    """Return the share of a cluster that failures cost: the whole job for `away_s`, its lost part until repaired.

    `mtbf_s` is one device's: the cluster's failures, divided by its devices (SemiAnalysis, April 2026).
    """
    return (away_s * job + repair_s * blast) / mtbf_s
