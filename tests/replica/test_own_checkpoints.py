"""A job continues from states that the user's own code has saved, with the history that it has saved with them."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from tests.clusters import cluster

# A job waits as long for a group that holds its state, and a group for a donor.
TIMEOUT = ("--heartbeat-timeout-ms", "600")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("coordinator")) as here:
        here.start_coordinator(*TIMEOUT)
        yield f"localhost:{here.port}"


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    return state * 1.5 + jaxft.pmean(batch), {}


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.full(3, step + shard, np.float32)


def undisturbed(steps: int) -> np.ndarray:
    step, state = jaxft.fault_tolerant(train_step, None, shards=2), jnp.ones(3)
    for _ in range(steps):
        state, _ = step(state, batch_for)
    return np.asarray(state)


def train(manager: jaxft.Manager, state: np.ndarray, steps: int) -> tuple[np.ndarray, int]:
    """Up to the step `steps`, then fail; return the state at its beginning, and its history."""
    held = jnp.asarray(state)
    with contextlib.suppress(KeyError), manager:
        step = jaxft.fault_tolerant(train_step, manager, shards=2)
        held = step.join(held, batch_for)
        for _ in manager.steps(steps):
            held, _ = step(held, batch_for)
        raise KeyError
    assert manager.step == steps
    return np.asarray(held), manager.history


def join(manager: jaxft.Manager, state: np.ndarray) -> None:
    with manager:
        jaxft.fault_tolerant(train_step, manager, shards=2).join(jnp.asarray(state), batch_for)


def test_a_job_of_which_all_have_died_goes_on(
    coordinator: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    job = request.node.name
    fresh = np.ones(3, np.float32)
    assert jaxft.Manager(coordinator, group="a", job=job).history == 0
    saved, history = train(jaxft.Manager(coordinator, group="a", job=job), fresh, 3)
    assert 0 < history < 1 << 64
    train(jaxft.Manager(coordinator, group="a", job=job, step=3, history=history), saved, 5)
    # Back from the older one: two steps are done again.
    back = jaxft.Manager(coordinator, group="b", job=job, step=3, history=history)
    assert back.history == history
    state, same = train(back, saved, 6)
    assert same == history
    np.testing.assert_array_equal(state, undisturbed(6))
    assert "no history" not in caplog.text


def test_without_the_history_it_does_not_and_the_log_says_why(
    coordinator: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    job = request.node.name
    saved, _ = train(jaxft.Manager(coordinator, group="a", job=job), np.ones(3, np.float32), 3)
    manager = jaxft.Manager(coordinator, group="a", job=job, step=3, failure_timeout_s=2.0)
    with caplog.at_level(logging.WARNING, "jaxft"), pytest.raises(jaxft.CannotHeal):
        join(manager, saved)
    assert "was given step=3 and no history" in caplog.text
    assert "has committed 3 steps" in caplog.text


def test_that_of_another_run_is_refused(coordinator: str, request: pytest.FixtureRequest) -> None:
    job = request.node.name
    saved, history = train(jaxft.Manager(coordinator, group="a", job=job), np.ones(3, np.float32), 3)
    manager = jaxft.Manager(coordinator, group="a", job=job, step=3, history=history ^ 1)
    with pytest.raises(jaxft.JoinRefused, match="of another history of job"):
        join(manager, saved)
