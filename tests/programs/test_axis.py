"""`axis_name`: steps that were written for `jax.pmap` or `jax.shard_map`, as they are."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from step_models import assert_values_of_vmap, values

import jaxft
from jaxft._errors import ConfigurationError, StepError
from jaxft._programs._axis import Axis
from jaxft._programs._build import Shared, cut_only

pytestmark = pytest.mark.unoptimized

SHARDS = 4


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((8, 3), dtype=np.float32)


def state() -> Any:
    return {"w": jnp.ones(3), "rows": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w - 1.0) ** 2)


def of_pmap(state: Any, x: Any) -> Any:
    """As people write it for pmap: keyword and position, a pytree, a nested jit, counts, the size of the axis."""
    key, use = jax.random.split(state["key"])
    noise = 0.1 * jax.random.normal(jax.random.fold_in(use, lax.axis_index("batch")), x.shape)
    loss, grads = jax.value_and_grad(loss_fn)(state["w"], x + noise)
    grads, loss = lax.pmean({"g": grads, "l": loss}, axis_name="batch").values()
    rows = jax.jit(lambda x: lax.psum(jnp.int32(x.shape[0]) + (x[0, 0] > 9.0).astype(jnp.int32), "batch"))(x)
    new = {"w": state["w"] - 0.1 * grads, "rows": state["rows"] + rows, "key": key}
    shards = jnp.float32(lax.psum(1, "batch"))
    return new, {"loss": loss, "shards": shards, "w": lax.psum(state["w"], "batch")}


def of_jaxft(state: Any, x: Any) -> Any:
    key, use = jax.random.split(state["key"])
    noise = 0.1 * jax.random.normal(jax.random.fold_in(use, jaxft.shard_index()), x.shape)
    loss, grads = jax.value_and_grad(loss_fn)(state["w"], x + noise)
    grads, loss = jaxft.pmean((grads, loss))
    rows = jaxft.psum(jnp.int32(x.shape[0]) + (x[0, 0] > 9.0).astype(jnp.int32))
    new = {"w": state["w"] - 0.1 * grads, "rows": state["rows"] + rows, "key": key}
    return new, {"loss": loss, "shards": jnp.float32(SHARDS), "w": state["w"] * SHARDS}


@pytest.mark.unoptimized(False)
def test_the_same_bits_as_with_the_functions_of_jaxft() -> None:
    steps = (
        jaxft.fault_tolerant(of_pmap, None, shards=SHARDS, axis_name="batch"),
        jaxft.fault_tolerant(of_jaxft, None, shards=SHARDS),
    )
    ours, theirs = state(), state()
    for _ in range(3):
        (ours, metrics), (theirs, others) = steps[0](ours, batch_for), steps[1](theirs, batch_for)
        for one, other in zip(values((ours, metrics)), values((theirs, others)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("by", [SHARDS, 2])
@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_a_sum_that_is_divided_by_some_number(by: int, kind: str) -> None:
    """It is a mean only if that number is the size of the axis, and the sum has fractions."""

    def train_step(w: jax.Array, x: jax.Array) -> Any:
        whole = jnp.round(10 * x[0]).astype(kind)
        return w + lax.psum(whole, "batch") / by, {}

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, axis_name="batch")
    new, _ = step(jnp.zeros(3), batch_for)
    total = sum(np.round(10 * batch_for(0, shard)[0]) for shard in range(SHARDS))
    np.testing.assert_array_equal(new, total / np.float32(by))


def test_one_exchange_of_means_and_sums() -> None:
    cut = cut_only(of_pmap, state(), batch_for(0, 0), Shared(axis=Axis("batch", SHARDS)))
    found = [(made.operation, made.aval.dtype.name, made.aval.shape) for made in cut.contributions]
    assert found == [("mean", "float32", (3,)), ("mean", "float32", ()), ("sum", "int32", ())]
    assert cut.depends_on_shard


@pytest.mark.parametrize("grow", [True, False])
def test_dynamic_scale_of_flax(*, grow: bool) -> None:
    def train_step(state: Any, x: Any) -> Any:
        scaler, finite, loss, grads = state["scale"].value_and_grad(loss_fn, axis_name="batch")(state["w"], x)
        w = jnp.where(finite, state["w"] - 0.1 * grads, state["w"])
        return {"scale": scaler, "w": w}, lax.pmean(loss, "batch")

    def batches(step: int, shard: int) -> np.ndarray:
        made = batch_for(step, shard)
        return made if grow or shard != 2 else made * np.float32(np.inf)

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, axis_name="batch")
    begin = {
        "scale": DynamicScale(growth_interval=1, fin_steps=jnp.int32(1), scale=jnp.float32(1024.0)),
        "w": jnp.ones(3),
    }
    after, _ = step(begin, batches)
    assert float(after["scale"].scale) == (2048.0 if grow else 512.0)
    assert bool(np.all(np.asarray(after["w"]) == 1.0)) == (not grow)


# Collectives that are written with sums


def everywhere(function: Any) -> tuple[Any, Any]:
    """The results of a collective over all shards in a step, and in JAX."""

    def train_step(state: Any, x: Any) -> Any:
        new = jax.tree.map(lambda y: lax.psum(y.astype("float32"), "batch"), function(x))
        return state, (new, jax.tree.map(lambda y: lax.pmax(y, "batch"), function(x)))

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, axis_name="batch")
    _, ours = step(state(), batch_for)
    batches = np.stack([batch_for(0, shard) for shard in range(SHARDS)])
    _, theirs = jax.jit(jax.vmap(train_step, in_axes=(None, 0), axis_name="batch"))(state(), batches)
    return ours, jax.tree.map(lambda leaf: leaf[0], theirs)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: lax.all_gather(x, "batch", axis=2), "float32"),
        (lambda x: lax.all_gather(x, "batch", axis=1, tiled=True), "int8"),
        (lambda x: lax.all_gather({"a": x, "b": x[0, 0]}, "batch"), "bool"),
        (lambda x: lax.pmax(x, "batch"), "bfloat16"),
        (lambda x: lax.pmin((x, x[0, 0]), "batch"), "int8"),
        (lambda x: jax.jit(lambda x: lax.all_gather(x, "batch"))(x), "float32"),
        (lambda x: jax.vmap(lambda row: lax.all_gather(row, "batch"), out_axes=1)(x), "int8"),
    ],
)
def test_what_is_gathered_has_the_values_of_all_shards(function: Any, dtype: str) -> None:
    ours, theirs = everywhere(lambda x: function(jnp.round(3 * x).astype(dtype)))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


FLOATS = [-0.0, 0.0, 1.0, -1.5]
SPECIAL = [*FLOATS, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        *((dtype, SPECIAL) for dtype in ("float16", "bfloat16", "float32", "float64", "complex64")),
        *((dtype, FLOATS) for dtype in ("float8_e4m3fn", "float4_e2m1fn")),
        ("float8_e8m0fnu", [1.0, 0.5, 2.0**60]),  # it has no zero
        ("int4", [0, 7, -8]),
        ("int64", [0, 2**63 - 1, -(2**63)]),
        ("uint64", [0, 2**63, 2**64 - 1]),
    ],
)
def test_what_is_gathered_has_all_bits(dtype: str, values: Any) -> None:
    with jax.enable_x64(dtype in ("int64", "uint64", "float64")):
        exact = dtype if dtype == "uint64" else None
        rows = [np.roll(np.array(values, exact).astype(jnp.dtype(dtype)), shard) for shard in range(SHARDS)]
        step = jaxft.fault_tolerant(
            lambda state, x: (state, lax.all_gather(x, "batch")), None, shards=SHARDS, axis_name="batch"
        )
        _, found = step(jnp.ones(()), lambda _step, shard: jnp.asarray(rows[shard]))
    assert found.dtype == rows[0].dtype
    assert np.asarray(found).tobytes() == np.stack(rows).tobytes()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.psum_scatter(x[:4], "batch"),
        lambda x: lax.psum_scatter(x, "batch", tiled=True),
        lambda x: lax.psum_scatter(x.T, "batch", scatter_dimension=1, tiled=True),
        lambda x: lax.all_gather(lax.complex(x, 2 * x), "batch").real,
    ],
)
def test_sums_of_which_each_shard_takes_a_part(function: Any) -> None:
    ours, theirs = everywhere(function)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_what_is_gathered_on_a_mesh(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(axis_type,))
    divided = NamedSharding(mesh, PartitionSpec("rows"))

    def train_step(state: Any, x: Any) -> Any:
        found = lax.all_gather(x, "batch")
        return state, (lax.pmean(found, "batch"), lax.pmax(x, "batch"))

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, axis_name="batch")
    w = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    _, (found, largest) = step(w, lambda step, shard: jax.device_put(batch_for(step, shard), divided))
    expected = np.stack([batch_for(0, shard) for shard in range(SHARDS)])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(largest, expected.max(0))


# What cannot be meant


def refused(function: Any, match: str, **options: Any) -> None:
    options = {"shards": SHARDS, "axis_name": "batch", **options}
    step = jaxft.fault_tolerant(lambda state, x: (state, function(state, x)), None, **options)
    with pytest.raises(StepError, match=match) as caught:
        step(state(), batch_for)
    assert re.search(r"test_axis\.py:\d+", str(caught.value))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: lax.ppermute(x, "batch", [(0, 1)]), "ppermute"),
        (lambda x: lax.all_to_all(x[:4], "batch", 0, 0), "all_to_all"),
    ],
)
def test_other_collectives(function: Any, name: str) -> None:
    refused(
        lambda _state, x: function(x),
        rf"calls jax\.lax\.{name} over 'batch' \(.*may use lax\.pmean, lax\.psum, lax\.all_gather",
    )


def test_a_complex_mean_names_the_function_that_takes_it() -> None:
    refused(
        lambda _state, x: lax.pmean(lax.complex(x, x), "batch"),
        r"leaf of type complex64 .*test_axis\.py.* Write jaxft\.pmean in place of lax\.pmean: it takes complex",
    )


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lax.pmean, ("batch", "rows")),
        (lax.psum, ("rows", "batch")),
        (lax.pmax, ("batch", "rows")),
        (lax.pmin, ("rows", "batch")),
    ],
)
def test_the_axes_of_vmap_and_of_the_shards_at_once(function: Any, names: Any) -> None:
    def step(state: Any, x: Any) -> Any:
        def largest(w: Any) -> Any:
            rows = jax.vmap(lambda row: function(row @ w, names), axis_name="rows")(x)
            whole = jax.vmap(lambda row: function(jnp.int32(9 * row[0]), names), axis_name="rows")(x)
            return rows[0], whole[0]

        (value, whole), slope = largest(state["w"]), jnp.zeros(3)
        if function in (lax.pmean, lax.psum):
            slope = lax.pmean(jax.grad(lambda w: largest(w)[0])(state["w"]), "batch")
        return state, {"value": value, "whole": whole, "slope": slope}

    assert_values_of_vmap(step, state, batch_for, axis="batch", shards=SHARDS)


def test_parts_of_the_axis() -> None:
    groups = [[0, 1], [2, 3]]
    refused(lambda _state, x: lax.psum(x, "batch", axis_index_groups=groups), "or over parts of it")
    refused(lambda _state, x: lax.pmax(x, "batch", axis_index_groups=groups), "pmax .* or over parts of it")
    refused(
        lambda _state, x: lax.psum_scatter(x[:2], "batch", axis_index_groups=groups),
        r"jax\.lax\.psum_scatter .* or over parts of it",
    )


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (
            lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: lax.pmean(c, "batch"), x),
            r"jax\.lax\.psum over 'batch' is inside 'while' .*accumulate first.*fori_loop with fixed bounds",
        ),
        (
            lambda x: lax.cond(x[0, 0] > 0, lambda: lax.pmax(x, "batch"), lambda: x),
            r"jax\.lax\.pmax over 'batch' is inside a 'cond' .* derives from the batch",
        ),
    ],
)
def test_inside(function: Any, match: str) -> None:
    refused(lambda _state, x: function(x), match)


def test_a_mesh_axis_within_a_shard_map_hides_the_axis_of_its_name() -> None:
    """Collectives within are over the devices, those outside over the shards."""

    def step_of(name: str) -> Any:
        mesh = jax.make_mesh((2,), (name,), axis_types=(AxisType.Auto,))
        specs = (PartitionSpec(), PartitionSpec(name))

        def on_devices(w: Any, x: Any) -> Any:
            w = w + 0.1 * lax.axis_index(name).astype(w.dtype)
            return lax.pmean(jax.grad(loss_fn)(w, x), name)

        within = jax.jit(jax.shard_map(on_devices, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))

        def train_step(state: Any, x: Any) -> Any:
            grads = lax.pmean(within(state, x), "batch")
            return state - 0.1 * grads, {}

        return jaxft.fault_tolerant(train_step, None, shards=SHARDS, axis_name="batch")

    other, same = (step_of(name)(jnp.ones(3), batch_for)[0] for name in ("devices", "batch"))
    assert np.array_equal(other, same)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_of_halves_over_a_dimension_too_is_rounded_once(dtype: str) -> None:
    """The sum over the rows of a shard alone has a bit more than bfloat16 holds, or is too large for float16."""
    rows = {
        "bfloat16": [[128, 129], [128, 129], [128, 129], [0, 0]],
        "float16": [[60000, 6000], [60000, 6000], [-60000, -6000], [-6000, 0]],
    }[dtype]
    values = [np.array(each).astype(jnp.dtype(dtype)) for each in rows]

    def train_step(w: Any, x: Any) -> Any:
        return w, jax.vmap(lambda row: lax.psum(row, ("batch", "rows")), axis_name="rows")(x)[0]

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, axis_name="batch")
    _, found = step(jnp.ones(()), lambda _step, shard: values[shard])
    assert found == np.sum(values, dtype=np.float32).astype(dtype)
    assert found.dtype == dtype


def test_an_axis_that_is_not_bound() -> None:
    expected = (
        r"uses the named axis 'batch', which is not bound \(.*pass `axis_name='batch'` to .*jaxft\.pmean"
    )
    refused(lambda _state, x: lax.pmean(x, "batch"), expected, axis_name=None)
    refused(lambda *_: lax.axis_index("batch"), expected, axis_name="data")


@pytest.mark.parametrize(
    "options", [{"axis_name": "batch"}, {"axis_name": 3, "shards": 2}, {"axis_name": ("a", "b"), "shards": 2}]
)
def test_an_axis_needs_a_name_and_a_size(options: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"axis_name is .* pass, say, `axis_name=\"batch\", shards=8`"
    ):
        jaxft.fault_tolerant(of_pmap, None, **options)
