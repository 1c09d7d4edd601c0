"""`psum`: sums and means in one exchange, exact counts, and values that have no sum."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from exchange.members import assert_same_bits, exchange_all, mesh
from step_models import bits

import jaxft
from jaxft._errors import StepError
from jaxft._exchange._partials import Partials
from jaxft._programs._build import Shared, cut_only, cut_programs
from jaxft._programs._programs import Programs

pytestmark = pytest.mark.unoptimized

STATE = {"w": np.ones(3, np.float32), "seen": np.zeros(4, np.int32)}


def arrays(state: Any = STATE) -> Any:
    return jax.tree.map(jnp.asarray, state)


def ragged(step: int, shard: int) -> dict[str, np.ndarray]:
    """A shard with 0 to 3 real rows of 4."""
    x = np.random.default_rng([step, shard]).standard_normal((4, 3), dtype=np.float32)
    real = (np.arange(4) < (step + shard) % 4).astype(np.float32)
    return {"x": x, "real": real}


def train_step(state: Any, batch: Any) -> Any:
    """A mean over rows, whatever shard they are in; how often each row was real; and a plain mean."""

    def total(w: jax.Array) -> jax.Array:
        return jnp.sum(batch["real"] * (batch["x"] @ w) ** 2)

    grads, rows = jaxft.psum((jax.grad(total)(state["w"]), jnp.sum(batch["real"])))
    seen = state["seen"] + jaxft.psum(batch["real"].astype(jnp.int32))
    new_state = {"w": state["w"] - 0.1 * grads / jnp.maximum(rows, 1.0), "seen": seen}
    return new_state, {"rows": rows, "mean": jaxft.pmean(jnp.sum(batch["real"]))}


def run_alone(shards: int | None, steps: int = 3) -> tuple[Any, Any]:
    step, state, metrics = jaxft.fault_tolerant(train_step, None, shards=shards), arrays(), {}
    for _ in range(steps):
        state, metrics = step(state, ragged)
    return state, metrics


@functools.cache
def programs() -> Programs:
    return cut_programs(train_step, arrays(), ragged(0, 0))


def test_sums_means_and_counts() -> None:
    state, metrics = run_alone(shards=6)
    assert metrics["rows"] == sum((2 + shard) % 4 for shard in range(6))
    assert metrics["mean"] == metrics["rows"] / 6
    real = sum(ragged(step, shard)["real"] for step in range(3) for shard in range(6))
    np.testing.assert_array_equal(state["seen"], real)
    assert state["seen"].dtype == jnp.int32


def test_the_mean_over_rows_is_that_of_one_whole_batch() -> None:
    rows = [ragged(0, shard) for shard in range(6)]
    whole = {name: np.concatenate([shard[name] for shard in rows]) for name in ("x", "real")}
    x = whole["x"][whole["real"] > 0]
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(jnp.ones(3))
    state, _ = run_alone(shards=6, steps=1)
    np.testing.assert_allclose(state["w"], 1.0 - 0.1 * gradient, rtol=1e-6)


def test_one_exchange_with_each_operation() -> None:
    made = [(spec.path, spec.operation, spec.dtype) for spec in programs().contribution]
    assert made == [
        ("psum#0[0]", "sum", "float32"),
        ("psum#0[1]", "sum", "float32"),
        ("psum#1", "sum", "int32"),
        ("pmean#2", "mean", "float32"),
    ]


@pytest.mark.parametrize("dealt", [[[3, 0], [1, 4, 2]], [[2], [], [0, 1, 4], [3]]])
def test_the_bits_do_not_depend_on_the_members(dealt: list[list[int]]) -> None:
    """What members exchange and apply is, bit for bit, what `manager=None` makes of the same shards."""
    made = programs()
    total = sum(map(len, dealt))
    contributions = [step_models.compute(made, arrays(), ragged(0, shard))[0] for shard in range(total)]
    members = [Partials(made.stages.layout, total) for _ in dealt]
    for partials, shards in zip(members, dealt, strict=True):
        for shard in shards:
            partials.add(shard, contributions[shard])
    with mesh(dealt) as links:
        results = exchange_all(links, members)
    for result in results:
        assert_same_bits(result, results[0])
        # As a joiner replays it: without a shard.
        assert bits(step_models.apply(made, arrays(), result, None)) == bits(run_alone(shards=total, steps=1))


def test_the_same_value_summed_and_averaged_is_two_contributions() -> None:
    def both(state: Any, batch: Any) -> Any:
        value = batch["real"][:3]
        mean, total, again = jaxft.pmean(value), jaxft.psum(value), jaxft.psum(value)
        return state | {"w": state["w"] + mean}, (total, again)

    made = cut_programs(both, arrays(), ragged(0, 0))
    assert [spec.operation for spec in made.contribution] == ["mean", "sum"]
    step = jaxft.fault_tolerant(both, None, shards=2)
    state, (total, again) = step(arrays(), lambda _, shard: ragged(0, shard + 2))  # two rows, then three
    np.testing.assert_array_equal(state["w"], [2.0, 2.0, 1.5])
    np.testing.assert_array_equal(total, [2.0, 2.0, 1.0])
    np.testing.assert_array_equal(again, total)


def test_groups_that_differ_in_the_operation_differ_in_layout_and_fingerprint() -> None:
    def step_with(mark: Callable[[Any], Any]) -> Programs:
        return cut_programs(
            lambda state, batch: (state | {"w": mark(batch["x"][0])}, {}),
            arrays(),
            ragged(0, 0),
        )

    one, other = step_with(jaxft.psum), step_with(jaxft.pmean)
    assert one.stages.layout.digest != other.stages.layout.digest
    assert one.fingerprint["contribution"] != other.fingerprint["contribution"]
    assert one.fingerprint["program"] == other.fingerprint["program"]


# Values that have no sum


def refused(function: Callable[[Any, Any], Any], match: str) -> None:
    with pytest.raises(StepError, match=match) as caught:
        cut_only(lambda state, batch: (state, function(state, batch)), arrays(), ragged(0, 0), Shared())
    assert re.search(r"test_psum\.py:\d+", str(caught.value))


def test_what_does_not_depend_on_the_batch_needs_the_number_of_shards() -> None:
    refused(
        lambda state, batch: jaxft.psum({"grads": batch["x"], "mine": state["w"]}),
        r"psum was given a leaf that does not depend on the batch, \['mine'\] .* Pass shards= to",
    )
    refused(
        lambda _state, batch: jaxft.psum((batch["x"], len(batch["x"]))),
        r"batch, \[1\] .*rather than from a shape",
    )
    refused(
        lambda _state, batch: jaxft.psum(jaxft.pmean(batch["x"])),
        "does not depend on the batch, its whole argument",
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_what_does_not_depend_on_the_batch_is_multiplied(shards: int) -> None:
    def train_step(state: Any, batch: Any) -> Any:
        total = jaxft.psum({"rows": 4, "w": state["w"], "x": batch["x"].sum(), "b": jnp.bfloat16(0.3)})
        return state | {"w": total["w"]}, {**total, "again": jaxft.psum(total["x"])}

    step = jaxft.fault_tolerant(train_step, None, shards=shards)
    state, metrics = step(arrays(), ragged)
    assert (int(metrics["rows"]), metrics["rows"].dtype) == (4 * shards, jnp.int32)
    np.testing.assert_array_equal(state["w"], np.full(3, float(shards)))
    assert metrics["again"] == metrics["x"] * shards
    assert (metrics["b"], metrics["b"].dtype) == (
        jnp.bfloat16(float(jnp.bfloat16(0.3)) * shards),
        jnp.bfloat16,
    )


def test_a_mean_of_a_sum_is_the_identity() -> None:
    def identity(state: Any, batch: Any) -> Any:
        return state | {"w": jaxft.pmean(jaxft.psum(batch["x"][0]))}, {}

    assert len(cut_only(identity, arrays(), ragged(0, 0), Shared()).contributions) == 1


def test_a_state_that_derives_from_the_batch() -> None:
    def leak(state: Any, batch: Any) -> Any:
        return state | {"w": batch["x"][0]}, jaxft.psum(batch["x"])

    with pytest.raises(
        StepError, match=r"passing through jaxft\.pmean or jaxft\.psum.*jaxft\.psum\(\.\.\.\)"
    ):
        cut_only(leak, arrays(), ragged(0, 0), Shared())
