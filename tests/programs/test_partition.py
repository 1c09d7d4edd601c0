"""Where a step can be cut, and the error where it cannot."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from jax.experimental import io_callback

import jaxft
from jaxft._errors import StepError
from jaxft._programs._build import Shared, cut_only, cut_programs
from jaxft._programs._programs import Programs

pytestmark = pytest.mark.unoptimized

STATE = {"w": np.ones(3, np.float32), "key": jax.random.key(0), "n": np.int32(0)}
BATCH = np.arange(3, dtype=np.float32)


def cut(train_step: Callable[..., Any]) -> Programs:
    return cut_programs(train_step, jax.tree.map(jnp.asarray, STATE), BATCH)


def sgd(grads: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step that subtracts what `grads(state, batch)` gives."""

    def train_step(state: Any, batch: Any) -> Any:
        return state | {"w": state["w"] - grads(state, batch)}, {}

    return train_step


def refused(train_step: Callable[..., Any], match: str, **arguments: Any) -> str:
    arguments = {"state": jax.tree.map(jnp.asarray, STATE), "batch": BATCH, "shared": Shared(), **arguments}
    with pytest.raises(StepError, match=match) as caught:
        cut_only(train_step, **arguments)
    return str(caught.value)


def here(text: str) -> int:
    """The line of this file on which a text stands."""
    with open(__file__) as lines:
        return next(
            number for number, line in enumerate(lines, start=1) if text in line and "here(" not in line
        )


# Without a pmean, or where it does not matter


def test_no_pmean() -> None:
    refused(
        sgd(lambda state, _batch: state["w"]),
        r"has no jaxft\.pmean and no jaxft\.psum.*grads, loss = jaxft\.pmean",
    )


def test_nothing_depends_on_the_batch() -> None:
    refused(
        sgd(lambda state, _batch: jaxft.pmean(state["w"])), r"depends on the batch .*test_partition\.py:\d+"
    )


# Where a pmean cannot be cut


def in_while(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c[0] < 1.0, lambda c: jaxft.pmean(c), x)


def in_shard_map(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(jaxft.pmean, mesh=mesh, in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (in_while, "while"),
        (in_shard_map, "shard_map"),
        (jax.jit(in_while), "while"),
    ],
)
def test_pmean_inside(function: Callable[..., Any], primitive: str) -> None:
    text = refused(sgd(lambda _state, batch: function(batch)), "cannot be cut in two")
    assert re.search(rf"is inside '({primitive})' \(.*test_partition\.py:\d+", text)
    assert "accumulate first, then exchange" in text


def test_a_mean_that_only_some_steps_need() -> None:
    """A Hessian that is estimated every few steps, as Sophia does: a zero mean in the others, which nothing reads."""

    def train_step(state: Any, batch: Any) -> Any:
        now = state["n"] % 2 == 0
        local = jax.lax.cond(now, lambda: batch**2, lambda: jnp.zeros(3))
        mean = jaxft.pmean(local)
        return {"n": state["n"] + 1, "h": jax.lax.cond(now, lambda: mean, lambda: state["h"])}, {}

    step = jaxft.fault_tolerant(train_step, None)
    state: Any = {"n": jnp.int32(0), "h": jnp.zeros(3)}
    for number in range(4):
        state, _ = step(state, np.full(3, number + 1.0, np.float32))
    np.testing.assert_array_equal(state["h"], [9.0] * 3)


def test_under_grad() -> None:
    refused(
        sgd(lambda state, batch: jax.grad(lambda w: jaxft.pmean(w * batch).sum())(state["w"])),
        "take the gradient first",
    )


# Where a new state may come from


@pytest.mark.parametrize("key_of", [jax.random.key, jax.random.PRNGKey])
def test_a_key_with_the_number_of_the_shard_is_told_to_be_split_first(key_of: Any) -> None:
    """A mean, as for other leaves, cannot help."""

    def train_step(state: Any, batch: Any) -> Any:
        key, used = jax.random.split(jax.random.fold_in(state["key"], jaxft.shard_index()))
        noise = jax.random.normal(used, batch.shape)
        return {"w": state["w"] + jaxft.pmean(batch + noise), "key": key}, {}

    state = {"w": jnp.zeros(3), "key": key_of(0)}
    text = refused(train_step, r"leaf \['key'\] .*or from the number of the shard", state=state)
    assert "split it first, fold the number of the shard into the part that is used" in text
    assert "jaxft.pmean(...)" not in text


def test_leak_names_leaf_line_and_remedy() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        update = jaxft.pmean(batch)
        leaked = state["w"] + batch  # the leak
        return state | {"w": leaked + update}, {}

    text = refused(train_step, r"leaf \['w'\] derives from the batch")
    assert "jaxft.pmean(...)" in text
    line = here('return state | {"w": leaked + update}, {}')
    assert f"test_partition.py:{line} (" in text


def test_leak_of_the_batch_itself() -> None:
    refused(
        lambda state, batch: (state | {"w": batch["x"]}, jaxft.pmean(batch["x"])),
        r"\['w'\] .* it is the leaf \['x'\] of the batch",
        batch={"x": BATCH},
    )


@pytest.mark.parametrize(
    "leak",
    [
        lambda w, batch: jax.jit(lambda a, b: (b, a))(w, batch)[0],
        lambda w, batch: jax.lax.scan(lambda c, x: (c + x, None), w, batch)[0],
        # into the first carry by way of the second, in the second turn
        lambda w, batch: jax.lax.scan(lambda c, _: ((c[1], batch), None), (w, w), length=2)[0][0],
        lambda w, batch: jax.lax.while_loop(lambda c: c[0] < batch[0], lambda c: c + 1.0, w),
        lambda w, batch: jax.lax.cond(batch[0] > 0, lambda: w, lambda: 2.0 * w),
        lambda w, batch: jax.checkpoint(lambda a, b: a + b)(w, batch),
        lambda w, batch: jnp.where(batch > 0, w, 0.0),
        lambda w, batch: jnp.sort(jnp.stack([w, batch]))[0],
        lambda w, _: w + io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)),
    ],
)
def test_leak_through(leak: Callable[..., Any]) -> None:
    def train_step(state: Any, batch: Any) -> Any:
        return state | {"w": leak(state["w"], batch) + jaxft.pmean(batch)}, {}

    refused(train_step, r"leaf \['w'\] derives from the batch")


def doubled_beyond(limit: float, x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda y: y[1] < limit, lambda y: y * 2.0, x)


@functools.partial(jax.custom_vjp)
def two_ways(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w * 2.0, w * batch


two_ways.defvjp(lambda w, b: (two_ways(w, b), b), lambda b, g: (g[0] * 2.0 + g[1] * b, g[1]))


@pytest.mark.parametrize(
    "split",
    [
        jax.jit(lambda w, batch: (w * 2.0, w * batch)),
        jax.checkpoint(lambda w, batch: (w * 2.0, w * batch)),
        two_ways,
        lambda w, batch: jax.lax.scan(lambda c, x: ((c[0] * 2.0, c[1] + x), None), (w, batch), batch)[0],
        lambda w, batch: jax.lax.cond(w[0] > 0, lambda: (w * 2.0, w * batch), lambda: (w, batch)),
        lambda w, batch: jax.lax.fori_loop(0, 2, lambda _, c: (c[0] * 2.0, c[1] + batch), (w, batch)),
        lambda w, batch: jax.lax.while_loop(
            lambda c: c[0][0] < 5.0, lambda c: (c[0] * 2.0, c[1]), (w, batch)
        ),
        # fed zeros in place of the batch, the inner loop would not end
        lambda w, batch: jax.lax.while_loop(
            lambda c: c[0][0] < 5.0, lambda c: (c[0] * 2.0, doubled_beyond(10.0, c[1])), (w, batch)
        ),
        lambda w, batch: jax.lax.scan(
            lambda c, _x: ((c[0] * 2.0, doubled_beyond(10.0, c[1])), None), (w, batch), batch
        )[0],
        lambda w, batch: jax.lax.optimization_barrier((w * 2.0, batch)),
        # nested loops, with a callback
        jax.jit(
            lambda w, batch: jax.lax.scan(
                lambda c, _x: (jax.jit(lambda a, b: (a * 2.0, jax.pure_callback(np.sin, b, b)))(*c), None),
                (w, batch),
                length=2,
            )[0]
        ),
    ],
)
def test_results_are_told_apart(split: Callable[..., Any]) -> None:
    """The same equation makes a value of the state and a value of the batch: only the former may stay."""

    def train_step(state: Any, batch: Any) -> Any:
        ours, theirs = split(state["w"], batch)
        return state | {"w": ours}, jaxft.pmean(theirs)

    programs = cut(train_step)
    expected = jax.jit(split)(STATE["w"], BATCH)
    state = jax.tree.map(jnp.asarray, STATE)
    contribution, local = step_models.compute(programs, state, BATCH)
    np.testing.assert_array_equal(contribution[0], expected[1])
    state, _ = step_models.apply(programs, state, contribution, local)
    np.testing.assert_array_equal(state["w"], expected[0])
    assert programs.cut.apply.batch == ()
    refused(
        lambda state, batch: (state | {"w": split(state["w"], batch)[1]}, jaxft.pmean(batch)), "derives from"
    )


# Several averages


def test_independent_averages_are_one_exchange() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        first = jaxft.pmean({"a": batch, "b": batch * 2.0})
        second = jaxft.pmean(batch.sum())
        return state | {"w": state["w"] - first["a"] - first["b"]}, second

    programs = cut(train_step)
    assert [spec.path for spec in programs.contribution] == ["pmean#0['a']", "pmean#0['b']", "pmean#1"]


def test_the_same_value_twice_is_sent_once() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        grads = batch * 2.0
        return state | {"w": jaxft.pmean(grads)}, jaxft.pmean([grads, grads])

    programs = cut(train_step)
    assert len(programs.contribution) == 1
    state, metrics = step_models.apply(
        programs, jax.tree.map(jnp.asarray, STATE), [np.full(3, 7.0, np.float32)], None
    )
    np.testing.assert_array_equal([state["w"], *metrics], np.full((3, 3), 7.0))


def test_mean_of_a_mean_is_the_identity() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        mean = jaxft.pmean(batch)
        again, ours = jaxft.pmean((mean * 2.0, state["w"]))
        return state | {"w": again + ours}, jaxft.pmean(ours)

    programs = cut(train_step)
    assert len(programs.contribution) == 1
    state = jax.tree.map(jnp.asarray, STATE)
    state, metrics = step_models.apply(programs, state, [np.full(3, 7.0, np.float32)], None)
    np.testing.assert_array_equal(state["w"], np.full(3, 15.0))
    np.testing.assert_array_equal(metrics, np.ones(3))


def test_a_nested_jit_twice() -> None:
    average = jax.jit(lambda x: jaxft.pmean(x * 2.0) + np.arange(3.0, dtype=np.float32))

    def train_step(state: Any, batch: Any) -> Any:
        return state | {"w": average(batch) - average(batch + 1.0)}, {}

    programs = cut(train_step)
    assert len(programs.contribution) == 2
    contribution, local = step_models.compute(programs, state := jax.tree.map(jnp.asarray, STATE), BATCH)
    state, _ = step_models.apply(programs, state, contribution, local)
    np.testing.assert_array_equal(state["w"], [-2.0] * 3)


# Effects


def test_ordered_effects() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        io_callback(lambda _: None, None, batch, ordered=True)
        return state, jaxft.pmean(batch)

    refused(train_step, r"ordered effect, 'io_callback' \(.*test_partition\.py:\d+.*ordered=False")


def test_refs_outside_the_step() -> None:
    counter = jax.new_ref(jnp.zeros(()))

    def train_step(state: Any, batch: Any) -> Any:
        counter[...] += 1.0
        return state, jaxft.pmean(batch)

    refused(
        train_step, r"mutable array, a jax Ref \(.*test_partition\.py:\d+.*Pass the value through the state"
    )


def tripled(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.zeros_like(x))
    other = jax.new_ref(jnp.ones_like(x))

    def body(_: Any, carry: int) -> int:
        ref[...] += x * other[...]
        return carry

    jax.lax.fori_loop(0, 3, body, 0)
    return jax.freeze(ref)


def test_refs_on_one_side_of_an_exchange() -> None:
    step = jaxft.fault_tolerant(sgd(lambda _state, batch: tripled(jaxft.pmean(tripled(batch)))), None)
    state, _ = step(STATE, BATCH)
    np.testing.assert_array_equal(state["w"], STATE["w"] - 9 * BATCH)
    refused(
        lambda state, batch: (state | {"w": tripled(batch)}, jaxft.pmean(batch)), "derives from the batch"
    )


def test_refs_on_both_sides_of_an_exchange() -> None:
    def across(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] = jaxft.pmean(ref[...])
        return jax.freeze(ref)

    refused(sgd(lambda _state, batch: across(batch)), r"test_partition\.py:\d+.*before and after an exchange")


def test_each_print_happens_once(capfd: pytest.CaptureFixture[str]) -> None:
    def train_step(state: Any, batch: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            jax.debug.print("inside {}", x)
            return (carry[0] + 1, carry[1] + x), None

        (n, total), _ = jax.lax.scan(body, (state["n"], jnp.zeros(())), batch)
        mean = jaxft.pmean(total)
        jax.debug.print("of the state {}", state["n"])
        jax.debug.print("of the batch {}", total)
        jax.debug.print("of the mean {}", mean)
        jax.debug.print("of both {}", mean - total)
        jax.debug.callback(lambda x: print("callback", x), total)  # noqa: T201
        return state | {"n": n}, {}

    step = jaxft.fault_tolerant(train_step, None)
    state, _ = step(STATE, BATCH)
    jax.effects_barrier()
    lines = sorted(capfd.readouterr().out.split("\n")[:-1])
    assert lines == [
        "callback 3.0",
        "inside 0.0",
        "inside 1.0",
        "inside 2.0",
        "of both 0.0",
        "of the batch 3.0",
        "of the mean 3.0",
        "of the state 0",
    ]
    assert state["n"] == 3
