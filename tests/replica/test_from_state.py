"""Batches that are made of the state: of which, how often, and which are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxft
from jaxft._errors import ConfigurationError
from jaxft.data import FromState, Prefetch

SHARDS = 3


def train_step(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + jaxft.pmean(batch), state), {}


class Recorded:
    """Makes a batch that depends on all that it is given, and records that."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, float]] = []

    def __call__(self, step: int, shard: int, state: Any) -> np.ndarray:
        value = float(state["w"])
        self.calls.append((step, shard, value))
        return np.float32(2 * value + 10 * step + shard)


def test_each_shard_is_made_of_the_state_of_its_step() -> None:
    recorded = Recorded()
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
    state, wanted, calls = {"w": jnp.float32(1.0)}, 1.0, []
    for number in range(4):
        state, _ = step(state, FromState(recorded))
        calls += [(number, shard, wanted) for shard in range(SHARDS)]
        wanted += 2 * wanted + 10 * number + 1
        assert float(state["w"]) == wanted
    assert recorded.calls == [calls[0], *calls], "the first is made twice, to compare"


@pytest.mark.parametrize("joins", [True, False])
def test_one_that_is_not_pure_is_made_once_for_each_shard(*, joins: bool) -> None:
    recorded = Recorded()
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
    state, batches = {"w": jnp.float32(1.0)}, FromState(recorded, pure=False)
    if joins:
        state = step.join(state, batches)
        assert [call[:2] for call in recorded.calls] == [(0, 0)], "for its type"
        recorded.calls.clear()
    for _ in range(3):
        state, _ = step(state, batches)
    assert [call[:2] for call in recorded.calls] == [(n, shard) for n in range(3) for shard in range(SHARDS)]


def test_an_edit_is_seen() -> None:
    recorded = Recorded()
    step = jaxft.fault_tolerant(train_step, None, shards=1)
    batches = FromState(recorded)
    state = step.join({"w": jnp.float32(1.0)}, batches)
    for number in step.steps(2):
        if number == 1:
            state = step.edit(state, lambda _state: {"w": jnp.float32(-4.0)})
        state, _ = step(state, batches)
    assert recorded.calls[-1] == (1, 0, -4.0)


def test_a_module_may_change_where_the_batch_is_made() -> None:
    """What flax counts when a module is called belongs to the copy that the function is given."""

    def make(_step: int, _shard: int, model: nnx.Linear) -> jax.Array:
        made = model(jnp.ones((2, 3)))
        model.kernel[...] = model.kernel[...] * 0.0
        return made

    def module_step(model: nnx.Linear, batch: jax.Array) -> Any:
        model.kernel[...] = model.kernel[...] + jaxft.pmean(batch.mean())
        return model, {}

    step = jaxft.fault_tolerant(module_step, None, shards=2)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    for _ in range(3):
        kernel, bias = np.asarray(model.kernel[...]), np.asarray(model.bias[...])
        model, _ = step(model, FromState(make))
        np.testing.assert_allclose(
            model.kernel[...], kernel + (np.ones((2, 3), np.float32) @ kernel + bias).mean(), rtol=1e-6
        )


def test_leaves_are_arrays_of_strong_types_from_the_first_call_on() -> None:
    """What user's code makes of them has other types otherwise, in a group that has healed or was restored, say."""
    seen: list[tuple[Any, ...]] = []

    def make(_step: int, _shard: int, state: Any) -> Any:
        leaves = jax.tree.leaves(state)
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        seen.append(tuple(jax.typeof(leaf).str_short() + "*" * leaf.weak_type for leaf in leaves))
        return (jnp.ones(2, jnp.bfloat16) * state["scale"]).astype(jnp.float32)

    step = jaxft.fault_tolerant(
        lambda state, batch: ({**state, "w": state["w"] + jaxft.pmean(batch)}, {}), None, shards=1
    )
    numbers = np.ones(2, np.float32)
    state = {"w": numbers, "scale": 0.5, "count": 1}
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            state, _ = step(state, FromState(make, pure=False))
    assert set(seen) == {("int32[]", "float32[]", "float32[2]")}
    assert numbers.tolist() == [1.0, 1.0]


def test_keys_in_the_state() -> None:
    """Typed ones, of the state itself and of what flax keeps of its generators."""

    def make(_step: int, shard: int, state: Any) -> jax.Array:
        key = jax.random.fold_in(state["key"], shard)
        return state["drop"](jax.random.normal(key, (3,)))

    def keyed_step(state: Any, batch: jax.Array) -> Any:
        key, _ = jax.random.split(state["key"])
        return {**state, "w": state["w"] + jaxft.pmean(batch), "key": key}, {}

    found = []
    for join in (False, True):
        drop = nnx.Dropout(0.5, rngs=nnx.Rngs(2))
        state = {"w": jnp.zeros(3), "key": jax.random.key(1), "drop": drop}
        step = jaxft.fault_tolerant(keyed_step, None, shards=2)
        if join:
            state = step.join(state, FromState(make))
        for _ in range(3):
            state, _ = step(state, FromState(make))
        found.append(jaxft.digest(state))
    assert found[0] == found[1]


def test_a_first_state_that_is_wrong_is_named_before_anything_is_made_of_it() -> None:
    def make(_step: int, _shard: int, _state: Any) -> Any:
        raise AssertionError("asked")

    step = jaxft.fault_tolerant(train_step, None)
    consumed = {"w": jnp.ones(3)}
    consumed["w"].delete()
    with pytest.raises(ConfigurationError, match=r"leaf \['w'\] of the state.* was consumed"):
        step(consumed, FromState(make))
    with pytest.raises(ConfigurationError, match=r"leaf \['w'\] of the state is 'text'"):
        step({"w": "text"}, FromState(make))
    with pytest.raises(ConfigurationError, match="on tracers"):
        jax.jit(lambda state: step(state, FromState(make)))({"w": jnp.ones(3)})
    with pytest.raises(ConfigurationError, match="with a FromState as its state"):
        step(FromState(make), {"w": jnp.ones(3)})


def test_one_that_differs_is_refused_and_nothing_has_changed() -> None:
    draws = iter(range(100))

    def make(_step: int, _shard: int, state: Any) -> Any:
        return state["w"] + next(draws)

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
    state = {"w": jnp.float32(1.0)}
    with pytest.raises(ConfigurationError, match=r"is not pure.* state alone.*pure=False"):
        step(state, FromState(make))
    assert (step.step, float(state["w"])) == (0, 1.0)
    state, _ = step(state, FromState(make, pure=False))
    assert step.step == 1


@pytest.mark.parametrize("make", [lambda _step, _shard: 0, lambda: 0, 7])
def test_a_function_of_other_arguments_is_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"FromState.*def make\(step, shard, state\)"):
        FromState(make)


def test_what_leads_to_it_and_away_from_it() -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
    with pytest.raises(ConfigurationError, match="FromState for batches that are made of the state"):
        step({"w": jnp.float32(1.0)}, lambda _step, _shard, state: state["w"])
    with pytest.raises(
        ConfigurationError, match=r"Prefetch makes batches ahead.*Give the FromState to the step"
    ):
        Prefetch(FromState(Recorded()))  # pyright: ignore
