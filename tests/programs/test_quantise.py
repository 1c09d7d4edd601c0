"""`pmean(quantize="int8")`: known answers, what stays as it is, and what is refused."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import step_models
from exchange.members import assert_same_bits, exchange_all, mesh
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from step_models import bits

import jaxft
from jaxft._errors import ConfigurationError, NonFinite, StepError
from jaxft._exchange._partials import Partials
from jaxft._programs._build import cut_programs

WIDTH = 256


def every(*_: Any) -> Any:
    """Quantises small leaves, too."""
    return "int8"


def train_step(_: Any, batch: Any) -> Any:
    means, count = jaxft.pmean(batch["x"], quantize=every), jaxft.pmean(jnp.mean(batch["x"][0]))
    return {"x": means}, {"count": count}


@functools.cache
def runner(shards: int, shape: tuple[int, ...], dtype: Any) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """A step for leaves of this type, compiled once, as a function of the leaves."""
    step = jaxft.fault_tolerant(train_step, None, shards=shards)
    states = [{"x": jnp.zeros(shape, dtype)}]

    def run(leaves: Sequence[np.ndarray]) -> np.ndarray:
        states[0], _ = step(states[0], lambda _, shard: {"x": leaves[shard]})
        return np.array(states[0]["x"])

    return run


def means_of(*leaves: np.ndarray) -> np.ndarray:
    """The quantised mean of one leaf for each shard."""
    return runner(len(leaves), leaves[0].shape, leaves[0].dtype)(leaves)


def by_the_rule(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """The rule in numpy, for whole blocks along the last dimension; exact but for the product with the reciprocal."""
    wide = [leaf.astype(np.float64).reshape(-1, WIDTH) for leaf in leaves]
    largest = np.max([np.abs(leaf).max(axis=1) for leaf in wide], axis=0)
    mantissa, exponent = np.frexp(largest)
    e = np.clip(np.where(mantissa <= 127 / 128, exponent - 7, exponent - 6), -110, None)[:, None]
    total = np.sum([np.rint(np.ldexp(leaf, -e)) for leaf in wide], axis=0)
    count = len(leaves)
    reciprocal = np.float32(((1 << 30) + count // 2) // count) * np.float32(2.0**-18)
    quotient = np.rint(total.astype(np.float32) * reciprocal)
    return np.ldexp(quotient.astype(np.float64), e - 12).reshape(leaves[0].shape).astype(leaves[0].dtype)


def block(*values: Any) -> np.ndarray:
    leaf = np.zeros(WIDTH, np.float32)
    leaf[: len(values)] = values
    return leaf


def drawn(seed: int, shape: tuple[int, ...] = (5, WIDTH), dtype: Any = np.float32) -> np.ndarray:
    """Blocks of very different magnitude."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 20, (*shape[:-1], 1))
    return values.astype(dtype)


# Known answers


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 7, 16])
def test_the_mean_is_that_of_the_rule(shards: int) -> None:
    leaves = [drawn(seed) for seed in range(shards)]
    assert means_of(*leaves).tobytes() == by_the_rule(leaves).tobytes()


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_zeros_and_equal_values_on_the_grid_come_back_as_they_are(shards: int) -> None:
    grid = np.arange(-127, 128, dtype=np.float32) * np.float32(2.0**-9)
    leaf = np.stack([block(*grid), block(), block(*grid[::-1]) * np.float32(2.0**80)])
    leaf = np.concatenate([leaf, np.zeros((2, WIDTH), np.float32)])
    means = means_of(*[leaf] * shards)
    assert (means + np.float32(0)).tobytes() == (leaf + np.float32(0)).tobytes()
    assert means_of(*[means] * shards).tobytes() == means.tobytes()


def test_a_step_is_the_smallest_power_of_two_that_suffices_and_ties_go_to_even() -> None:
    most, above = np.float32(127 * 2.0**40), np.nextafter(np.float32(127 * 2.0**40), np.float32(np.inf))
    step = np.float32(2.0**40)
    leaf = np.stack(
        [
            block(most, -most),  # the whole range
            block(above, 63 * step),  # so the step is twice as large: 64 steps, and a tie of 31.5
            block(100, 0.5, 1.5, 2.5, -0.5, -2.5),  # a step of 1
            block(most, 0.49 * step, 0.51 * step),
            block(),
        ]
    )
    wanted = np.stack(
        [
            block(most, -most),
            block(128 * step, 64 * step),
            block(100, 0, 2, 2, -0.0, -2),
            block(most, 0, step),
            block(),
        ]
    )
    np.testing.assert_array_equal(means_of(leaf), wanted)


@pytest.mark.parametrize("shards", [3, 16])
def test_the_mean_is_off_by_half_a_step_at_most(shards: int) -> None:
    leaves = [drawn(0) * np.float32(1 + seed / 50) for seed in range(shards)]
    exact = np.mean(np.array(leaves, np.float64), axis=0)
    largest = np.max(np.abs(leaves), axis=(0, 2))
    assert (np.abs(means_of(*leaves) - exact) <= (largest / 127)[:, None] * (1 + 2**-11)).all()


def test_what_is_too_small_is_zero_and_what_is_too_large_is_marked() -> None:
    tiny, least = np.float32(2.0**-149), np.float32(2.0**-110)
    leaf = np.stack(
        [
            block(tiny, -tiny, 2.0**-126),
            block(least, 0.49 * least, 0.51 * least),
            block(2.0**127, 2.0**121),
            block(127 * 2.0**121, 2.0**121),
            block(np.finfo(np.float32).max, 1.0),
        ]
    )
    wanted = leaf.copy()
    wanted[0], wanted[1, :3], wanted[4] = 0, (least, 0, least), np.nan
    np.testing.assert_array_equal(means_of(leaf), wanted)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_in_any_shard_marks_its_block(bad: float) -> None:
    leaves = [drawn(seed) for seed in range(3)]
    wanted = by_the_rule(leaves)
    wanted[3] = np.nan
    leaves[1][3, 17] = bad
    assert means_of(*leaves).tobytes() == wanted.tobytes()


def test_a_mark_counts_as_a_mean_that_is_not_finite() -> None:
    leaves = [drawn(seed) for seed in range(2)]
    leaves[1][3, 17] = np.inf
    step = jaxft.fault_tolerant(
        lambda _, batch: ({"x": jaxft.pmean(batch, quantize=every)}, {}), None, shards=2, nonfinite="raise"
    )
    with pytest.raises(NonFinite, match=r"pmean#0 exponents is nan at \[3, 0\]"):
        step({"x": jnp.zeros((5, WIDTH))}, lambda _, shard: leaves[shard])


def test_leaves_of_any_shape() -> None:
    """Blocks follow the last dimension, or the order of all elements; the last one may be shorter."""
    shapes = [(), (1,), (255,), (257,), (3, 100), (1000, 1), (2, 96), (4, 192)]
    leaves = [
        [np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32) for shape in shapes]
        for seed in range(2)
    ]
    step = jaxft.fault_tolerant(lambda _, x: (jaxft.pmean(x, quantize=every), {}), None, shards=2)
    means, _ = step([jnp.zeros(shape) for shape in shapes], lambda _, shard: leaves[shard])
    for mean, *both in zip(means, *leaves, strict=True):
        assert mean.shape == both[0].shape
        assert np.abs(mean - np.mean(both, axis=0)).max() <= np.abs(both).max() / 127


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions_are_rounded_once(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    leaves = [np.random.default_rng(seed).standard_normal((2, WIDTH)).astype(kind) for seed in range(3)]
    assert means_of(*leaves).tobytes() == by_the_rule(leaves).tobytes()
    assert by_the_rule(leaves).dtype == kind


# What is exchanged


def specs_of(function: Callable[[Any], Any], batch: Any) -> list[tuple[str, tuple[int, ...], str, str]]:
    made = cut_programs(lambda _, batch: (function(batch), {}), jax.tree.map(jnp.zeros_like, batch), batch)
    return [(spec.path, spec.shape, spec.dtype, spec.result_dtype) for spec in made.contribution]


def test_only_large_leaves_of_the_usual_floats_are_quantised() -> None:
    batch = {
        "big": np.ones((256, 256), np.float32),
        "half": np.ones(1 << 16, ml_dtypes.bfloat16),
        "small": np.ones((255, 256), np.float32),
    }
    found = specs_of(lambda tree: jaxft.pmean(tree, quantize="int8"), batch)
    assert sorted((name.partition("[")[2], *rest) for name, *rest in found) == [
        ("", (), "int32", "int32"),  # a one for each shard
        ("'big']", (256, 256), "int8", "int16"),
        ("'big'] exponents", (256, 1), "int8", "int8"),
        ("'half']", (1 << 16,), "int8", "int16"),
        ("'half'] exponents", (256,), "int8", "int8"),
        ("'small']", (255, 256), "float32", "float32"),
    ]


def test_a_function_chooses_by_path_and_leaf() -> None:
    batch = {"embed": np.ones((8, 64), np.float32), "w": np.ones((8, 64), np.float32)}
    chosen = specs_of(
        lambda tree: jaxft.pmean(tree, quantize=lambda path, _: None if "embed" in path else "int8"), batch
    )
    assert {(shape, dtype) for _, shape, dtype, _ in chosen if shape} == {
        ((8, 64), "float32"),
        ((8, 1), "int8"),
        ((8, 64), "int8"),
    }


def test_no_shape_costs_more_bytes() -> None:
    """One byte up and two down for each element, and two more for each 256."""
    shapes = [(1 << 20,), (1 << 20, 1), (1024, 1024), (1000, 1049), (64, 1 << 14)]
    made = specs_of(
        lambda tree: jaxft.pmean(tree, quantize="int8"), [np.ones(shape, np.float32) for shape in shapes]
    )
    for number, shape in enumerate(shapes):
        elements = int(np.prod(shape))
        mine = [one for one in made if f"[{number}]" in one[0]]
        sent = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for _, shape, dtype, _ in mine)
        received = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for _, shape, _, dtype in mine)
        assert elements < sent <= elements * (1 + 1 / 256) + 1
        assert 2 * elements < received <= elements * (2 + 1 / 256) + 1


def test_what_does_not_depend_on_the_batch_is_returned_unchanged() -> None:
    """Also where the number of shards is not known: no sum needs it."""
    state = {"x": jnp.asarray(drawn(1)), "y": jnp.zeros((2, WIDTH))}

    def step(state: Any, batch: Any) -> Any:
        x, y = jaxft.pmean((state["x"], batch), quantize=every)
        return {"x": x, "y": y}, {}

    new, _ = jaxft.fault_tolerant(step, None)(state, drawn(2, (2, WIDTH)))
    assert bits(new["x"]) == bits(drawn(1))
    assert bits(new["y"]) == bits(by_the_rule([drawn(2, (2, WIDTH))]))


def test_under_vmap_and_in_a_scan() -> None:
    leaves = [drawn(seed, (3, WIDTH)) for seed in range(2)]
    wanted = by_the_rule(leaves)

    def mapped(_: Any, batch: Any) -> Any:
        return jax.vmap(lambda row: jaxft.pmean(row, quantize=every))(batch), {}

    def scanned(_: Any, batch: Any) -> Any:
        return jax.lax.scan(lambda c, row: (c, jaxft.pmean(row, quantize=every)), None, batch)[1], {}

    for step in (mapped, scanned):
        new, _ = jaxft.fault_tolerant(step, None, shards=2)(
            jnp.zeros((3, WIDTH)), lambda _, shard: leaves[shard]
        )
        assert bits(new) == bits(wanted)


@pytest.mark.parametrize("dealt", [[[0, 1, 2, 3, 4]], [[3, 0], [1, 4, 2]], [[2], [], [0, 1, 4], [3]]])
def test_members_exchange_and_apply_the_bits_of_one_process(dealt: list[list[int]]) -> None:
    """Also where a shard is computed again between the two exchanges: its exponents are agreed already."""
    leaves = [drawn(seed) for seed in range(5)]
    state = {"x": jnp.zeros((5, WIDTH))}
    made = cut_programs(train_step, state, {"x": leaves[0]})
    means: list[np.ndarray] = []
    held = [step_models.compute(made, state, {"x": leaf}) for leaf in leaves]
    for stage in range(2):
        if stage:
            held = [made.compute_next(made.state_leaves(state), means, local) for _, local in held]
        members = [Partials(made.stages.layouts[stage], 5) for _ in dealt]
        for partials, shards in zip(members, dealt, strict=True):
            for shard in shards:
                partials.add(shard, held[shard][0])
        with mesh(dealt) as links:
            results = exchange_all(links, members)
        for result in results:
            assert_same_bits(result, results[0])
        means += results[0]
    new, _ = step_models.apply(made, state, means, None)
    assert bits(new["x"]) == bits(means_of(*leaves)) == bits(by_the_rule(leaves))


@pytest.mark.parametrize(
    ("kind", "spec"), [(AxisType.Auto, ("x", None)), (AxisType.Explicit, ("y", "x"))], ids=str
)
def test_on_a_mesh_a_gradient_stays_divided_and_has_the_same_bits(
    kind: AxisType, spec: tuple[str | None, ...]
) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    lies = NamedSharding(mesh, PartitionSpec(*spec))
    batches = [drawn(seed, (4, 2 * WIDTH)) for seed in range(2)]

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: jnp.sum(w * batch))(state["w"])
        return {"w": jaxft.pmean(grads, quantize=every)}, {}

    state = {"w": jax.device_put(jnp.zeros((4, 2 * WIDTH)), lies)}
    placed = [jax.device_put(batch, lies) for batch in batches]
    made = cut_programs(step, state, placed[0])
    assert made.stages.shardings(1)[0].is_equivalent_to(lies, 2)
    run = jaxft.fault_tolerant(step, None, shards=2)
    new, _ = run(state, lambda _, shard: placed[shard])
    assert new["w"].sharding.is_equivalent_to(lies, 2)
    assert bits(new["w"]) == bits(by_the_rule(batches))


# What is refused


def refused(function: Callable[[Any], Any], match: str, batch: Any = None, **settings: Any) -> None:
    batch = np.ones((2, WIDTH), np.float32) if batch is None else batch
    step = jaxft.fault_tolerant(lambda _, batch: (function(batch), {}), None, **settings)
    with pytest.raises(StepError, match=match):
        step(jnp.zeros(batch.shape, batch.dtype), lambda *_: batch)


def test_what_is_refused() -> None:
    refused(lambda x: jaxft.pmean(x, quantize=cast(Any, "int4")), "quantize='int4'. It takes \"int8\"")
    refused(lambda x: jaxft.pmean(x, quantize=cast(Any, lambda *_: "fp8")), "quantize='fp8' for ")
    whole = np.ones((2, WIDTH), np.int32)
    refused(lambda x: jaxft.pmean(x, quantize=every), "chose its argument, of type int32", whole)
    refused(lambda x: jax.grad(lambda y: jnp.sum(jaxft.pmean(y, quantize=every)))(x), "is differentiated")


def test_more_shards_than_16_bits_hold() -> None:
    leaf = block(127.0, -127.0)
    step = jaxft.fault_tolerant(lambda _, x: (jaxft.pmean(x, quantize=every), {}), None, shards=258)
    new, _ = step(jnp.zeros(WIDTH), lambda *_: leaf)
    assert bits(new) == bits(leaf)
    refused(lambda x: jaxft.pmean(x, quantize=every), "sum of 258 shards, and this step has 259", shards=259)
    made = cut_programs(lambda _, x: (jaxft.pmean(x, quantize=every), {}), jnp.zeros(WIDTH), leaf)
    with pytest.raises(ConfigurationError, match="sum of 258 shards, and this step has 300"):
        Partials(made.stages.layouts[1], 300)
