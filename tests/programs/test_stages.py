"""Steps with several exchanges: what each stage computes, and that nothing but the stages knows of them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from staged_models import MODELS
from step_models import bits, mostly_long

import jaxft
from jaxft._errors import StepError
from jaxft._programs._axis import Axis
from jaxft._programs._build import Shared, cut_programs
from jaxft._programs._programs import Programs
from jaxft._programs._statics import Given

SHARDS = 4
RATE = 0.1


def batch_for(step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([step, shard]).standard_normal((8, 16), dtype=np.float32)
    return x, np.tanh(x[:, :4] * 2)


def built(name: str) -> Programs:
    model = MODELS[name]
    return cut_programs(model.step(jaxft.pmean), model.state(), batch_for(0, 0), given=Given((), (RATE,), {}))


@pytest.mark.parametrize("name", mostly_long(MODELS, "gan"))
def test_the_values_of_jax(name: str) -> None:
    """`jax.vmap` with a named axis is JAX's own meaning of such a step."""
    model = MODELS[name]
    step = jaxft.fault_tolerant(model.step(jaxft.pmean), None, shards=SHARDS, static_argnums=2)
    whole = jax.jit(
        jax.vmap(
            lambda state, batch: model.step(lambda tree: lax.pmean(tree, "s"))(state, batch, RATE),
            in_axes=(None, 0),
            axis_name="s",
        )
    )
    state, reference = model.state(), model.state()
    for number in range(3):
        state, metrics = step(state, batch_for, RATE)
        batches = jax.tree.map(lambda *rows: np.stack(rows), *(batch_for(number, i) for i in range(SHARDS)))
        reference, expected = jax.tree.map(lambda leaf: leaf[0], whole(reference, batches))
        found, wanted = jax.tree.leaves((state, metrics)), jax.tree.leaves((reference, expected))
        for one, other in zip(found, wanted, strict=True):
            if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", mostly_long(MODELS, "gan", "sam"))
def test_a_joiner_replays_all_means_in_one(name: str) -> None:
    """Stage by stage on one shard; then apply alone, with the same bits, on the means that a donor has logged."""
    programs, model = built(name), MODELS[name]
    state, means = programs.state_leaves(model.state()), []
    contribution, local = programs.compute(state, batch_for(0, 0))
    for _ in range(model.stages - 1):
        means += map(np.asarray, contribution)
        contribution, local = programs.compute_next(state, means, local)
    means += map(np.asarray, contribution)
    assert len(means) == len(programs.contribution)
    assert programs.stages.count == len(programs.stages.layouts) == model.stages
    assert [layout.specs for layout in programs.stages.layouts] != [programs.contribution]
    ours, metrics = programs.apply(state, means, local)
    theirs, blank = programs.apply(programs.state_leaves(model.state()), means, None)
    assert [bits(leaf) for leaf in ours] == [bits(leaf) for leaf in theirs]
    assert np.isfinite(metrics["loss"])
    assert metrics["loss"] == blank["loss"]
    assert all(np.isnan(blank[name]).all() for name in ("local", "there", "apart") if name in blank)
    assert all(np.isfinite(metrics[name]).all() for name in metrics)


def test_stages_consume_nothing_and_read_the_batch_once() -> None:
    programs = built("gan")
    first, second = programs.cut.stages
    assert second.compute.batch == ()
    assert second.compute.rest, "it goes on from what the first has computed"
    state = programs.state_leaves(MODELS["gan"].state())
    contribution, local = programs.compute(state, batch_for(0, 0))
    runs = [programs.compute_next(state, contribution, local)[0] for _ in range(2)]
    assert [bits(leaf) for leaf in runs[0]] == [bits(leaf) for leaf in runs[1]]
    assert len(first.contributions) == len(MODELS["gan"].state()["d"]) + 1


def test_no_two_exchanges_have_the_same_layout() -> None:
    """SAM exchanges the same gradients twice, and a frame must say of which exchange it is."""
    layouts = built("sam").stages.layouts
    shapes = [[spec.shape for spec in layout.specs] for layout in layouts]
    assert shapes[0][:2] == shapes[1]
    assert len({layout.digest for layout in layouts}) == 2


def test_what_can_go_earlier_does() -> None:
    """A mean of the batch that is written after the first exchange is part of the first."""

    def train_step(state: Any, batch: Any) -> Any:
        first = jaxft.pmean(batch[0])
        return state + jaxft.pmean(batch[1]).sum() + first.sum(), jaxft.pmean((batch[0] - first).sum())

    stages = cut_programs(train_step, jnp.zeros(()), batch_for(0, 0)).cut.stages
    assert [[one.label for one in stage.contributions] for stage in stages] == [
        ["pmean#0", "pmean#1"],
        ["pmean#2"],
    ]


def test_sums_and_means_in_later_stages() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        total = jaxft.psum(batch)
        above = jaxft.psum((batch * SHARDS > total).astype(jnp.int32))
        return state + above, jaxft.pmean(batch - total / SHARDS)

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
    state, metrics = step(jnp.int32(0), lambda step, shard: np.float32(2**shard))
    assert (int(state), float(metrics)) == (2, 0.0)


def test_each_effect_happens_once_in_each_shard(capfd: pytest.CaptureFixture[str]) -> None:
    def train_step(state: Any, batch: Any) -> Any:
        first = jaxft.pmean(batch)
        jax.debug.print("first {}", first)
        jax.debug.print("own {}", batch)
        second = jaxft.pmean((batch - first) ** 2)
        jax.debug.print("between {}", batch - first)
        jax.debug.print("after {}", batch - second)
        return state + second, {}

    step = jaxft.fault_tolerant(train_step, None, shards=2)
    step(jnp.zeros(()), lambda step, shard: np.float32(shard))
    jax.effects_barrier()
    lines = sorted(capfd.readouterr().out.split("\n")[:-1])
    assert lines == [
        "after -0.25",
        "between -0.5",
        "between 0.5",
        "first 0.5",
        "own 0.0",
        "own 1.0",
    ]


def test_a_state_may_not_derive_from_a_later_stage_of_a_shard() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        first = jaxft.pmean(batch)
        apart = batch - first
        return state + apart, jaxft.pmean(apart**2)

    with pytest.raises(StepError, match=r"state derives from the batch .*test_stages\.py"):
        cut_programs(train_step, jnp.zeros(()), np.float32(1))


@pytest.mark.parametrize("split", [lax.scan, "while"])
def test_one_equation_may_serve_several_stages(split: Any) -> None:
    """A loop that carries a value of the batch beside one of an earlier mean: each stage takes its own."""

    def train_step(state: Any, batch: Any) -> Any:
        first = jaxft.pmean(batch)
        carry = (batch, first, batch - first, state)

        def turn(c: Any) -> Any:
            return c[0] * 2.0, c[1] * 3.0, c[2] * 2.0, c[3] + 1.0

        if split is lax.scan:
            out, _ = lax.scan(lambda c, _: (turn(c), None), carry, length=2)
        else:
            out = lax.fori_loop(0, 2, lambda _, c: turn(c), carry)
        return out[3] + out[1] + jaxft.pmean(out[2] ** 2), {"own": out[0], "zero": jaxft.pmean(out[0])}

    step = jaxft.fault_tolerant(train_step, None, shards=2)
    state, metrics = step(jnp.float32(0), lambda step, shard: np.float32(shard))
    # first 0.5; times 9; twice more in the state; four times (-0.5, 0.5) squared
    assert (float(state), float(metrics["own"]), float(metrics["zero"])) == (2.0 + 4.5 + 4.0, 0.0, 2.0)


@pytest.mark.long
@pytest.mark.parametrize("width", [4])
def test_a_batch_norm_over_all_shards(width: int) -> None:
    """flax' own, with `axis_name`, differentiated: JAX transposes the means, and each becomes an exchange."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(width)(x)
            x = nn.BatchNorm(use_running_average=False, axis_name="batch")(x)
            return nn.Dense(4)(nn.relu(x))

    net = Net()
    draw = jax.jit(jax.vmap(lambda x: net.init(jax.random.key(0), x), axis_name="batch"))
    begin = draw(batch_for(0, 0)[0][None])
    begin = jax.tree.map(lambda leaf: leaf[0], begin)

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            out, updated = net.apply({**state, "params": params}, batch[0], mutable=["batch_stats"])
            return jnp.mean((out - batch[1]) ** 2), updated["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        grads, value = lax.pmean((grads, value), "batch")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "batch_stats": stats}, value

    programs = cut_programs(train_step, begin, batch_for(0, 0), Shared(axis=Axis("batch", SHARDS)))
    assert programs.stages.count == 3, "forward, backward, gradients"
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, axis_name="batch")
    batches = jax.tree.map(lambda *rows: np.stack(rows), *(batch_for(0, i) for i in range(SHARDS)))
    whole = jax.jit(jax.vmap(train_step, in_axes=(None, 0), axis_name="batch"))
    expected, value = whole(begin, batches)
    after, loss = step(begin, batch_for)
    np.testing.assert_allclose(loss, value[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other[0], rtol=1e-4, atol=1e-6)
