"""The diff of the README: twelve lines, and both sides of it run as they stand there."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from tests.clusters import cluster

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
DIFF = re.search(r"## Twelve lines in your loop\n\n```diff\n(.*?)```", TEXT, re.DOTALL)
STEPS = 6


class State(NamedTuple):
    params: Any
    opt_state: Any


def loss_fn(params: jax.Array, batch: np.ndarray) -> jax.Array:
    return jnp.mean((batch @ params - 1.0) ** 2)


DATASET = [
    np.random.default_rng(index).standard_normal((4, 3), dtype=np.float32) for index in range(4 * STEPS)
]


def lines() -> list[str]:
    assert DIFF is not None
    return DIFF[1].splitlines()


def ran(signs: str, **own: Any) -> dict[str, Any]:
    """Run one side of the diff: the lines that begin with these signs."""
    import optax

    optimizer, params = optax.sgd(0.1), jnp.zeros(3)
    names = {
        "optimizer": optimizer,
        "loss_fn": loss_fn,
        "State": State,
        "state": State(params, optimizer.init(params)),
        "total_steps": STEPS,
        **own,
    }
    program = "\n".join(line[1:] for line in lines() if not line or line[0] in signs)
    exec(compile(program, "README.md", "exec"), names)
    return names


def test_twelve_lines_change() -> None:
    assert len([line for line in lines() if line.startswith(("+", "-"))]) == 12


def test_the_loop_runs_as_before_and_as_after(tmp_path: Path) -> None:
    whole = (np.concatenate(DATASET[4 * step : 4 * step + 4]) for step in range(STEPS))
    before = ran(" -", batches=whole)
    with cluster(tmp_path) as here:
        here.start_coordinator()
        address = f"localhost:{here.port}"
        assert sum("coordinator:29510" in line for line in lines()) == 1

        class Manager(jaxft.Manager):
            def __init__(self, coordinator: str, **arguments: Any) -> None:
                assert coordinator == "coordinator:29510"
                super().__init__(address, failure_timeout_s=600.0, **arguments)

        own, jaxft.Manager = jaxft.Manager, Manager
        try:
            after = ran(" +", dataset=DATASET)
        finally:
            jaxft.Manager = own
    assert after["manager"].step == STEPS
    np.testing.assert_allclose(after["state"].params, before["state"].params, rtol=1e-5)
    np.testing.assert_allclose(after["metrics"]["loss"], before["metrics"]["loss"], rtol=1e-5)
