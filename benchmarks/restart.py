"""Restart of one group: from the start of its process to its first contribution, and where the time goes.

Cold, and with JAX's compilation cache, then also a group of two processes. TorchFT compiles nothing here.
"""

import itertools
import time
from dataclasses import dataclass, replace

from benchmarks._job import STEADY, Event, Job, Ours, Shape, Side, cached, of_peer, torchft
from benchmarks._result import Row, times

PARTS = ("interpreter", "imports", "first state", "greeting", "compile and plan", "heal", "join", "in all")


@dataclass(frozen=True)
class Options:
    """Kill a group, restart it, and measure how long that takes."""

    step_ms: float = 100.0
    """A step, in milliseconds of a device."""
    megabytes: float = 21.0
    """Gradients, in MiB; the state is three times as large."""
    groups: int = 3
    """Groups of the job."""
    restarts: int = 5
    """Restarts of each kind."""
    warm_ups: int = 1
    """Restarts in each case that are done first and not counted."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    shape = Shape(options.step_ms, options.megabytes, groups=options.groups, moments=True)
    with cached() as side:
        warm = measure(side, shape, options)
        two = measure(side, replace(shape, ranks=2), options)
    cold = measure(Ours(), shape, options)
    peer = of_peer(torchft(STEADY), lambda side: measure(side, shape, options)) or {}
    rows: list[Row] = []
    for kind, found in (("cold", cold), ("with the cache", warm)):
        rows += [Row.of(f"{kind}: {part}", "ms", found[part], peer=peer.get(part, [])) for part in PARTS]
    for part in PARTS:
        note = times(two[part], warm[part], "one process")
        rows.append(Row.of(f"with the cache, 2 processes: {part}", "ms", two[part], note=note))
    return rows, [
        "join: from the state in place to the first committed contribution, which includes at least a whole step.",
        "TorchFT heals within its first step, so its join includes the heal.",
    ]


def measure(side: Side, shape: Shape, options: Options) -> dict[str, list[float]]:
    """Milliseconds of each part."""
    found: dict[str, list[float]] = {}
    with Job(side, shape, forked=False) as job:
        job.start()
        for number in range(options.warm_ups + options.restarts):
            parts = _restart(job, job.names[number % shape.groups])
            if number >= options.warm_ups:
                for part, took_ms in parts.items():
                    found.setdefault(part, []).append(took_ms)
        job.finish()
    return found


def _restart(job: Job, name: str) -> dict[str, float]:
    killed_s = job.kill(name)
    for group in job.groups.values():
        group.commit(lambda step: step["members"] < job.shape.groups, killed_s)
    began_s = time.monotonic()
    job.launch(name)
    group = job.enter(name)
    at_s = {name: group.event(name)["at_s"] for name in ("interpreter", "imports", "made", "entered")}
    heal: Event | None = None
    plan_s = at_s["entered"]
    while True:
        event = group.until(lambda event: event["event"] in ("plan", "commit"))
        if event["event"] == "plan":
            plan_s = event["at_s"]
        elif heal is None and event.get("heal") is not None:
            heal = event
        if event.get("shards"):
            break
    healed_s = plan_s + (0.0 if heal is None else heal["heal"]["seconds"])
    moments_s = (began_s, *at_s.values(), plan_s, healed_s, event["at_s"])
    spans = [(end - begin) * 1e3 for begin, end in itertools.pairwise(moments_s)]
    parts: dict[str, float] = dict(zip(PARTS, (*spans, (event["at_s"] - began_s) * 1e3), strict=True))
    return parts if heal is not None else {part: took for part, took in parts.items() if took > 0}
