"""Steps with several exchanges: what each stage computes, and that nothing but the stages knows of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from staged_models import MODELS
from step_models import assert_values_of_vmap, bits, mostly_long

import jaxft
from jaxft._errors import StepError
from jaxft._programs._build import Shared, cut_only, cut_programs
from jaxft._programs._programs import Programs
from jaxft._programs._statics import Given

pytestmark = pytest.mark.unoptimized

SHARDS = 4
RATE = 0.1


def batch_for(step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([step, shard]).standard_normal((8, 16), dtype=np.float32)
    return x, np.tanh(x[:, :4] * 2)


@functools.cache
def built(name: str) -> Programs:
    model = MODELS[name]
    return cut_programs(model.step(jaxft.pmean), model.state(), batch_for(0, 0), given=Given((), (RATE,), {}))


@pytest.mark.parametrize("name", mostly_long(MODELS, "gan"))
def test_the_values_of_jax(name: str) -> None:
    model = MODELS[name]
    train_step = model.step(lambda tree: lax.pmean(tree, "s"))
    assert_values_of_vmap(
        lambda state, batch: train_step(state, batch, RATE),
        model.state,
        batch_for,
        axis="s",
        shards=SHARDS,
        steps=3,
    )


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
    assert second.compute.rest, "it continues from the results of the first"
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

    cut = cut_only(train_step, jnp.zeros(()), batch_for(0, 0), Shared())
    assert cut.labels == (("pmean#0", "pmean#1"), ("pmean#2",))


def test_sums_and_means_in_later_stages() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        total = jaxft.psum(batch)
        above = jaxft.psum((batch * SHARDS > total).astype(jnp.int32))
        return state + above, jaxft.pmean(batch - total / SHARDS)

    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
    state, metrics = step(jnp.int32(0), lambda _step, shard: np.float32(2**shard))
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
    step(jnp.zeros(()), lambda _step, shard: np.float32(shard))
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
