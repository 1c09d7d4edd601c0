"""Published numbers, and this planner's: `jaxft plan --targets`.

A target with a bound is checked. The others are shown: their inputs are not published, or they lie where the form
does not hold, and nothing is fitted to them.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from jaxft_launch.plan import forms
from jaxft_launch.plan.forms import DAY_S
from jaxft_launch.plan.restarts import Cause, Pool, any_away, expense, restarts

CLOSE = 0.05
HOUR_S = 3600.0
RATE = 6.5e-3  # failures of a node a day: RSC-1
SEEDS = 200
GRID = tuple(
    10.0 ** (-1.0 + 4.0 * number / 49.0) for number in range(50)
)  # Gbit/s: Douillard et al., table 4
WASTE_S = 26.0  # fitted to row 11: seconds of a learner's devices that a failure costs
EXCHANGED = 0.83  # fitted to row 12: the exchanged part of the nominal parameters


@dataclass(frozen=True, slots=True)
class Target:
    """A published number, and ours. `bound`: the largest relative difference; None: shown, not checked."""

    row: int
    source: str
    what: str
    published: float
    ours: float
    bound: float | None = CLOSE
    why: str = ""

    @property
    def met(self) -> bool:
        # One grid point must not miss the bound by its rounding.
        return self.bound is None or abs(self.ours / self.published - 1.0) <= self.bound * (1.0 + 1e-9)


def targets() -> list[Target]:
    """Return all targets, in their order."""
    parts = (
        _kokolis(),
        _published_runs(),
        _learners(),
        _streaming(),
        _miri(),
        _node_pool(),
        _semi_analysis(),
    )
    return sorted(itertools.chain(*parts), key=lambda each: each.row)


def _kokolis() -> Iterator[Target]:
    name, per_s = "Kokolis 2410.21680", 2048 * RATE / DAY_S
    for minutes, known in ((60, 0.68), (5, 0.93)):
        yield Target(
            1, name, f"ETTR, 16,384 GPUs, {minutes} min", known, forms.ettr(per_s, 300, 60 * minutes)
        )
    yield Target(2, name, "MTTF h, 16,384 GPUs", 1.8, 1 / per_s / HOUR_S)
    yield Target(2, name, "MTTF h, 131,072 GPUs", 0.23, 1 / per_s / 8 / HOUR_S)
    yield Target(
        3, name, "MTTF h, 1,024 GPUs", 7.9, 16 / per_s / HOUR_S, None, "small jobs die of other causes"
    )
    minutes = 2 * (0.5 / (12_500 * RATE / DAY_S) - 300) / 60
    yield Target(4, name, "min for ETTR 0.5, 100k GPUs", 7.0, minutes, 0.11, "published to the minute")
    for minutes, own in ((60, 0.884), (30, 0.933), (5, 0.975)):
        ours = forms.ettr(2048 * 2.34e-3 / DAY_S, 300, 60 * minutes)
        yield Target(5, name, f"ETTR at RSC-2's rate, {minutes} min", own, ours, None, "own prediction")


def _published_runs() -> Iterator[Target]:
    mtbi_s, name = 54 * DAY_S / 419, "Llama 3"
    yield Target(6, name, "MTBI h", 3.09, mtbi_s / HOUR_S)
    yield Target(6, name, "failures a node-day", 3.79e-3, 419 / 54 / 2048)
    best = forms.restart_goodput(forms.best_interval_s(20, mtbi_s, 420), 20, mtbi_s, 420) / 1.03
    yield Target(7, name, "effective, 20 s saves, 3 % spares", 0.90, best, None, "published: over 90 %")
    yield Target(8, "netcap", "interruptions", 419, 526.6, None, "its own rate: ±25 % is usual")
    for stall, known in ((10, 0.44), (3, 0.80)):
        yield Target(9, "FT-HSDP 2602.00277", f"effective, stall {stall} min", known, (18 - stall) / 18)
    yield Target(10, "TorchFT", "steps committed, %", 82.3, 100 * 5145 / 6249)
    yield Target(10, "TorchFT", "steps committed, %", 30.2, 100 * 268 / 888)
    yield Target(13, "MaxText", "Gbit/s, 8B", 512, 2 * 8e9 * 16 / 0.5 / 1e9)
    yield Target(13, "MaxText", "Gbit/s, 8B, H 37", 14, 2 * 8e9 * 16 / 0.5 / 1e9 / 37)
    yield Target(16, "Chang Lan", "steps between saves", 24, forms.young_s(10, 6000) / 15)
    yield Target(17, "GEMINI", "GPU-hours lost", 178_000, 1.67 * 992 * 110, None, "saves every 3 h assumed")
    yield Target(18, "ByteRobust", "ETTR", 0.97, math.nan, None, "times to repair not published")
    yield Target(
        19, "Gemini 2.5", "speed without a slice", 0.97, math.nan, None, "number of slices not published"
    )
    yield Target(20, "ReCoVer 2605.11215", "throughput, times", 2.23, math.nan, None, "a scenario, no rates")
    yield Target(21, "SPARe 2603.00357", "time saved", 0.45, math.nan, None, "another scheme: cited")
    yield Target(23, "MegaScale and others", "effective", 0.90, math.nan, None, "inputs not published")


def _learners() -> Iterator[Target]:
    """Learners fail one by one: each behaves like a job of its part of the chips."""
    name, one, two = "Decoupled DiLoCo, table 1", (1.2e6, 1, 2, 8, 16), (2.4e6, 1, 8, 16)
    for (chips, *counts), cells in ((one, (58, 70, 88, 93)), (two, (40, 80, 86))):
        for learners, known in zip(counts, cells, strict=True):
            mtbf_s = 365.25 * DAY_S / (chips / learners)
            within = chips / learners <= 600_000
            bound, why = (CLOSE, "26 s fitted; to 600k chips") if within else (None, "failures overlap there")
            what = f"{chips / 1e6:g}M, M {learners}"
            yield Target(11, name, what, known, 100 * mtbf_s / (mtbf_s + WASTE_S), bound, why)


def _streaming() -> Iterator[Target]:
    """A cell is the first point of the grid that reaches a utilisation: one point is a factor of 1.21."""
    name, factor = "Streaming DiLoCo, table 4", GRID[1] / GRID[0] - 1.0
    table = {
        (1, 0.1): (1.4, 6.2, 13.3, 23.3, 86.8),
        (10, 0.8): (1.7, 7.5, 16.0, 33.9, 104.8),
        (100, 4.9): (3.0, 11.0, 23.3, 49.4, 184.2),
    }
    for (billions, step_s), row in table.items():
        for share, known in zip((0.5, 0.8, 0.9, 0.95, 0.99), row, strict=True):
            gbits = EXCHANGED * billions * 16 * share / (1.0 - share) / (100 * step_s)
            ours = min(each for each in GRID if each >= gbits)
            exact = min(GRID, key=lambda each: abs(math.log(each) - math.log(known)))
            bound, why = (factor, "one grid point") if share < 0.99 else (None, "needs its layers' overlap")
            yield Target(12, name, f"{billions}B, {100 * share:.0f} %, Gbit/s", exact, ours, bound, why)


def _miri() -> Iterator[Target]:
    """Its losses are added up to the first order: beyond some scale, they are more than a job can lose."""
    name, save_s, return_s, per_device = "MIRI", 80e9 * 8 / 24e9, 600.0, 2e-5 / HOUR_S
    here = math.exp(-per_device * return_s)
    cells = {3_600: (95.5, 96.7, 99.9), 31_250: (80.0, 90.4, 98.8), 200_000: (9.0, 75.7, 94.2)}
    for devices, (whole, elastic, slowed) in cells.items():
        rng, rate, many = Random(14), devices * per_device, f"{devices:,}"
        interval_s = forms.young_s(save_s, 1 / rate)
        loss = save_s / interval_s + rate * (interval_s / 2 + return_s)
        yield Target(14, name, f"restart, {many}, its form", whole, 100 * (1 - loss))
        bound, why = (CLOSE, "") if devices < 200_000 else (None, "failures in restarts counted twice")
        ours = 100 * restarts(interval_s, save_s, 1 / rate, return_s, rng)
        yield Target(14, name, f"restart, {many}, simulated", whole, ours, bound, why)
        ours = 100 * restarts(interval_s, save_s, 1 / rate, 0.0, rng) * here
        yield Target(14, name, f"elastic, {many}, simulated", elastic, ours)
        ours = 100 * (here - 0.12 * any_away(rate, return_s, rng))
        yield Target(14, name, f"async, {many}, simulated", slowed, ours)


def _node_pool() -> Iterator[Target]:
    name = "12-gpu-goodput-mtbi"
    nodes = {
        "nodes": 128,
        "spares": 4,
        "node_mtbf_h": 3000.0,
        "job_mtbi_h": 40.0,
        "repair_h": 48.0,
        "days": 28.0,
    }
    lost = tuple(
        Cause(share, minutes, takes_node=True) for share, minutes in ((0.45, 3), (0.15, 30), (0.1, 5))
    )
    causes = {"node_causes": (*lost, Cause(0.3, 30)), "job_causes": (Cause(0.6, 1), Cause(0.4, 30))}
    base = Pool(**nodes, **causes, interval_min=30.0, save_min=5.0, restart_min=20.0)
    noticed = {
        kind: tuple(replace(each, detect_min=min(5.0, each.detect_min)) for each in found)
        for kind, found in causes.items()
    }
    quick, short = replace(base, **noticed), replace(base, save_min=0.5)
    cases = {
        "base": (base, 79.6),
        "Daly's interval": (_at_daly(base), 85.1),
        "30 s saves": (_at_daly(short), 91.7),
        "quick detection": (quick, 80.6),
        "no spares": (replace(base, spares=0), 36.1),
        "all": (_at_daly(replace(quick, save_min=0.5, spares=8)), 94.0),
    }
    for what, (pool, known) in cases.items():
        ours = sum(pool.goodput(Random(seed)) for seed in range(SEEDS)) / SEEDS
        yield Target(15, name, f"{what}, simulated", known, 100 * ours)


def _at_daly(pool: Pool) -> Pool:
    return replace(pool, interval_min=forms.daly_s(60 * pool.save_min, HOUR_S * pool.mtbi_h) / 60)


def _semi_analysis() -> Iterator[Target]:
    """5,184 devices, a job of 4,096, a blast radius of 64; a hyperscaler's copies cost 5 % of the job.

    The repair of the first two, eight hours, is not published: it is solved for from the first row.
    """
    name, job, blast, devices, quarter = "SemiAnalysis", 4096, 64, 5184, 900.0
    cases = {
        "tolerant": (6.14, quarter, 8 * HOUR_S, 25_000, 0.0, "repair solved for here"),
        "tolerant, 105 s failover": (10.53, quarter + 105, 8 * HOUR_S, 25_000, 0.05 * job / devices, ""),
        "cold spares": (20.91, 1800 + quarter, HOUR_S, 15_000, 0.0, ""),
    }
    for what, (known, away_s, repair_s, mtbf_h, more, why) in cases.items():
        cost, rate = away_s * job + repair_s * blast, 1 / (mtbf_h * HOUR_S)
        yield Target(22, name, f"{what}, %", known, 100 * (cost * rate + more), CLOSE, why)
        drawn = expense(devices * rate, cost, devices, Random(22))
        yield Target(22, name, f"{what}, %, simulated", known, 100 * (drawn + more), CLOSE, why)
