"""A group trains on with what `restore` has returned."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from tests import patience
from tests.clusters import Cluster, cluster

pytestmark = pytest.mark.processes


def train_step(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    return {"w": state["w"] + jaxft.pmean(batch), "m": state["m"] * 0.5, "rate": state["rate"]}, {}


def batch_for(_step: int, _shard: int) -> np.ndarray:
    return np.ones(3, np.float32)


def fresh() -> dict[str, Any]:
    return {"w": jnp.zeros(3), "m": jnp.ones(3), "rate": 0.5}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        made.start_coordinator()
        yield made


def job(here: Cluster, name: str) -> jaxft.Manager:
    checkpoints = jaxft.Checkpoints(here.folder / "checkpoints", every_steps=2)
    return jaxft.Manager(
        f"localhost:{here.port}", group="group-0", job=name, checkpoints=checkpoints, failure_timeout_s=60.0
    )


def train(here: Cluster, name: str, pick: Callable[[Any, Any], Any], total: int) -> Any:
    with job(here, name) as manager:
        step = jaxft.fault_tolerant(train_step, manager, shards=2)
        before = fresh()
        state = step.join(pick(before, manager.restore(before, changed={"job"})), batch_for)
        for _ in step.steps(total):
            state, _ = step(state, batch_for)
        return state


def test_the_state_from_before_is_refused_and_any_other_is_taken(here: Cluster) -> None:
    train(here, "first", lambda _before, restored: restored, 2)
    with job(here, "second") as manager:
        step = jaxft.fault_tolerant(train_step, manager, shards=2)
        before = fresh()
        restored = manager.restore(before, changed={"job"})
        for _ in range(2):  # also if the call is made again
            with pytest.raises(jaxft.ConfigurationError, match=r"was consumed by .*`manager\.restore`"):
                step.join(before, batch_for)
        assert step.join(restored, batch_for)["w"].tolist() == [2.0] * 3
    assert train(here, "third", lambda _before, restored: restored, 3)["w"].tolist() == [3.0] * 3
    mixed = train(here, "fourth", lambda _before, restored: {**restored, "m": fresh()["m"]}, 4)
    assert (mixed["w"].tolist(), mixed["m"].tolist()) == ([4.0] * 3, [0.5] * 3)


def test_a_program_that_does_not_configure_logging_sees_warnings() -> None:
    program = "import jaxft, logging; logging.getLogger('jaxft').warning('all shards draw the same')"
    done = patience.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert done.stderr == "all shards draw the same\n"
