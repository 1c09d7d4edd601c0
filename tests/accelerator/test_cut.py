"""A step that jaxft has cut gives the bits of the plain jitted one, on this backend."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxft
from jaxft._arrays._device_digest import StateDigest
from tests import step_models
from tests.accelerator import models
from tests.exchange.members import reference_sum

# Of five, the tree adds two pairs first: another order gives other bits.
SHARDS = 5
# bf16 and float32; scan, remat, noise and the scatter of an embedding. The Llama below is of flax.
NAMES = ("bf16_sgd", "transformer")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_one_shard(name: str) -> None:
    model = getattr(step_models, name)()
    plain = jax.jit(model.step(step_models.identity))
    step = jaxft.fault_tolerant(model.step(jaxft.pmean), None)
    expected, actual = model.state(), model.state()
    for number in range(3):
        expected, expected_metrics = plain(expected, model.batch(number))
        actual, metrics = step(actual, model.batch(number))
        assert step_models.bits((actual, metrics)) == step_models.bits((expected, expected_metrics))


def test_shards_are_summed_along_the_tree() -> None:
    def mean_of(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return state + jaxft.pmean(batch * batch), {}

    def batch_for(step: int, shard: int) -> np.ndarray:
        return np.random.default_rng([step, shard]).standard_normal(10_000, np.float32) * np.float32(3**shard)

    step = jaxft.fault_tolerant(mean_of, None, shards=SHARDS)
    state, _ = step(jax.numpy.zeros(10_000, np.float32), batch_for)
    parts = [batch_for(0, shard) ** 2 for shard in range(SHARDS)]
    assert np.asarray(state).tobytes() == (reference_sum(parts) / np.float32(SHARDS)).tobytes()


@pytest.mark.long
def test_the_shapes_of_8b(record_property: Any) -> None:
    """As many layers as the memory holds. The digest is taken on the device: the states are not copied."""
    model, length = models.as_much_of_8b_as_fits(), models.sized(64, 2048)
    if model is None:
        pytest.skip(f"one layer of 8B does not fit into the memory of {models.machine()}, or of its host")
    batches = [models.llama_batch(model, length, step, 0) for step in range(2)]
    plain = jax.jit(models.llama_step(model, step_models.identity), donate_argnums=0)
    cut = jaxft.fault_tolerant(models.llama_step(model, jaxft.pmean), None)
    runs = [trained(step, models.llama_state(model), batches) for step in (plain, cut)]
    assert runs[0] == runs[1]
    record_property(
        "shapes", f"dim {model.dim}, {model.layers} layers, vocabulary {model.vocab_size}, {length} tokens"
    )


def trained(step: Any, state: Any, batches: list[Any]) -> list[tuple[int, bytes]]:
    """The digest of the state and the bits of the loss after each step."""
    fold, seen = StateDigest(), []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append((fold.start(jax.tree.leaves(state)).result(), np.asarray(metrics["loss"]).tobytes()))
    assert len(set(seen)) == len(batches)
    return seen
