"""How many modules the training thread visits in a steady step of a job."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxft
from tests import patience
from tests.clusters import cluster

MOST = 45
STEPS = 12


def train_step(weights: Any, batch: Any) -> Any:
    return weights - jaxft.pmean(batch) / 4, {"batch": jnp.sum(batch)}


def batch_for(step: int, shard: int) -> Any:
    return np.full(3, step + shard, np.float32)


def visited_in(call: Callable[[], Any]) -> tuple[Any, set[str]]:
    """The result of a call, and the modules of jaxft whose functions it has called in this thread."""
    found: set[str] = set()

    def note(frame: Any, _event: str, _argument: Any) -> None:
        found.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, {name for name in found if name.startswith("jaxft")}


def test_a_steady_step_visits_few_modules(tmp_path: Path) -> None:
    def group(name: str) -> set[str]:
        with jaxft.Manager(f"localhost:{here.port}", group=name, min_replicas=2) as manager:
            step = jaxft.fault_tolerant(train_step, manager, shards=2)
            weights = step.join(jnp.zeros(3), batch_for)
            visited: set[str] = set()
            for _ in manager.steps(STEPS):
                (weights, _), visited = visited_in(lambda: step(weights, batch_for))  # noqa: B023
                assert len(manager.report.members) == 2
            return visited

    with cluster(tmp_path) as here, ThreadPoolExecutor(2) as pool:
        here.start_coordinator()
        groups = [pool.submit(group, name) for name in ("first", "second")]
        for visited in (patience.call(each.result) for each in groups):
            assert "jaxft._exchange._links" in visited
            assert len(visited) <= MOST, " ".join(sorted(visited))
