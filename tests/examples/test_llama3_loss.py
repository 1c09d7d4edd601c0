"""The loss: cross-entropy, in chunks of the vocabulary and parts of it on each device, with its gradients."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from examples.llama3 import _loss
from examples.llama3._loss import next_token_loss
from examples.llama3._sharding import NO_MESH, ActivationSharding, make_mesh

pytestmark = pytest.mark.unoptimized

VOCABULARY, DIM = 320, 8


@pytest.fixture(autouse=True)
def _strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, DIM)).astype(np.float32)
    head = rng.normal(size=(DIM, VOCABULARY)).astype(np.float32)
    return x, head, rng.integers(0, VOCABULARY, (2, 6)).astype(np.int32)


def test_loss_is_the_mean_cross_entropy() -> None:
    x, head, targets = inputs()
    exponentials = np.exp(x @ head)
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, targets[..., None], axis=-1)).mean()
    np.testing.assert_allclose(jax.jit(next_token_loss)(x, head, targets), expected, rtol=1e-5)
    np.testing.assert_allclose(next_token_loss(0 * x, head, targets), math.log(VOCABULARY), rtol=1e-6)


@pytest.mark.parametrize(("chunk", "tp"), [(VOCABULARY, 1), (100, 1), (40, 2), (VOCABULARY, 4)])
def test_chunks_and_devices_give_the_gradients_of_the_definition(
    chunk: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loss, "CHUNK_TOKENS", chunk)
    x, head, targets = inputs()
    mesh = make_mesh(1, tp)
    shard = NO_MESH if tp == 1 else ActivationSharding(mesh.abstract_mesh)
    if tp > 1:
        head = jax.device_put(head, NamedSharding(mesh, PartitionSpec(None, "tp")))

    def definition(x: jax.Array, head: jax.Array) -> jax.Array:
        logarithms = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", x, head))
        return -jnp.mean(jnp.take_along_axis(logarithms, targets[..., None], axis=-1))

    chunked = jax.jit(jax.value_and_grad(lambda x, head: next_token_loss(x, head, targets, shard), (0, 1)))
    expected, gradients = jax.value_and_grad(definition, (0, 1))(*inputs()[:2])
    loss, ours = chunked(x, head)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for here, there in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-7)


def test_the_logits_of_the_whole_vocabulary_are_never_there() -> None:
    """By buffer assignment of the gradient, with the vocabulary of the published sizes: 8 chunks of 16,032."""
    tokens, vocabulary = 512, 128_256
    x = jax.ShapeDtypeStruct((1, tokens, DIM), jnp.float32)
    head = jax.ShapeDtypeStruct((DIM, vocabulary), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    needed = jax.jit(jax.grad(next_token_loss, (0, 1))).lower(x, head, targets).compile().memory_analysis()
    one_chunk = 4 * tokens * vocabulary / 8
    assert needed.temp_size_in_bytes < 3 * one_chunk
