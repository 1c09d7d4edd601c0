"""A source that ends finishes the job: at the same step in all groups, with the same state, and with status 0."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.data import Prefetch, from_iterator
from tests import patience
from tests.clusters import cluster

pytestmark = pytest.mark.processes
LENGTHS = (9, 6, 7)  # of the shards


def make(shard: int) -> Iterator[np.ndarray]:
    return (np.full(3, step + shard, np.float32) for step in range(LENGTHS[shard]))


def train_step(w: Any, batch: Any) -> Any:
    return 0.5 * w - jaxft.pmean(batch), {}


def trained(manager: jaxft.Manager | None, *, catches: bool) -> tuple[int, Any]:
    step = jaxft.fault_tolerant(train_step, manager, shards=3)
    batches: Any = Prefetch(from_iterator(make, 3))
    state = step.join(jnp.zeros(3), batches)
    try:
        for _ in step.steps(None):
            state, _ = step(state, batches)
    except jaxft.JobFinished:
        if not catches:
            raise
    return step.step, np.asarray(step.join(state, batches) if catches else state)


@pytest.mark.parametrize("min_replicas", [1, 2])
def test_all_groups_end_at_the_step_that_the_first_shard_lacks(min_replicas: int, tmp_path: Path) -> None:
    alone = trained(None, catches=True)
    assert alone[0] == min(LENGTHS)
    ended: dict[str, Any] = {}
    present = threading.Barrier(2)

    def group(name: str, *, catches: bool) -> None:
        checkpoints = jaxft.Checkpoints(tmp_path / "saved")
        manager = jaxft.Manager(
            address, group=name, checkpoints=checkpoints, min_replicas=min_replicas, failure_timeout_s=600.0
        )
        try:
            with manager:
                present.wait(patience.FAR_S)
                ended[name] = trained(manager, catches=catches)
        except jaxft.JobFinished as error:
            ended[name] = error.code

    with cluster(tmp_path) as here:
        here.start_coordinator()
        address = f"localhost:{here.port}"
        threads = [
            threading.Thread(
                target=group, args=("group-0",), kwargs={"catches": min_replicas == 1}, daemon=True
            ),
            threading.Thread(target=group, args=("group-1",), kwargs={"catches": False}, daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            patience.join(thread)
        assert "finished at step 6" in here.coordinator_log.read_text()
    assert ended["group-1"] == 0
    if min_replicas == 1:
        assert ended["group-0"][0] == alone[0]
        np.testing.assert_array_equal(ended["group-0"][1], alone[1])
    saved = jaxft.Checkpoints(tmp_path / "saved").restore(jnp.zeros(3), job="default")
    assert saved is not None
    assert saved.step == alone[0]
    np.testing.assert_array_equal(saved.state, alone[1])
