"""Closed forms: checkpoint intervals, and the goodput of a job whose machines fail. Pure functions of numbers.

Times are in seconds and rates per second. Failures are independent and come at a constant rate.
"""

import math
from collections.abc import Callable, Sequence

DAY_S = 86400.0
NEGLIGIBLE = 1e-15


def young_s(save_s: float, mtbf_s: float) -> float:
    """Return the best time between checkpoints (Young 1974)."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order interval (2006)."""
    ratio = save_s / (2.0 * mtbf_s)
    if ratio >= 1.0:
        return mtbf_s
    return young_s(save_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_s


def ettr(failures: float, restart_s: float, interval_s: float) -> float:
    """Return the effective training time ratio of Kokolis et al. (2410.21680): first order in the failure rate."""
    return max(0.0, 1.0 - failures * (restart_s + interval_s / 2.0))


def restart_goodput(interval_s: float, save_s: float, mtbf_s: float, return_s: float) -> float:
    """Return the goodput of checkpoint-restart, exactly: restarts may fail, too (Daly's complete model)."""
    cycle, restart = (interval_s + save_s) / mtbf_s, return_s / mtbf_s
    if cycle < 1e-12:
        return interval_s / (interval_s + save_s)
    return 0.0 if cycle + restart > 500.0 else interval_s / mtbf_s / math.exp(restart) / math.expm1(cycle)


def best_interval_s(save_s: float, mtbf_s: float, return_s: float) -> float:
    """Return the interval of the highest goodput, by a ternary search over its logarithm."""

    def value(logarithm: float) -> float:
        return restart_goodput(math.exp(logarithm), save_s, mtbf_s, return_s)

    a, b = math.log(max(save_s, 1.0) / 100.0), math.log(10.0 * mtbf_s)
    for _ in range(100):
        left, right = a + (b - a) / 3.0, b - (b - a) / 3.0
        a, b = (left, b) if value(left) < value(right) else (a, right)
    return math.exp((a + b) / 2.0)


def crossing(value: Callable[[float], float], low: float, high: float) -> float | None:
    """Return where a function that is 0 or less at `low` exceeds 0 first; None if it does not."""
    factor = (high / low) ** (1.0 / 60.0)
    right = next((at for at in (low * factor**number for number in range(61)) if value(at) > 0.0), None)
    if right is None:
        return None
    left = right / factor
    for _ in range(60):
        middle = math.sqrt(left * right)
        left, right = (left, middle) if value(middle) > 0.0 else (middle, right)
    return math.sqrt(left * right)


def away(groups: int, failures: float, return_s: float) -> list[float]:
    """Return the probability that 0, 1, 2, ... of the groups are away.

    Each group fails at the rate `failures` while it runs, and returns after `return_s`: groups alternate
    independently, so the number is binomial.
    """
    share = failures * return_s / (1.0 + failures * return_s)
    if share <= 0.0:
        return [1.0]
    found: list[float] = []
    for number in range(groups + 1):
        choices = math.lgamma(groups + 1) - math.lgamma(number + 1) - math.lgamma(groups - number + 1)
        found.append(math.exp(choices + number * math.log(share) + (groups - number) * math.log1p(-share)))
        if number > groups * share and found[-1] < NEGLIGIBLE:
            break
    return found


def exact_speed(groups: int, present: int, shards_per_group: int) -> float:
    """Return the speed of a step of fixed shards that the present groups divide among themselves."""
    return shards_per_group / -(-groups * shards_per_group // present) if present > 0 else 0.0


def mean_speed(shares: Sequence[float], groups: int, spares: int, speed: Callable[[int], float]) -> float:
    """Return the speed over the distribution of absent groups; spares take the place of lost groups."""
    present = (max(0, min(groups, groups + spares - absent)) for absent in range(len(shares)))
    return sum(share * speed(number) for share, number in zip(shares, present, strict=True))


def all_lost_mtbf_s(groups: int, failures: float, return_s: float) -> float:
    """Return the mean time until all groups are away together, so that only a checkpoint holds the state."""
    load = failures * return_s
    if load <= 0.0:
        return math.inf
    exponent = groups * (math.log1p(load) - math.log(load)) + math.log(return_s / groups)
    return math.inf if exponent > 700.0 else math.exp(exponent)
