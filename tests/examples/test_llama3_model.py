"""The architecture: sizes, causality, positions, shared heads, precision."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama3_cases import (
    TINY,
    abstract_params,
    documents_function,
    logits_function,
    params_of,
    tiny,
)

from examples.llama3._config import MODEL_SIZES, Remat, RopeScaling, Size
from examples.llama3._model import (
    Llama,
    rms_norm,
    rope_frequencies,
    rope_rotation,
    rotate,
)
from examples.llama3._state import parameter_count

pytestmark = pytest.mark.unoptimized


@pytest.fixture(autouse=True)
def _strict_dtypes() -> Iterator[None]:
    """A silent cast would widen the compute dtype."""
    with jax.numpy_dtype_promotion("strict"):
        yield


TOKENS = np.random.default_rng(7).integers(0, 256, (2, 24)).astype(np.int32)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_published_sizes_have_the_published_parameter_counts(size: Size, parameters: int) -> None:
    assert parameter_count(abstract_params(MODEL_SIZES[size])) == parameters


def test_tied_logits_are_the_embedding_s_products() -> None:
    config = tiny(tied_embeddings=True)
    tied = params_of(config)
    untied = {**tied, "head": tied["embedding"].T}
    expected = logits_function(TINY)(untied, TOKENS)
    np.testing.assert_allclose(logits_function(config)(tied, TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_parameters_are_float32_and_logits_too_under_bfloat16_compute() -> None:
    config = tiny(compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract_params(config))} == {jnp.dtype("float32")}
    logits = jax.eval_shape(logits_function(config), abstract_params(config), TOKENS)
    assert (logits.shape, logits.dtype) == ((*TOKENS.shape, config.vocab_size), jnp.float32)


def test_bfloat16_compute_stays_near_float32() -> None:
    exact = logits_function(TINY)(params_of(TINY), TOKENS)
    rounded = logits_function(tiny(compute_dtype="bfloat16"))(params_of(TINY), TOKENS)
    assert 0.0 < float(jnp.max(jnp.abs(exact - rounded))) < 0.05 * float(jnp.max(jnp.abs(exact)))


@pytest.mark.parametrize("position", [0, 11])
def test_a_token_changes_no_logits_before_it(position: int) -> None:
    changed = TOKENS.copy()
    changed[:, position] = (changed[:, position] + 1) % 256
    before = np.asarray(logits_function(TINY)(params_of(TINY), TOKENS))
    after = np.asarray(logits_function(TINY)(params_of(TINY), changed))
    assert np.array_equal(before[:, :position], after[:, :position])
    assert not np.array_equal(before[:, position], after[:, position])


def test_grouped_queries_equal_full_attention_over_repeated_heads() -> None:
    grouped = params_of(TINY)
    full = tiny(kv_heads=TINY.heads)
    repeats = TINY.heads // TINY.kv_heads

    def repeat_heads(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        return np.repeat(leaf, repeats, axis=2) if path[-1].key in ("key", "value") else leaf

    repeated = jax.tree_util.tree_map_with_path(repeat_heads, grouped)
    np.testing.assert_allclose(
        logits_function(full)(repeated, TOKENS),
        logits_function(TINY)(grouped, TOKENS),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.long
@pytest.mark.unoptimized(False)
@pytest.mark.parametrize("remat", ["selective", "full"])
def test_remat_changes_gradients_by_rounding_alone(remat: Remat) -> None:
    # On some processors by not a bit. But XLA may fuse repeated operations in another way.
    def gradients(remat: Remat) -> Any:
        config = tiny(remat=remat, attention="chunked")
        graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
        return jax.jit(jax.grad(lambda params: nnx.merge(graph, params).loss(TOKENS, TOKENS)))(
            params_of(TINY)
        )

    for here, there in zip(
        jax.tree.leaves(gradients("none")), jax.tree.leaves(gradients(remat)), strict=True
    ):
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-6 * float(np.abs(here).max()))


def test_rms_norm_gives_unit_root_mean_square_times_the_scale() -> None:
    x = np.random.default_rng(0).normal(3.0, 5.0, (2, 3, 64)).astype(np.float32)
    scale = np.linspace(0.5, 2.0, 64).astype(np.float32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(jax.jit(rms_norm)(x, scale, 1e-5), expected, rtol=1e-5)


def test_documents_do_not_see_each_other() -> None:
    """Three documents in one sequence, the last one alone: their logits are as of each alone."""
    tokens = np.random.default_rng(0).integers(0, 320, (1, 24)).astype(np.int32)
    lengths = (5, 11, 8)
    segment_ids = np.repeat(np.arange(3), lengths)[None].astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths])[None].astype(np.int32)
    found = np.asarray(documents_function(TINY)(params_of(TINY), tokens, segment_ids, positions))
    first = 0
    for length in lengths:
        alone = logits_function(TINY)(params_of(TINY), tokens[:, first : first + length])
        np.testing.assert_allclose(found[:, first : first + length], alone, rtol=2e-4, atol=2e-4)
        first += length
    plain = np.asarray(logits_function(TINY)(params_of(TINY), tokens))
    assert np.abs(found[:, 5:] - plain[:, 5:]).max() > 0.01


# Rotary positions.


def test_rotated_products_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 1, TINY.head_dim)).astype(np.float32)

    @jax.jit
    def product_at(positions: jax.Array) -> jax.Array:
        at = rope_rotation(positions[None], TINY)
        return jnp.sum(rotate(query, at[:, :1]) * rotate(key, at[:, 1:]))

    def product(query_position: int, key_position: int) -> float:
        return float(product_at(np.array([query_position, key_position])))

    assert product(5, 2) == pytest.approx(product(905, 902), rel=1e-3)
    assert product(5, 2) != pytest.approx(product(5, 3), rel=1e-2)
    assert product(4, 4) == pytest.approx(float(np.sum(query * key)), rel=1e-4)


def test_rotation_keeps_lengths_and_leaves_position_0_alone() -> None:
    x = np.random.default_rng(0).normal(size=(2, 9, 3, TINY.head_dim)).astype(np.float32)
    turned = np.asarray(jax.jit(lambda x: rotate(x, rope_rotation(jnp.arange(9)[None], TINY)))(x))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    assert np.array_equal(turned[:, 0], x[:, 0])
    assert not np.allclose(turned[:, 1], x[:, 1])


@pytest.mark.parametrize("size", ["1B", "8B", "405B"])
def test_frequencies_follow_llama_3_1(size: Size) -> None:
    config = MODEL_SIZES[size]
    assert config.rope_scaling is not None
    np.testing.assert_allclose(
        rope_frequencies(config), _scaled_by_wavelength(config.head_dim, config.rope_scaling), rtol=1e-12
    )


def _scaled_by_wavelength(head_dim: int, scaling: RopeScaling) -> list[float]:
    """The published rule, stated by wavelengths, one frequency at a time."""
    scaled = []
    for i in range(head_dim // 2):
        frequency = 500_000.0 ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            scaled.append(frequency)
        elif wavelength > 8192 / 1:
            scaled.append(frequency / scaling.factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return scaled
