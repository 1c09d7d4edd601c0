"""Discrete-event simulations of jobs that restart from checkpoints: failures one by one, on a virtual clock.

They check the closed forms, and reproduce published ones: `targets.py`.
"""

import heapq
import math
from dataclasses import dataclass
from random import Random

HOUR_S = 3600.0


def restarts(interval_s: float, save_s: float, mtbf_s: float, return_s: float, rng: Random) -> float:
    """Return the goodput over 2,000 failures of a job that restarts from its last checkpoint."""
    useful_s = total_s = 0.0
    for _ in range(2000):
        up_s = rng.expovariate(1.0 / mtbf_s)
        useful_s += interval_s * int(up_s / (interval_s + save_s))
        total_s += up_s + return_s
    return useful_s / total_s


def any_away(failures: float, return_s: float, rng: Random) -> float:
    """Return the share of time in which a part is away, over 20,000 failures."""
    now_s = back_s = away_s = 0.0
    for _ in range(20_000):
        now_s += rng.expovariate(failures)
        away_s += now_s + return_s - max(now_s, back_s)
        back_s = now_s + return_s
    return away_s / now_s


def expense(failures: float, cost: float, devices: float, rng: Random) -> float:
    """Return the share of a cluster's device time that 20,000 failures cost, each `cost` device-seconds."""
    total_s = sum(rng.expovariate(failures) for _ in range(20_000))
    return 20_000 * cost / (total_s * devices)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a job is interrupted: its share, the minutes until that is noticed, and whether it takes the node."""

    share: float
    detect_min: float
    takes_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A job on a pool of nodes, some of them spares; nodes in repair come back."""

    nodes: int
    spares: int
    node_mtbf_h: float
    job_mtbi_h: float
    node_causes: tuple[Cause, ...]
    job_causes: tuple[Cause, ...]
    interval_min: float
    save_min: float
    restart_min: float
    repair_h: float
    days: float

    @property
    def mtbi_h(self) -> float:
        return 1.0 / (self.nodes / self.node_mtbf_h + 1.0 / self.job_mtbi_h)

    def goodput(self, rng: Random) -> float:
        """Return the share of one run's time that advanced the training."""
        horizon_h, cycle_h = 24.0 * self.days, (self.interval_min + self.save_min) / 60.0
        spares, repaired_h = self.spares, list[float]()
        by_node = self.nodes / self.node_mtbf_h * self.mtbi_h
        now_h = useful_h = 0.0
        while True:
            up_h = rng.expovariate(1.0 / self.mtbi_h)
            cycles = math.floor(min(up_h, horizon_h - now_h) / cycle_h)
            useful_h += cycles * self.interval_min / 60.0
            if now_h + up_h >= horizon_h:  # unsaved work counts at the end
                rest_h = horizon_h - now_h - cycles * cycle_h
                return (useful_h + min(rest_h, self.interval_min / 60.0)) / horizon_h
            causes = self.node_causes if rng.random() < by_node else self.job_causes
            cause = rng.choices(causes, [each.share for each in causes])[0]
            now_h += up_h + cause.detect_min / 60.0
            if cause.takes_node:
                heapq.heappush(repaired_h, now_h + rng.expovariate(1.0 / self.repair_h))
                while repaired_h and repaired_h[0] <= now_h:
                    heapq.heappop(repaired_h)
                    spares += 1
                if not spares:
                    now_h, spares = heapq.heappop(repaired_h), 1
                spares -= 1
            now_h += self.restart_min / 60.0
            if now_h >= horizon_h:
                return useful_h / horizon_h
