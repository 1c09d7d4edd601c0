"""An audit of what keeps groups from diverging.

First: a step is rejected at tracing if a value of the batch or of the host reaches the new state by any way other
than pmean or psum. Second: two steps that differ only in a constant, such as a seed made from a group's name, have
different fingerprints, so that the coordinator refuses the join.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import buffer_callback, io_callback
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from step_models import Model, program_digest

import jaxft
from jaxft._errors import StepError
from jaxft._programs._fingerprint import program_digest as fingerprint_of
from jaxft._programs._partition import cut

STATE = {"key": jax.random.key(0), "n": np.int32(0), "w": np.ones(3, np.float32)}
BATCH = np.arange(3, dtype=np.float32)
VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)

Route = Callable[[jax.Array, jax.Array], jax.Array]


def digest_of(train_step: Callable[..., Any], state: Any = STATE, batch: Any = BATCH) -> str:
    """Trace and cut a step, with all checks, and take its fingerprint; nothing is compiled."""
    state = jax.tree.map(jnp.asarray, state)
    return program_digest(Model(lambda _: train_step, lambda: state, lambda _: batch))


# How a step may name its mesh in a nested jit: by a sharding on it, as of `jax.set_mesh`, or in a shard_map.
NAMED: dict[str, Callable[[NamedSharding, Any], Any]] = {
    "in a sharding": lambda placed, x: lax.with_sharding_constraint(x, placed),
    "by set_mesh": lambda placed, x: lax.with_sharding_constraint(x, placed.spec),
    "in a shard_map": lambda placed, x: lax.with_sharding_constraint(
        jax.shard_map(jnp.cos, mesh=placed.mesh, in_specs=P(), out_specs=P())(x), placed
    ),
}


def digest_on(sizes: tuple[int, int], names: tuple[str, str], spec: P, *, meshes: bool, named: str) -> str:
    """The fingerprint of a step on a mesh, which names that mesh in a nested jit and in the gradient's place."""
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 2)
    placed = NamedSharding(mesh, spec)
    tie = jax.jit(lambda x: NAMED[named](placed, jnp.sin(x)))

    def train_step(state: jax.Array, batch: jax.Array) -> Any:
        return state - tie(jaxft.pmean(tie(state * batch))), {}

    leaf = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=placed)
    with jax.set_mesh(mesh) if named == "by set_mesh" else contextlib.nullcontext():
        closed = jax.make_jaxpr(lambda state, batch: train_step(state, batch)[0])(leaf, leaf)
    parts = cut(closed, (["w"], ["x"]), lambda _old, _new: True)
    return fingerprint_of(parts.programs, meshes=meshes)


def refused(train_step: Callable[..., Any], **arguments: Any) -> str:
    """The error for a step that is rejected as a leak, which names the line."""
    with pytest.raises(StepError, match="derives from the batch") as caught:
        digest_of(train_step, **arguments)
    assert f"{__file__}:" in str(caught.value)
    return str(caught.value)


def through(route: Route) -> Callable[[Any, Any], Any]:
    """A step whose new `w` is what `route(w, batch)` makes."""

    def train_step(state: Any, batch: Any) -> Any:
        return state | {"w": route(state["w"], batch)}, jaxft.pmean(batch)

    return train_step


def on_one_device(function: Callable[..., Any], *args: jax.Array) -> Any:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)(*args)


def whole(x: jax.Array) -> jax.Array:
    """A number from the batch."""
    return x[0].astype(jnp.int32)


# From the batch


def custom_jvp_of(w: jax.Array, batch: jax.Array) -> jax.Array:
    function = jax.custom_jvp(lambda w, b: w * b)
    function.defjvp(lambda p, t: (p[0] * p[1], t[0]))
    return function(w, batch)


def backward_only(w: jax.Array, batch: jax.Array) -> jax.Array:
    """The batch does not affect the values, only the gradient."""
    function = jax.custom_vjp(lambda w, _b: w)
    function.defvjp(lambda w, b: (w, b), lambda b, g: (g * b, jnp.zeros_like(b)))
    return jax.grad(lambda w: function(w, batch).sum())(w)


def in_place(w: jax.Array, batch: jax.Array) -> jax.Array:
    """The batch decides how often a Ref in a nested jit is written."""

    @jax.jit
    def count(w: jax.Array, turns: jax.Array) -> jax.Array:
        ref = jax.new_ref(w)

        def turn(_: Any, carry: int) -> int:
            ref[...] += 1.0
            return carry

        lax.fori_loop(0, turns, turn, 0)
        return jax.freeze(ref)

    return count(w, whole(batch))


def kernel(w: jax.Array, batch: jax.Array) -> jax.Array:
    def add(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] + y[...]

    return pl.pallas_call(add, out_shape=VECTOR, interpret=True)(w, batch)


FROM_BATCH: dict[str, Route] = {
    "a key's seed": lambda _w, b: jax.random.normal(jax.random.key(whole(b)), (3,)),
    "a folded key": lambda _w, b: jax.random.normal(jax.random.fold_in(jax.random.key(0), whole(b)), (3,)),
    "a generator's seed": lambda _w, b: lax.rng_bit_generator(lax.full((4,), b[0].astype(jnp.uint32)), (3,))[
        1
    ].astype(jnp.float32),
    "a trip count": lambda w, b: lax.fori_loop(0, whole(b), lambda _, c: c * 2.0, w),
    "the swaps of a loop": lambda w, b: lax.while_loop(
        lambda c: c[2] < 3, lambda c: (c[1], c[0], c[2] + 1), (w, b, 0)
    )[0],
    "a predicate": lambda w, b: lax.cond(b.sum() > 0, lambda x: x, lambda x: x * 2.0, w),
    "a branch's number": lambda w, b: lax.switch(whole(b), [lambda x: x, lambda x: x * 2.0], w),
    "a carried predicate": lambda w, b: lax.scan(
        lambda c, x: ((jnp.where(c[1] > 0, c[0], -c[0]), x), None), (w, jnp.float32(0)), b
    )[0][0],
    "an index": lambda w, b: w[b.astype(jnp.int32)],
    "a slice's start": lambda w, b: lax.dynamic_slice(jnp.concatenate([w, w]), (whole(b),), (3,)),
    "an update's start": lambda w, b: lax.dynamic_update_slice(w, w[:1] * 2.0, (whole(b),)),
    "where to scatter": lambda w, b: w.at[b.astype(jnp.int32)].set(0.0),
    "sort keys": lambda w, b: lax.sort((b, w), num_keys=1)[1],
    "stop_gradient": lambda w, b: w + lax.stop_gradient(b),
    "a comparison": lambda w, b: w + (b > 0).astype(jnp.float32),
    "bits": lambda w, b: w + lax.bitcast_convert_type(b, jnp.int32).astype(jnp.float32),
    "a check for NaN": lambda w, b: jnp.where(jnp.isnan(b).any(), w, w * 2.0),
    "the scanned": lambda w, b: lax.scan(lambda c, x: (c, x * c[0]), w, b)[1],
    "a gradient": lambda w, b: jax.grad(lambda w: (w * b).sum())(w),
    "a custom derivative": custom_jvp_of,
    "a backward pass": backward_only,
    "a collective": lambda w, b: on_one_device(lambda w, b: lax.psum((w, b), "d")[1], w, b),
    "a permutation": lambda _w, b: on_one_device(lambda b: lax.ppermute(b, "d", [(0, 0)]), b),
    "a composite": lambda w, b: lax.composite(lambda w, b: w + b, name="test.add")(w, b),
    "an optimization barrier": lambda w, b: lax.optimization_barrier((w, b))[1],
    "a foreign function": lambda w, b: jax.ffi.ffi_call("test_add", VECTOR)(w, b),
    "a Ref": in_place,
    "a kernel": kernel,
    "device_put": lambda w, b: w + jax.device_put(b),
    "a mean, and the batch after it": lambda _w, b: jaxft.pmean(b) * b,
    "the batch, and a mean after it": lambda _w, b: b + 0.0 * jaxft.pmean(b * 2.0),
}


@pytest.mark.parametrize("route", FROM_BATCH)
def test_the_batch_cannot_slip_in_by(route: str) -> None:
    text = refused(through(FROM_BATCH[route]))
    assert "leaf ['w']" in text
    assert "Wrap the values it is computed from in jaxft.pmean(...) or jaxft.psum(...)" in text


# From the host


def seen(x: jax.Array) -> jax.Array:
    """A value from the host."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.asarray, shape, x, vmap_method="sequential")


def in_custom_vjp(w: jax.Array) -> jax.Array:
    function = jax.custom_vjp(seen)
    function.defvjp(lambda x: (seen(x), None), lambda _, g: (g,))
    return function(w)


def in_backward(w: jax.Array) -> jax.Array:
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, g: (seen(g),))
    return jax.grad(lambda x: function(x).sum())(w)


def in_custom_jvp(w: jax.Array) -> jax.Array:
    function = jax.custom_jvp(seen)
    function.defjvp(lambda p, t: (seen(p[0]), t[0]))
    return function(w)


def fill(_context: Any, out: Any, *_: Any) -> None:
    np.asarray(out)[...] = 1.0


FROM_HOST: dict[str, Callable[[jax.Array], jax.Array]] = {
    "io_callback": lambda w: w + io_callback(lambda: np.ones(3, np.float32), VECTOR),
    "buffer_callback": lambda w: buffer_callback.buffer_callback(fill, VECTOR)(w),
    "a nested buffer_callback": jax.jit(lambda w: buffer_callback.buffer_callback(fill, VECTOR)(w)),
    "a foreign function with side effects": lambda w: jax.ffi.ffi_call(
        "test_clock", VECTOR, has_side_effect=True
    )(w),
    "rng_uniform": lambda w: w + lax.rng_uniform(0.0, 1.0, (3,)),
    "jit": jax.jit(jax.jit(seen)),
    "scan": lambda w: lax.scan(lambda c, _: (seen(c), None), w, length=2)[0],
    "map": lambda w: lax.map(seen, w),
    "while": lambda w: lax.while_loop(lambda c: c[0] < 5.0, lambda c: seen(c) + 1.0, w),
    "the end of a while": lambda w: lax.while_loop(lambda c: seen(c)[0] < 5.0, lambda c: c + 1.0, w),
    "cond": lambda w: lax.cond(w[0] > 0, seen, lambda x: x, w),
    "remat": jax.checkpoint(seen),
    "custom_vjp": in_custom_vjp,
    "a backward pass": in_backward,
    "custom_jvp": in_custom_jvp,
    "shard_map": functools.partial(on_one_device, seen),
    "vmap": jax.vmap(seen),
    "composite": lax.composite(seen, name="test.seen"),
    "a linear solve": lambda w: lax.custom_linear_solve(
        lambda x: 2.0 * x, w, lambda _, y: seen(y), lambda _, y: y
    ),
    "a root": lambda w: lax.custom_root(lambda x: x - 1.0, w, lambda _, x: seen(x), lambda _, y: y),
    "a Ref's program": jax.jit(lambda w: jax.freeze(jax.new_ref(seen(w)))),
}


@pytest.mark.parametrize("route", FROM_HOST)
def test_the_host_cannot_slip_in_by(route: str) -> None:
    text = refused(through(lambda w, _: FROM_HOST[route](w)))
    assert "or a host callback" in text


# No leaks


def printed(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x)
    jax.debug.callback(lambda _: None, x)
    return x * 2.0


INNOCENT: dict[str, Route] = {
    "a print of the batch": lambda w, b: (printed(b), w * 2.0)[1],
    "a print in scan": lambda w, _b: lax.scan(lambda c, _x: (c + 0.0 * printed(c), None), w, length=2)[0],
    "a print in while": lambda w, _b: lax.while_loop(lambda c: c[0] < 5.0, printed, w),
    "a print in cond": lambda w, _b: lax.cond(w[0] > 0, printed, lambda x: x, w),
    "a print in remat": lambda w, _b: jax.checkpoint(printed)(w),
    "a print in shard_map": lambda w, _b: on_one_device(printed, w),
    "a print in a linear solve": lambda w, _b: lax.custom_linear_solve(
        lambda x: 2.0 * x, w, lambda _, y: printed(y), lambda _, y: y
    ),
    "a callback with unused results": lambda w, b: jax.jit(lambda w, b: (w * 2.0, seen(b)))(w, b)[0],
    "a callback aside, in scan": lambda w, b: lax.scan(
        lambda c, _: ((c[0] * 2.0, seen(c[1])), None), (w, b), length=2
    )[0][0],
    "random bits": lambda w, _b: (
        w + lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), (3,))[1].astype(jnp.float32)
    ),
    "the number of a device": lambda w, _b: on_one_device(
        lambda x: x + lax.axis_index("d").astype(jnp.float32), w
    ),
    "the number in vmap": lambda w, _b: jax.vmap(
        lambda x: x + lax.axis_index("i").astype(jnp.float32), axis_name="i"
    )(w),
    "the batch's shape": lambda w, b: w * b.shape[0] + jnp.zeros_like(b),
    "a collective aside": lambda w, b: on_one_device(lambda w, b: lax.psum((w, b), "d")[0], w, b),
}


@pytest.mark.parametrize("route", INNOCENT)
def test_innocent(route: str) -> None:
    digest_of(through(INNOCENT[route]))


def test_metrics_may_bypass_the_mean() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        mean = jaxft.pmean(batch)
        return state | {"w": state["w"] - mean}, {"mine": batch, "mean": mean, "host": seen(batch)}

    ours = BATCH, BATCH + np.float32(2)
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    _, metrics = step(STATE, lambda _, shard: ours[shard])
    np.testing.assert_array_equal(metrics["mean"], BATCH + np.float32(1))
    assert any(np.array_equal(metrics["mine"], each) for each in ours)
    np.testing.assert_array_equal(metrics["host"], metrics["mine"])


# Libraries


def grads_of(params: Any, batch: jax.Array) -> Any:
    return jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)


ROWS = np.ones((4, 3), np.float32)
OPTIMIZERS: dict[str, optax.GradientTransformationExtraArgs] = {
    name: optax.with_extra_args_support(optimizer)
    for name, optimizer in {
        "every fourth step": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
        "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        "if finite": optax.apply_if_finite(optax.sgd(1e-3), 5),
        "scheduled": optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(1.0, 10)),
        "plateau": optax.contrib.reduce_on_plateau(),
    }.items()
}


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """An optimizer's state may depend on averaged gradients, but not on a group's local gradients."""
    optimizer, params = OPTIMIZERS[name], {"w": jnp.ones(3)}

    def make(first: Callable[[Any], Any], last: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def train_step(state: Any, batch: Any) -> Any:
            params, opt = state
            loss, grads = first(grads_of(params, batch))
            updates, opt = optimizer.update(grads, opt, params, value=loss)
            return (optax.apply_updates(params, last(updates)), opt), {}

        return train_step

    state = params, optimizer.init(params)
    digest_of(make(jaxft.pmean, lambda x: x), state, ROWS)
    text = refused(make(lambda x: x, jaxft.pmean), state=state, batch=ROWS)
    assert "leaf [1]" in text  # the parameters are averaged, the optimizer's state is not


def test_batch_statistics_are_named() -> None:
    """The classic leak: BatchNorm's running statistics differ between groups unless they are averaged."""
    from flax import linen

    norm = linen.BatchNorm(use_running_average=False)

    def train_step(average: Callable[[Any], Any], state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = state | {"params": params}
            out, new = norm.apply(variables, batch, mutable=["batch_stats"])  # the statistics
            return jnp.mean(out**2), new["batch_stats"]

        grads, stats = jax.grad(loss_fn, has_aux=True)(state["params"])
        grads = jaxft.pmean(grads)
        return {
            "params": jax.tree.map(jnp.subtract, state["params"], grads),
            "batch_stats": average(stats),
        }, {}

    state = norm.init(jax.random.key(0), ROWS)
    text = refused(functools.partial(train_step, lambda x: x), state=state, batch=ROWS)
    assert "leaf ['batch_stats']['mean']" in text
    assert "['batch_stats']['var']" in text
    with open(__file__) as lines:
        line = next(number for number, line in enumerate(lines, 1) if "# the statistics" in line)
    assert f"test_divergence.py:{line} " in text
    digest_of(functools.partial(train_step, jaxft.pmean), state, ROWS)


# Constants: programs that differ only in a value that is specific to one process


def large(number: int) -> np.ndarray:
    """Too large to be printed in full: two of them differ only in the middle."""
    array = np.zeros(10_001, np.float32)
    array[5000] = number
    return array


def sine(array: Any) -> jax.Array:
    return jnp.sum(jnp.sin(array))


def nested_jit(array: Any) -> Route:
    inner = jax.jit(lambda b: b * sine(array))
    return lambda _w, b: inner(b)


def backward_constant(array: Any) -> Route:
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, g: (g * sine(array),))
    return lambda w, b: jax.grad(lambda x: (function(x) * b).sum())(w)


def kernel_constant(number: int) -> Route:
    def scale(x: Any, out: Any) -> None:
        out[...] = x[...] * number

    return lambda _w, b: pl.pallas_call(scale, out_shape=VECTOR, interpret=True)(b)


CONSTANTS: dict[str, Callable[[int], Route]] = {
    "a rank": lambda rank: lambda _w, b: b * rank,
    "a rank, barely": lambda rank: lambda _w, b: b * np.float32(1.0 + rank * 1.2e-7),
    "a name": lambda rank: lambda _w, b: b + jax.random.normal(jax.random.key(ord(f"{rank}")), (3,)),
    "a key": lambda rank: (lambda key: lambda _w, b: b + jax.random.normal(key, (3,)))(jax.random.key(rank)),
    "a numpy array": lambda rank: lambda _w, b: b * sine(large(rank)),
    "an array": lambda rank: (lambda array: lambda _w, b: b * sine(array))(jnp.asarray(large(rank))),
    "a numpy array in jit": lambda rank: nested_jit(large(rank)),
    "an array in jit": lambda rank: nested_jit(jnp.asarray(large(rank))),
    "scan": lambda rank: lambda _w, b: lax.scan(lambda c, _: (c * sine(large(rank)), None), b, length=2)[0],
    "cond": lambda rank: lambda w, b: lax.cond(w[0] > 0, lambda x: x * sine(large(rank)), lambda x: x, b),
    "while": lambda rank: (
        lambda _w, b: lax.while_loop(lambda c: c[0] < 5.0, lambda c: c + 1.0 + sine(large(rank)), b)
    ),
    "remat": lambda rank: lambda _w, b: jax.checkpoint(lambda x: x * sine(large(rank)))(b),
    "a backward pass": lambda rank: backward_constant(large(rank)),
    "shard_map": lambda rank: lambda _w, b: on_one_device(lambda x: x * sine(large(rank)), b),
    "a kernel": kernel_constant,
    "a kernel's index": lambda rank: (
        lambda _w, b: pl.pallas_call(
            lambda x, out: out.__setitem__(..., x[...]),
            out_shape=VECTOR,
            grid=(3,),
            in_specs=[pl.BlockSpec((1,), lambda i: ((i + rank) % 3,))],
            out_specs=pl.BlockSpec((1,), lambda i: (i,)),
            interpret=True,
        )(b)
    ),
    "an attribute of a foreign function": lambda rank: (
        lambda _w, b: jax.ffi.ffi_call("test_scale", VECTOR)(b, by=large(rank))
    ),
    "a composite's attribute": lambda rank: (
        lambda _w, b: lax.composite(lambda x, by: x * sine(by), name="test.scale")(b, by=large(rank))
    ),
    "the payload of a NaN": lambda rank: lambda _w, b: b + np.uint32(0x7FC00000 + rank).view(np.float32),
    "the sign of zero": lambda rank: lambda _w, b: b * np.float32(-0.0 if rank == 1 else 0.0),
    "an axis": lambda rank: lambda w, b: jnp.outer(b, w).sum(rank - 1),
    "a shift": lambda rank: lambda _w, b: jnp.roll(b, rank),
    "a precision": lambda rank: (
        lambda w, b: jnp.einsum("a,b->b", w, b, precision=("default", "highest")[rank - 1])
    ),
    "a generator": lambda rank: (
        lambda _w, b: b + jax.random.normal(jax.random.key(0, impl=("threefry2x32", "rbg")[rank - 1]), (3,))
    ),
    "a reduction": lambda rank: (
        lambda _w, b: b * lax.reduce(b, np.float32(0), lambda x, y: x + rank * y, (0,))
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_show_in_the_fingerprint(name: str) -> None:
    def step_of(rank: int) -> Callable[..., Any]:
        route = CONSTANTS[name](rank)
        return lambda state, batch: (state | {"w": jaxft.pmean(route(state["w"], batch))}, {})

    assert digest_of(step_of(1)) == digest_of(step_of(1))
    assert digest_of(step_of(1)) != digest_of(step_of(2))


def test_a_constant_in_apply_shows_too() -> None:
    def step_of(rank: int) -> Callable[..., Any]:
        return lambda state, batch: (state | {"w": state["w"] - rank * jaxft.pmean(batch)}, {})

    assert digest_of(step_of(1)) != digest_of(step_of(2))


def test_the_shape_of_a_batch_shows() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        return state | {"w": state["w"] + jaxft.pmean(batch.sum() * len(batch))}, {}

    assert digest_of(train_step, batch=np.ones(4, np.float32)) != digest_of(train_step)


# Meshes


@pytest.mark.parametrize("named", NAMED)
def test_the_sizes_of_a_mesh_can_be_left_out(named: str) -> None:
    axes, spec, sizes = ("a", "b"), P("a"), [(2, 1), (1, 2), (4, 1)]
    assert len({digest_on(size, axes, spec, meshes=True, named=named) for size in sizes}) == 3
    (same,) = {digest_on(size, axes, spec, meshes=False, named=named) for size in sizes}
    others = [
        digest_on((2, 1), ("b", "a"), spec, meshes=False, named=named),
        digest_on((2, 1), axes, P("b"), meshes=False, named=named),
    ]
    assert len({same, *others}) == 3


def test_results_of_a_composite_are_told_apart() -> None:
    both = lax.composite(lambda state, batch: (state * 2.0, batch * 3.0), name="jaxft.test")

    def train_step(state: Any, batch: jax.Array) -> Any:
        of_state, of_batch = both(state["w"], batch)
        return state | {"w": of_state}, jaxft.pmean(of_batch)

    digest_of(train_step)

    def leaks(state: Any, batch: jax.Array) -> Any:
        of_state, of_batch = both(state["w"], batch)
        return state | {"w": of_batch}, jaxft.pmean(of_state * batch)

    refused(leaks)


def test_what_a_root_is_of_is_part_of_the_fingerprint() -> None:
    # JAX 0.12 carries such programs in an object, not among an equation's parameters.
    def by(factor: float) -> str:
        def solve(_: Any, x: jax.Array) -> jax.Array:
            return x * factor

        def train_step(state: Any, batch: jax.Array) -> Any:
            root = lax.custom_root(lambda x: x - 1.0, state["w"], solve, lambda _, y: y)
            return state | {"w": root}, jaxft.pmean(batch * state["w"])

        return digest_of(train_step)

    assert by(2.0) == by(2.0)
    assert by(2.0) != by(3.0)
