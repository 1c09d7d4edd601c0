"""A batch function that is not pure is refused before anything has changed, and so are batches of other shards."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._errors import ConfigurationError
from jaxft.data import Batches, _batch_functions


def train_step(w: Any, batch: Any) -> tuple[Any, Any]:
    mean = jaxft.pmean(jnp.mean(jax.tree.leaves(batch)[0]) + 0.0 * w)
    return w - mean, {"mean": mean}


def run(batch_for: Any, steps: int = 1, shards: int | None = 2) -> Any:
    step, w = jaxft.fault_tolerant(train_step, None, shards=shards), jnp.zeros(())
    while step.step < steps:
        w, _ = step(w, batch_for)
    return w


def test_an_iterator_behind_the_function_is_refused() -> None:
    stream = (np.full((2, 3), number, np.float32) for number in itertools.count())
    with pytest.raises(ConfigurationError) as caught:
        run(lambda _step, _shard: {"x": next(stream)})
    text = str(caught.value)
    assert (
        "not pure: it was called twice for step 0 and shard 0, and ['x'] differs in 6 of 6 elements" in text
    )
    assert "first at [0, 0]: 0.0, then 1.0" in text
    assert "jaxft.data.from_iterator" in text


def test_augmentation_without_a_seed_is_refused_and_with_one_it_is_not() -> None:
    unseeded = np.random.default_rng()
    with pytest.raises(ConfigurationError, match=r"the batch differs in 4 of 4 elements"):
        run(lambda _step, _shard: unseeded.standard_normal(4, np.float32))
    run(lambda step, shard: np.random.default_rng([7, step, shard]).standard_normal(4, np.float32), 3)


def test_other_shapes_and_structures_are_named() -> None:
    lengths, kinds = itertools.count(2), itertools.count()
    with pytest.raises(ConfigurationError, match=r"the batch was float32\[2\], then float32\[3\]"):
        run(lambda _step, _shard: np.zeros(next(lengths), np.float32))
    with pytest.raises(ConfigurationError, match="another structure"):
        run(lambda _step, _shard: [np.zeros(2, np.float32)] * (1 + next(kinds)))


@pytest.mark.parametrize(
    ("make", "leaf"),
    [
        (
            lambda step, shard: {"x": np.zeros(2, np.float32), "text": f"{step}, {shard}"},
            r"leaf \['text'\] of the",
        ),
        (lambda _step, _shard: object(), r"batch is <object object"),
    ],
)
def test_what_is_made_anew_and_is_no_array_is_refused_as_such(make: Any, leaf: str) -> None:
    expected = rf"^The {leaf}.*, and not an array of numbers\. A batch is a pytree of arrays and numbers"
    with pytest.raises(ConfigurationError, match=expected):
        run(make)

    def later(step: int, shard: int) -> Any:
        return make(step, shard) if step == 2 else np.zeros(2, np.float32)

    with pytest.raises(ConfigurationError, match=expected):
        run(later, 3)


def test_a_batch_function_that_yields_is_refused() -> None:
    def batch_for(_step: int, _shard: int) -> Any:
        yield np.zeros(2, np.float32)

    with pytest.raises(
        ConfigurationError, match=r"a generator\. .* a pure function `batch\(step, shard\)` that ret"
    ):
        run(batch_for)


def test_a_stream_of_what_is_no_array_is_refused_as_such() -> None:
    batches = jaxft.data.from_iterator(lambda _shard: ({"image": object()} for _ in range(3)), 2)
    with pytest.raises(ConfigurationError, match=r"^The leaf \['image'\] of the batch .*convert the leaf"):
        run(batches)


def test_what_turns_impure_later_is_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch_functions, "EVERY", 10)
    late = itertools.count()

    def batch_for(step: int, _shard: int) -> Any:
        return np.full(2, next(late) if step >= 6 else 0, np.float32)

    run(batch_for, 5)
    with pytest.raises(ConfigurationError, match="called twice for step"):
        run(batch_for, 20)


@pytest.mark.parametrize(
    "batch",
    [
        np.array([np.nan, 1.0], np.float32),
        jax.random.normal(jax.random.key(0), (2,)),
        (np.zeros((0, 3), np.float32), np.ones(2, np.float32)),
        jnp.ones(3, jnp.bfloat16),
    ],
)
def test_what_has_the_same_bits_is_the_same(batch: Any) -> None:
    assert not _batch_functions.difference(batch, jax.tree.map(jnp.copy, batch))
    assert not _batch_functions.difference(jax.random.key(3), jax.random.key(3))
    assert _batch_functions.difference(jax.random.key(3), jax.random.key(4))


def test_batches_of_other_shards_than_the_step_are_refused() -> None:
    data = Batches(np.arange(64, dtype=np.float32), shards=4, samples_per_shard=8)
    with pytest.raises(ConfigurationError, match=r"The step has shards=2, but .* divided into 4 shards"):
        run(data)
    run(data, shards=4)
    step = jaxft.fault_tolerant(train_step, jaxft.Manager("localhost:1", group="g"))
    with pytest.raises(ConfigurationError, match=r"The step has no shards=.*which is 4 here"):
        step(jnp.zeros(()), data)
    run(Batches(np.arange(64, dtype=np.float32), shards=1, samples_per_shard=8), shards=None)
