"""`jaxft.data`: every sample once an epoch, whichever group asks; padding without weight; and errors."""

import functools
import importlib.util
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_models import bits

import jaxft
import jaxft.data
from jaxft._errors import ConfigurationError
from jaxft.data import Batch, Batches, mix, permute
from jaxft.data._shuffle import permute_all

pytestmark = pytest.mark.unoptimized

SAMPLES = [{"x": np.full((2,), i, np.float32), "label": i % 3} for i in range(50)]


def batches(source: Any = SAMPLES, *, shards: int = 3, samples_per_shard: int = 4, **options: Any) -> Batches:
    return Batches(source, shards=shards, samples_per_shard=samples_per_shard, **options)


def ledger(data: Batches, epoch: int) -> list[int]:
    """The numbers of the real samples of an epoch, in their order."""
    steps = range(epoch * data.steps_per_epoch, (epoch + 1) * data.steps_per_epoch)
    every = [int(i) for step in steps for shard in range(data.shards) for i in data(step, shard).index]
    return [number for number in every if number >= 0]


# The shuffle.


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100, 4097])
def test_permute_is_a_permutation_of_any_size(size: int) -> None:
    assert sorted(permute(i, size=size, key=3) for i in range(size)) == list(range(size))


def test_permute_and_mix_give_the_same_on_every_machine() -> None:
    """A relaunched group on another machine must read the same samples: these values never change."""
    assert mix(0, 1) == 0x08B4FDA8C892B50E
    assert [permute(i, size=10, key=mix(0, 0)) for i in range(10)] == [8, 9, 5, 4, 6, 0, 7, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 3, 64, 4097, 2**31 - 1])
def test_many_positions_at_once_are_permuted_as_one_by_one(size: int) -> None:
    positions = np.unique(np.linspace(0, size - 1, 200).astype(np.int64))
    for key in (3, 2**64 - 1):
        wanted = [permute(int(i), size=size, key=key) for i in positions]
        assert permute_all(positions, size=size, key=key).tolist() == wanted


# The ledger.


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 60),
    shards=st.integers(1, 4),
    samples_per_shard=st.integers(1, 7),
    seed=st.sampled_from([None, 0, -3]),
    drop_last=st.booleans(),
)
def test_each_sample_is_used_exactly_once_an_epoch(
    size: int, shards: int, samples_per_shard: int, seed: int | None, *, drop_last: bool
) -> None:
    a_step = shards * samples_per_shard
    if drop_last and size < a_step:
        return
    data = batches(
        np.arange(size), shards=shards, samples_per_shard=samples_per_shard, seed=seed, drop_last=drop_last
    )
    for epoch in (0, 1, 5):
        used = ledger(data, epoch)
        if drop_last:
            assert len(set(used)) == len(used) == size // a_step * a_step
        else:
            assert sorted(used) == list(range(size))
    if seed is None:
        assert ledger(data, 1) == list(range(len(ledger(data, 1))))


def test_the_order_is_another_in_each_epoch_and_for_each_seed() -> None:
    orders = [ledger(batches(seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))
    left_out = {epoch: set(range(50)) - set(ledger(batches(drop_last=True), epoch)) for epoch in (0, 1)}
    assert len(left_out[0]) == len(left_out[1]) == 2
    assert left_out[0] != left_out[1]


def test_epochs_and_steps() -> None:
    data = batches()
    assert (data.size, data.steps_per_epoch) == (50, 5)
    assert [data.epoch_of(step) for step in (0, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]
    assert batches(drop_last=True).steps_per_epoch == 4
    assert batches(SAMPLES[:48]).steps_per_epoch == 4
    assert batches(SAMPLES[:2]).steps_per_epoch == 1


# Batches.


def test_samples_are_stacked() -> None:
    batch = batches(seed=None)(1, 2)
    assert isinstance(batch, Batch)
    assert batch.index.tolist() == [20, 21, 22, 23]
    assert batch.index.dtype == np.int32
    assert batch.weight.tolist() == [1.0] * 4
    assert batch.weight.dtype == np.float32
    assert batch.samples["x"].tolist() == [[20.0, 20.0], [21.0, 21.0], [22.0, 22.0], [23.0, 23.0]]
    assert batch.samples["x"].dtype == np.float32
    assert batch.samples["label"].tolist() == [2, 0, 1, 2]


def test_padding_repeats_a_real_sample_and_keeps_the_types() -> None:
    data = batches(seed=None)
    first, second, third = (data(4, shard) for shard in range(3))
    assert first.index.tolist() == [48, 49, -1, -1]
    assert first.weight.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert first.samples["x"][:, 0].tolist() == [48.0, 49.0, 48.0, 48.0]
    for empty in (second, third):
        assert empty.index.tolist() == [-1] * 4
        assert empty.weight.tolist() == [0.0] * 4
        assert empty.samples["x"][:, 0].tolist() == [48.0] * 4
    kinds = {
        jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", data(step, shard)).__repr__()
        for step in range(5)
        for shard in range(3)
    }
    assert len(kinds) == 1


def test_a_batch_is_a_pure_function_of_step_and_shard() -> None:
    one, other = batches(), batches()
    asked = [(7, 1), (0, 0), (7, 1), (123456, 2)]
    assert [bits(one(*at)) for at in asked] == [bits(other(*at)) for at in reversed(asked)][::-1]
    # These never change, or relaunched groups of another version would read other samples.
    assert one(7, 1).index.tolist() == [16, 1, 8, 6]


def test_a_step_may_be_a_number_of_numpy() -> None:
    data = batches()
    for number in (np.int32, np.uint8, jnp.int32):
        assert data(number(4), number(1)).index.tolist() == data(4, 1).index.tolist()
        assert mix(number(7), number(4)) == mix(7, 4)


@pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="grain is not installed")
@pytest.mark.filterwarnings("ignore")  # of grain's own imports
def test_a_grain_map_dataset() -> None:
    import grain

    dataset = grain.MapDataset.range(50).map(lambda i: {"x": np.full(2, i, np.float32), "label": i % 3})
    wanted, got = batches(), batches(dataset)
    for step, shard in ((0, 0), (4, 0), (4, 2), (9, 1)):
        assert bits(got(step, shard)) == bits(wanted(step, shard))
    with pytest.raises(ConfigurationError, match=r"must have 1 to 2147483647.*repeats without end"):
        batches(dataset.repeat())
    with pytest.raises(ConfigurationError, match="a NoneType, is not a pytree"):
        batches(dataset.filter(lambda sample: sample["label"] == 0), seed=None)(0, 0)


def test_samples_alone_where_there_is_no_padding() -> None:
    data = batches(drop_last=True)
    alone = data.samples_only()
    assert bits(alone(5, 2)) == bits(data(5, 2).samples)
    assert (alone.shards, alone.steps_per_epoch, alone.fingerprint) == (3, 4, data.fingerprint)
    batches(SAMPLES[:48]).samples_only()
    with pytest.raises(
        ConfigurationError, match="50 samples do not fill steps of 12, so batches need their weight"
    ):
        batches().samples_only()


# The fingerprint.


def test_the_fingerprint_tells_what_differs() -> None:
    fingerprint = batches().fingerprint
    assert fingerprint.startswith("50 samples, 3 shards x 4, seed 0, content ")
    assert batches().fingerprint == fingerprint
    last_changed = [*SAMPLES[:-1], {"x": np.full((2,), 7, np.float32), "label": 1}]
    other_type = [{"x": sample["x"].astype(np.int32), "label": sample["label"]} for sample in SAMPLES]
    others = [
        batches(SAMPLES[:49]),
        batches(last_changed),
        batches(other_type),
        batches(shards=4),
        batches(samples_per_shard=3),
        batches(seed=1),
        batches(seed=None),
        batches(drop_last=True),
    ]
    assert len({fingerprint, *(other.fingerprint for other in others)}) == 9
    assert batches(SAMPLES[:1]).fingerprint


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": []}, "The source has 0 samples, but it must have 1 to"),
        ({"shards": 0}, "shards must be at least 1, not 0"),
        ({"samples_per_shard": "8"}, "samples_per_shard must be an int of at least 1, not '8'"),
        ({"seed": 0.5}, r"seed must be an int, not 0\.5, a float"),
        ({"source": {"x": [1]}}, r"source is a dict, which has no sample number 0.*one dict per"),
        ({"source": iter([1, 2])}, r"source is a list_iterator.*cannot be indexed.*data\.from_iterator"),
        (
            {"samples_per_shard": 17, "drop_last": True},
            r"has 50 samples, but a step takes 51 .*Lower samples_per_shard",
        ),
    ],
)
def test_arguments_that_cannot_be_right(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        batches(**options)


def test_no_such_shard() -> None:
    for step, shard in ((-1, 0), (0, 3)):
        with pytest.raises(
            ConfigurationError, match=rf"no shard {shard} of step {step}.*shards=batches\.shards"
        ):
            batches()(step, shard)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            {"x": np.zeros(3, np.float32), "label": 1},
            r"Sample 5 .*\['x'\] float32\[3\], but sample 4 .*\['x'\] float32\[2\]",
        ),
        ({"x": np.zeros(2, np.float64), "label": 1}, r"Sample 5 .*float64\[2\], but"),
        ({"x": np.zeros(2, np.float32)}, "Sample 5 .* but sample 4"),
        ("text", "Sample 5 .*, a str, is not a pytree of arrays and numbers"),
        ({}, "Sample 5 .*, a dict, is not a pytree"),
    ],
)
def test_samples_that_do_not_stack(odd: Any, message: str) -> None:
    source = [*SAMPLES[:5], odd, *SAMPLES[6:]]
    with pytest.raises(ConfigurationError, match=message):
        batches(source, seed=None)(0, 1)


# In a step.


def quadratic(w: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of losses, and the sum of weights."""
    losses = (batch.samples["x"] @ w - batch.samples["label"].astype(jnp.float32)) ** 2
    return jnp.sum(batch.weight * losses), jnp.sum(batch.weight)


@functools.cache
def train(microbatch_size: int | None, *, scale: float = 1e-3) -> jax.Array:
    """Two epochs; the last step of each has a half-empty shard and two empty ones."""
    gradients = jax.grad(quadratic, has_aux=True)
    if microbatch_size is not None:
        gradients = optax.microbatching.microbatch(gradients, argnums=1, microbatch_size=microbatch_size)

    def train_step(w: jax.Array, batch: Batch) -> tuple[jax.Array, Any]:
        grads, count = jaxft.psum(gradients(w, batch))
        return w - scale * grads / count, count

    data = batches()
    step, w = jaxft.fault_tolerant(train_step, None, shards=data.shards), jnp.ones(2)
    while step.step < 2 * data.steps_per_epoch:
        w, count = step(w, data)
        assert count == (2 if step.step % 5 == 0 else 12)
    assert len(step._cache.all) == 1, "an uneven last batch must not compile anything again"
    return w


def test_columns_are_not_taken_for_samples() -> None:
    x, y = np.arange(30.0).reshape(10, 3), np.arange(10)
    for columns in ((x, x), (x, y), (jnp.asarray(y), y, y)):
        text = f"a tuple of {len(columns)} arrays of 10 rows each, which would be {len(columns)} samples. If they"
        with pytest.raises(ConfigurationError, match=text):
            Batches(columns, shards=1, samples_per_shard=2)
    rows = Batches(list(zip(x, y, strict=True)), shards=1, samples_per_shard=2, seed=None)
    assert rows(1, 0).samples[1].tolist() == [2, 3]
    for samples in (tuple(range(4)), ({"x": x}, {"x": x}), [x, x]):
        assert Batches(samples, shards=1, samples_per_shard=2).size == len(samples)


def test_an_uneven_last_batch_gives_the_mean_over_real_samples() -> None:
    data, w = batches(), jnp.ones(2)
    for step in range(10):
        real = [SAMPLES[i] for i in ledger(data, step // 5)[12 * (step % 5) : 12 * (step % 5) + 12]]
        x, y = jnp.stack([row["x"] for row in real]), jnp.array([float(row["label"]) for row in real])
        w = w - 1e-3 * jax.grad(lambda w, x=x, y=y: jnp.mean((x @ w - y) ** 2))(w)
    np.testing.assert_allclose(train(None), w, rtol=1e-5)


def test_gradients_accumulated_within_a_shard() -> None:
    """`optax.microbatching` loops inside compute, before the cut; only the order of additions differs."""
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(train(2), train(None), rtol=1e-5)
