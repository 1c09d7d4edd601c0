"""Dtypes: all products of a bf16 step take bf16; gradients are added in float32, on a device and between devices."""

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama3_cases import abstract_params, products_of, tiny

from examples.llama3._config import Kernel, ModelConfig
from examples.llama3._model import Llama
from examples.llama3._products import project, wide_product
from examples.llama3._sharding import ActivationSharding, batch_sharding, make_mesh, state_shardings

pytestmark = pytest.mark.unoptimized

TOKENS = jax.ShapeDtypeStruct((4, 16), jnp.int32)


@pytest.fixture(autouse=True)
def _strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


def gradient_of(config: ModelConfig, shard: ActivationSharding) -> Any:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), shard=shard)))
    return jax.grad(lambda params, tokens: nnx.merge(graph, params).loss(tokens, tokens))


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
def test_no_product_of_a_bf16_step_takes_float32(kernel: Kernel) -> None:
    config = tiny(compute_dtype="bfloat16", attention=kernel)
    program = jax.make_jaxpr(gradient_of(config, ActivationSharding()))(abstract_params(config), TOKENS)
    products = collections.Counter(products_of(program.jaxpr))
    assert sum(products.values()) > 30
    assert {(left, right) for left, right, _ in products} == {("bfloat16", "bfloat16")}


@pytest.mark.long
def test_gradients_are_reduced_over_fsdp_in_float32_and_weights_gathered_in_bf16(tmp_path: Path) -> None:
    """By the program after it was partitioned, since XLA's CPU backend then widens all of it."""
    config, mesh = tiny(compute_dtype="bfloat16"), make_mesh(2, 1)
    params = abstract_params(config)
    shardings = state_shardings(params, mesh)
    arguments = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), params, shardings
    )
    tokens = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype, sharding=batch_sharding(mesh))
    gradient = jax.jit(gradient_of(config, ActivationSharding(mesh.abstract_mesh)), out_shardings=shardings)
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    gradient.lower(arguments, tokens).compile(compiler_options=dump)
    (partitioned,) = tmp_path.glob("*after_spmd-partitioning*")
    moved = re.findall(r"= \(?(\w+)\[\S* (all-reduce|reduce-scatter|all-gather)\(", partitioned.read_text())
    reduced = {dtype for dtype, operation in moved if operation != "all-gather"}
    assert reduced == {"f32"}
    gathered = collections.Counter(dtype for dtype, operation in moved if operation == "all-gather")
    assert gathered["bf16"] >= 2 * 7 + 1  # seven matrices, forward and backward, and the head


@pytest.mark.parametrize("subscripts", ["btd,dhk->bthk", "bthk,hkd->btd", "btf,fd->btd"])
def test_in_float32_the_gradients_are_those_of_einsum(subscripts: str) -> None:
    rng = np.random.default_rng(0)
    extents = {"b": 2, "t": 5, "d": 6, "h": 3, "k": 4, "f": 7}
    x, weight, cotangent = (
        rng.normal(size=[extents[letter] for letter in letters]).astype(np.float32)
        for letters in subscripts.replace("->", ",").split(",")
    )
    for ours in (project, wide_product):
        out, pull = jax.vjp(lambda x, w: ours(subscripts, x, w), x, weight)  # noqa: B023
        expected, expected_pull = jax.vjp(lambda x, w: jnp.einsum(subscripts, x, w), x, weight)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        for here, there in zip(pull(cotangent), expected_pull(cotangent), strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)


def test_a_weight_s_gradient_is_not_rounded() -> None:
    x = np.full((1, 512, 1), 1.0, jnp.bfloat16)
    _, pull = jax.vjp(lambda w: project("btd,df->btf", x, w), np.ones((1, 1), np.float32))
    (gradient,) = pull(
        jnp.concatenate([jnp.ones((1, 511, 1)), 2 * jnp.ones((1, 1, 1))], 1).astype(jnp.bfloat16)
    )
    assert gradient.dtype == jnp.float32
    assert float(gradient[0, 0]) == 513.0  # bf16 has 512 and 516
