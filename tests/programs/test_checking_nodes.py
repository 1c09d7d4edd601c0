"""Pytrees with nodes whose constructors look at their leaves: what `jax.jit` takes is taken."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_models import bits

import jaxft
from jaxft._checkpoints import Checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scale:
    """As in jmp: computes with its leaves when it is made, so that nothing but arrays and tracers will do."""

    value: jax.Array
    count: jax.Array

    def __post_init__(self) -> None:
        assert isinstance(self.value, jax.Array)
        assert isinstance(self.count, jax.Array)
        assert self.value.shape == self.count.shape == ()


class Pair:
    """Registered without names for its leaves, and its own checks."""

    def __init__(self, high: Any, low: Any) -> None:
        if not isinstance(high, jax.Array) or high.dtype != jnp.float32:
            raise TypeError(f"high is {high!r}")
        self.high, self.low = high, low


jax.tree_util.register_pytree_node(
    Pair, lambda pair: ((pair.high, pair.low), None), lambda _, leaves: Pair(*leaves)
)


def fresh() -> dict[str, Any]:
    return {
        "scale": Scale(jnp.float32(8), jnp.zeros((), jnp.int32)),
        "pairs": [Pair(jnp.ones(3), jnp.zeros(3)), (Pair(jnp.ones(()), None), None)],
        "n": jnp.zeros((), jnp.int32),
    }


def train_step(state: dict[str, Any], batch: Any) -> Any:
    pair, rest = state["pairs"]
    grads = jaxft.pmean(pair.high * jnp.mean(batch["x"].high) * state["scale"].value)
    scale = Scale(state["scale"].value * 0.5, state["scale"].count + 1)
    new = {**state, "scale": scale, "pairs": [Pair(pair.high - grads, grads), rest]}
    return new, {"scale": scale}


def batch_for(step: int, shard: int) -> dict[str, Any]:
    return {"x": Pair(jnp.full(2, 0.01 * (step + shard + 1)), None)}


def test_a_state_and_a_batch_of_them() -> None:
    step, state = jaxft.fault_tolerant(train_step, None, shards=2), fresh()
    for _ in range(3):
        state, metrics = step(state, batch_for)
    assert isinstance(state["scale"], Scale)
    assert float(metrics["scale"].value) == 1.0
    assert int(state["scale"].count) == 3


def test_messages_still_name_the_leaves() -> None:
    def loses(state: dict[str, Any], batch: Any) -> Any:
        return {**state, "n": jaxft.pmean(batch["x"].high)[0]}, {}

    with pytest.raises(jaxft.StepError, match=r"leaf \['n'\] has type float32"):
        jaxft.fault_tolerant(loses, None)(fresh(), batch_for(0, 0))

    step, state = jaxft.fault_tolerant(train_step, None), fresh()
    step(state, batch_for(0, 0))
    with pytest.raises(jaxft.ConfigurationError, match=r"leaf \['(pairs|scale)'\].+ was consumed"):
        step(state, batch_for(0, 0))


def test_a_checkpoint_of_them(tmp_path: Path) -> None:
    state = fresh()
    expected = bits(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(100, state, job="job", history=1)
    checkpoints.finish(60)
    found = Checkpoints(tmp_path).restore(jax.tree.map(jnp.zeros_like, fresh()), job="job")
    assert found is not None
    assert found.digest == jaxft.digest(state)
    assert bits(found.state) == expected
    assert isinstance(found.state["pairs"][1][0], Pair)

    from orbax.checkpoint.experimental import v1 as ocp

    plain = ocp.load(tmp_path / "100")
    assert np.array_equal(plain["scale"]["value"], np.float32(8))
