"""Running many seeds, and making a short story of a seed that fails."""

import contextlib
import gc
import logging
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .classes import focused
from .truth import Violation
from .world import World


@dataclass(frozen=True, slots=True)
class Finding:
    seed: int
    invariant: str
    text: str


@dataclass(slots=True)
class Tally:
    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    sometimes: Counter[str] = field(default_factory=Counter[str])
    findings: list[Finding] = field(default_factory=list[Finding])

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.simulated_s += other.simulated_s
        self.sometimes.update(other.sometimes)
        self.findings += other.findings


def attempt(world: World) -> Finding | None:
    """Run `world`; return the finding, or None if all ended well."""
    try:
        world.run()
    except Violation as violation:
        return Finding(world.seed, violation.invariant, violation.text)
    except Exception as error:  # whatever a core raises is a finding
        return Finding(world.seed, "the cores raise nothing", f"{type(error).__name__}: {error}")
    return None


def run_seeds(
    seeds: Iterable[int],
    *,
    kinds: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    stop_at_first: bool = False,
) -> Tally:
    """Run each seed; with `kinds`, with faults of these kinds alone; with `changes` to its setting."""
    tally = Tally()
    with _quiet_coordinator(), _rare_collections():
        for seed in seeds:
            setting = focused(seed, kinds, changes or {}) if kinds or changes else None
            world = World(seed, setting=setting)
            finding = attempt(world)
            findings = [] if finding is None else [finding]
            tally.add(Tally(1, world.events, world.now_s, world.sometimes, findings))
            if finding is not None and stop_at_first:
                break
    return tally


@contextlib.contextmanager
def _quiet_coordinator() -> Iterator[None]:
    """Drop the logs of the simulated coordinators, whose faults the simulation makes itself."""
    logger = logging.getLogger("jaxft_coordinator")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cycles, which worlds are, less often than by default: a run is a sixth faster."""
    if platform.python_implementation() != "CPython":  # PyPy's collector has no such thresholds
        yield
        return
    threshold = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)


def minimised(finding: Finding) -> frozenset[int]:
    """Return the faults that can be left out of the seed so that it still fails by the same invariant."""
    indices = [fault.index for fault in World(finding.seed).setting.faults]
    without: frozenset[int] = frozenset()
    size = max(1, len(indices) // 2)
    while indices:
        kept: list[int] = []
        for start in range(0, len(indices), size):
            some = indices[start : start + size]
            found = attempt(World(finding.seed, without=without | set(some)))
            if found is not None and found.invariant == finding.invariant:
                without |= set(some)
            else:
                kept += some
        if size == 1 and len(kept) == len(indices):
            break
        indices, size = kept, max(1, size // 2)
    return without


def trace_of(seed: int, without: frozenset[int] = frozenset()) -> list[str]:
    """Run the seed once more, with its trace: the setting, the events, and the finding."""
    world = World(seed, without=without, tracing=True)
    finding = attempt(world)
    end = "all ended well" if finding is None else f"FOUND: {finding.invariant}: {finding.text}"
    left_out = f", without the faults {sorted(without)}" if without else ""
    setting = {name: getattr(world.setting, name) for name in world.setting.__slots__ if name != "faults"}
    words = ", ".join(f"{name}={value!r}" for name, value in setting.items())
    return [f"seed {seed}{left_out}: {words}", *world.trace, end]


def story(finding: Finding, lines: int = 60) -> str:
    """The end of the minimised trace, and how to see all of it."""
    without = minimised(finding)
    trace = trace_of(finding.seed, without)
    left_out = f" --without {','.join(map(str, sorted(without)))}" if without else ""
    return "\n".join(
        [
            f"seed {finding.seed}: {finding.invariant}: {finding.text}",
            f"(all of it: python -m tests.simulation --trace {finding.seed}{left_out})",
            trace[0],
            *trace[1:][-lines:],
        ]
    )
