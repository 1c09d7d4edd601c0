import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._errors import StepError


def average(x: jax.Array) -> jax.Array:
    return jaxft.pmean(x)


def test_keeps_structure_and_types_when_traced() -> None:
    tree = {"a": jnp.ones((2, 3)), "b": [jnp.ones(4, jnp.bfloat16), jnp.ones((), jnp.float16)]}
    out = jax.eval_shape(jaxft.pmean, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_nothing_to_average() -> None:
    with pytest.raises(StepError, match="empty pytree: there is nothing to average"):
        jaxft.pmean({"a": [], "b": None})


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        (np.ones(3, np.int32), "int32"),
        (np.ones(3, bool), "bool"),
        (np.ones(3, np.complex64), "complex64"),
        (3, "int32"),
        ("text", "str"),
    ],
)
def test_only_floats_have_a_mean(leaf: object, name: str) -> None:
    with pytest.raises(StepError, match=rf"leaf of type {name} at \['stats'\]\[1\].*convert the leaf"):
        jaxft.pmean({"stats": [jnp.ones(2), leaf]})


def test_keys_have_no_mean() -> None:
    with pytest.raises(StepError, match="leaf of type key<fry> at the top of its argument"):
        jaxft.pmean(jax.random.key(0))


def test_called_eagerly() -> None:
    with pytest.raises(StepError, match=r"called outside a traced step.*jaxft\.fault_tolerant"):
        average(jnp.ones(3))


def test_plain_jit() -> None:
    with pytest.raises(StepError, match=r"reached by plain `jax\.jit`.*manager=None"):
        jax.jit(average)(jnp.ones(3))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(f),
        lambda f: jax.jit(jax.grad(f)),
        lambda f: lambda x: jax.linearize(f, x),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ],
)
def test_under_differentiation(transform: object) -> None:
    with pytest.raises(StepError, match="take the gradient first"):
        transform(lambda x: average(x).sum())(jnp.ones(3))  # type: ignore[operator]


def total(x: jax.Array) -> jax.Array:
    return jaxft.psum(x)


def test_psum_keeps_structure_and_types_when_traced() -> None:
    tree = {"a": jnp.ones((2, 3)), "n": [jnp.ones(4, jnp.int32), jnp.ones((), jnp.uint32)]}
    out = jax.eval_shape(jaxft.psum, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_psum_names_itself() -> None:
    with pytest.raises(StepError, match=r"jaxft\.psum was given an empty pytree: there is nothing to sum"):
        jaxft.psum(())
    with pytest.raises(StepError, match=r"jaxft\.psum was called outside a traced step"):
        total(jnp.ones(3))
    with pytest.raises(StepError, match=r"jaxft\.psum was reached by plain `jax\.jit`"):
        jax.jit(total)(jnp.ones(3))
    with pytest.raises(StepError, match=r"jaxft\.psum is inside.*`grads = jaxft\.psum\(grads\)`"):
        jax.grad(lambda x: total(x).sum())(jnp.ones(3))


@pytest.mark.parametrize(("dtype", "name"), [(bool, "bool"), (np.int8, "int8"), (np.complex64, "complex64")])
def test_what_has_no_sum(dtype: type, name: str) -> None:
    with pytest.raises(
        StepError, match=rf"psum .* type {name} at \['n'\]. It sums .*int32, .*convert the leaf"
    ):
        jaxft.psum({"n": np.ones(3, dtype)})


def test_vmap_averages_each_element() -> None:
    def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state - jax.vmap(jaxft.pmean)(batch), jax.vmap(jaxft.pmean, in_axes=1, out_axes=0)(batch)

    step = jaxft.fault_tolerant(train_step, None, shards=2)
    state, metrics = step(jnp.zeros((2, 3)), lambda _, shard: jnp.full((2, 3), float(shard)))
    np.testing.assert_array_equal(state, np.full((2, 3), -0.5))
    np.testing.assert_array_equal(metrics, np.full((3, 2), 0.5))
