"""Discrete-event simulations of jobs that restart from checkpoints: they check closed forms, and published ones."""

import heapq
import math
from dataclasses import dataclass
from random import Random

FAILURES = 20_000


def restarts(interval_s: float, save_s: float, mtbf_s: float, return_s: float, rng: Random) -> float:
    """Return the goodput of a job that restarts from its last checkpoint."""
    ups_s = [rng.expovariate(1.0 / mtbf_s) for _ in range(FAILURES // 10)]
    useful_s = interval_s * sum(int(up_s / (interval_s + save_s)) for up_s in ups_s)
    return useful_s / (sum(ups_s) + len(ups_s) * return_s)


def any_away(failures: float, return_s: float, rng: Random) -> float:
    """Return the share of time in which a part is away."""
    now_s = back_s = away_s = 0.0
    for _ in range(FAILURES):
        now_s += rng.expovariate(failures)
        away_s += now_s + return_s - max(now_s, back_s)
        back_s = now_s + return_s
    return away_s / now_s


def expense(failures: float, cost: float, devices: float, rng: Random) -> float:
    """Return the share of a cluster's device time that failures take, each `cost` device-seconds."""
    return FAILURES * cost / (sum(rng.expovariate(failures) for _ in range(FAILURES)) * devices)


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
        """Return the share of one run's time that advanced the training; unsaved work counts at the end."""
        end_h, interval_h = 24.0 * self.days, self.interval_min / 60.0
        cycle_h, by_node = interval_h + self.save_min / 60.0, self.nodes / self.node_mtbf_h * self.mtbi_h
        spares, repaired_h = self.spares, list[float]()
        now_h = useful_h = 0.0
        while now_h < end_h:
            up_h = rng.expovariate(1.0 / self.mtbi_h)
            cycles = math.floor(min(up_h, end_h - now_h) / cycle_h)
            useful_h += cycles * interval_h
            if now_h + up_h >= end_h:
                return (useful_h + min(end_h - now_h - cycles * cycle_h, interval_h)) / end_h
            causes = self.node_causes if rng.random() < by_node else self.job_causes
            cause = rng.choices(causes, [each.share for each in causes])[0]
            now_h += up_h + cause.detect_min / 60.0
            if cause.takes_node:
                heapq.heappush(repaired_h, now_h + rng.expovariate(1.0 / self.repair_h))
                while repaired_h and (repaired_h[0] <= now_h or spares == 0):
                    now_h, spares = max(now_h, heapq.heappop(repaired_h)), spares + 1
                spares -= 1
            now_h += self.restart_min / 60.0
        return useful_h / end_h
