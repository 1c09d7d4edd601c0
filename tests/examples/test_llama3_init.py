"""The initial weights: their spread, by TorchTitan's rules, and that no part repeats another."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from llama3_cases import tiny

from examples.llama3._config import ModelConfig
from examples.llama3._init import CUT_AT, INIT_STDDEV, random_bits, truncated_normal
from examples.llama3._model import Llama

pytestmark = pytest.mark.unoptimized

# Of a normal distribution cut at three standard deviations.
KEPT = 0.9866
CONFIG = tiny(dim=128, heads=8, kv_heads=4, ffn_dim=256, layers=3)


def params_of(config: ModelConfig, seed: int = 0) -> Any:
    create = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(key)))))
    return jax.tree.map(np.asarray, create(jax.random.key(seed)))


def test_every_matrix_has_its_spread() -> None:
    params = params_of(CONFIG)
    blocks = params["blocks"]
    wanted = {"query": INIT_STDDEV, "key": INIT_STDDEV, "value": INIT_STDDEV, "gate": INIT_STDDEV}
    for name, stddev in wanted.items():
        leaf = (blocks["attention"] | blocks["feed_forward"])[name]
        assert leaf.std() == pytest.approx(KEPT * stddev, rel=0.02), name
        assert abs(leaf.mean()) < 0.02 * stddev
    for name in ("output", "up", "down"):
        leaf = (blocks["attention"] | blocks["feed_forward"])[name]
        for layer in range(CONFIG.layers):
            stddev = INIT_STDDEV / math.sqrt(2 * (layer + 1))
            assert leaf[layer].std() == pytest.approx(KEPT * stddev, rel=0.03), (name, layer)
    assert params["embedding"].std() == pytest.approx(KEPT, rel=0.02)
    assert params["head"].std() == pytest.approx(KEPT * CONFIG.dim**-0.5, rel=0.02)


@pytest.mark.parametrize("shape", [(7,), (320, 160), (3, 5, 7, 2), (2, 1, 70_000)])
def test_the_bits_are_those_of_jax(shape: tuple[int, ...]) -> None:
    key = jax.random.key(2**31 + 5)
    assert np.array_equal(jax.jit(random_bits, static_argnums=1)(key, shape), jax.random.bits(key, shape))


def test_an_index_beyond_32_bits_has_bits_of_its_own() -> None:
    """A slice of 405B's gate, which is too large to make here: XLA computes only the kept part."""
    shape = (126, 16_384, 53_248)
    some = jax.jit(lambda key: random_bits(key, shape)[::25, 16_380:, :1000])
    assert some.lower(jax.random.key(0)).compile().memory_analysis().temp_size_in_bytes < 1e6
    found = np.asarray(some(jax.random.key(0)))
    assert len(np.unique(found)) > 0.9999 * found.size


def test_noise_is_that_of_jax() -> None:
    key = jax.random.key(1)
    ours = jax.jit(lambda key: truncated_normal(key, (300, 400), 0.5))(key)
    theirs = 0.5 * jax.random.truncated_normal(key, -CUT_AT, CUT_AT, (300, 400))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
