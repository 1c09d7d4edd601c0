"""`jax.transfer_guard("disallow")` around a loop, as programs look for transfers that they did not mean."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from tests import patience
from tests.clusters import cluster

STEPS = 8


def train_step(weights: Any, batch: Any) -> Any:
    return weights - jaxft.pmean(batch) / 4, {"batch": jnp.sum(batch)}


def batch_for(step: int, shard: int) -> Any:
    return np.full(3, step + shard, np.float32)


def trained(manager: jaxft.Manager | None, weights: Any, until: Any = lambda _number: None) -> str:
    step = jaxft.fault_tolerant(train_step, manager, shards=2)
    with jax.transfer_guard("disallow"):
        weights = step.join(weights, batch_for)
        for number in step.steps(STEPS):
            until(number)
            weights = step.edit(weights, lambda weights: -weights)
            weights, _ = step(weights, batch_for)
        return jaxft.digest(weights)


def test_what_a_program_forbids_itself_is_still_forbidden() -> None:
    with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
        jnp.sin(np.ones(3))


def test_a_job_and_a_joiner_move_what_they_must(tmp_path: Path) -> None:
    alone = trained(None, jnp.zeros(3))

    def group(name: str, until: Any = lambda _number: None) -> str:
        with jaxft.Manager(f"localhost:{here.port}", group=name) as manager:
            return trained(manager, jnp.zeros(3), until)

    with cluster(tmp_path) as here, ThreadPoolExecutor(2) as pool:
        here.start_coordinator()

        def second_heals(number: int) -> None:
            if number == 3:
                joins.append(pool.submit(group, "second"))
                here.until(lambda: "second heals to step 3" in here.coordinator_log.read_text(), "a joiner")

        joins: list[Any] = []
        first = pool.submit(group, "first", second_heals)
        assert patience.call(first.result) == alone
        assert patience.call(joins[0].result) == alone
