"""A stage divided into parts: the same bits, every equation once, and parts that can be started together."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from staged_models import MODELS
from step_models import bits, mostly_long

import jaxft
from jaxft._errors import StepError
from jaxft._programs._build import Shared, cut_only, cut_programs
from jaxft._programs._overlap import _balanced
from jaxft._programs._partition import Cut
from jaxft._programs._programs import Programs
from jaxft._programs._same_bits import check_same_bits
from jaxft._programs._statics import Given

pytestmark = pytest.mark.unoptimized

LAYERS = 8
RATE = 0.1


def batch_for(step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([step, shard]).standard_normal((8, 16), dtype=np.float32)
    return x, np.tanh(x[:, :4] * 2)


def layers() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [np.float32(0.3) * rng.standard_normal((16, 16), np.float32) for _ in range(LAYERS)]


def deep(params: Any, batch: Any) -> Any:
    x, y = batch
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x[:, :4] - y) ** 2)


def remat(params: Any, batch: Any) -> Any:
    layer = jax.checkpoint(lambda x, weight: jnp.tanh(x @ weight))
    x, y = batch
    for weight in params:
        x = layer(x, weight)
    return jnp.mean((x[:, :4] - y) ** 2)


def trained(loss: Any) -> Any:
    def train_step(state: Any, batch: Any, rate: float = RATE) -> Any:
        local, grads = jax.value_and_grad(loss)(state, batch)
        grads, mean = jaxft.pmean((grads, local))
        new = jax.tree.map(lambda one, grad: one - rate * grad, state, grads)
        return new, {"loss": mean, "local": local, "largest": jnp.max(jnp.abs(batch[0]))}

    return train_step


LOSSES = {"deep": deep, "in one jit": jax.jit(deep), "remat": remat}
STEPS: dict[str, tuple[Any, Any]] = {name: (trained(loss), layers) for name, loss in LOSSES.items()}
STEPS |= {name: (model.step(jaxft.pmean), model.state) for name, model in MODELS.items()}


@functools.cache
def built(name: str, overlap: int) -> Programs:
    train_step, state = STEPS[name]
    return cut_programs(
        train_step, state(), batch_for(0, 0), Shared(overlap=overlap), given=Given((), (RATE,), {})
    )


def cut(name: str, overlap: int) -> Cut:
    train_step, state = STEPS[name]
    return cut_only(train_step, state(), batch_for(0, 0), Shared(overlap=overlap), Given((), (RATE,), {}))


def run(programs: Programs, state: Any) -> tuple[list[bytes], Any]:
    """One step of one shard: the bits of the new state, and of the metrics."""
    leaves, means, local = programs.state_leaves(state), [], None
    for run in programs.stages.runs:
        found: list[Any] = []
        for stage in run:
            if local is None:
                made, local = programs.compute(leaves, batch_for(0, 0))
            else:
                made, local = programs.compute_next(leaves, means, local)
            assert len(made) == len(programs.stages.layouts[stage].specs)
            found += made
        means += map(np.asarray, found)
    new, metrics = programs.apply(leaves, means, local)
    return [bits(leaf) for leaf in new], jax.tree.map(bits, metrics)


@pytest.mark.unoptimized(False)
@pytest.mark.parametrize("name", mostly_long(STEPS, "deep", "remat"))
def test_the_same_bits_and_metrics(name: str) -> None:
    whole, divided = built(name, 1), built(name, 3)
    assert divided.stages.count > whole.stages.count or name == "thrice", "nothing there is worth dividing"
    assert len(divided.stages.runs) == whole.stages.count
    assert sorted(divided.contribution, key=repr) == sorted(whole.contribution, key=repr)
    state = STEPS[name][1]
    assert run(divided, state()) == run(whole, state())


@pytest.mark.parametrize("name", ["deep", "sam"])
def test_no_equation_is_computed_twice_or_never(name: str) -> None:
    def count(overlap: int) -> Counter[str]:
        eqns = [eqn for stage in cut(name, overlap).stages for eqn in stage.compute.jaxpr.eqns]
        return Counter(str(eqn.primitive) for eqn in eqns)

    assert count(3) == count(2)
    if name == "deep":
        assert count(3) == count(1), "and as many as in one program"


@pytest.mark.parametrize("name", LOSSES)
def test_parts_have_about_the_same_bytes_the_last_layers_first(name: str) -> None:
    layers_of = [
        [made.path[-1] for made in stage.contributions if made.aval.ndim] for stage in cut(name, 4).stages
    ]
    numbers = [[int(key) for key in keys] for keys in layers_of]
    assert numbers == [[7, 6], [5, 4], [3, 2], [1, 0]]


def test_a_part_makes_only_what_it_and_later_parts_need() -> None:
    first, *others = stages = cut("deep", 4).stages
    products = [
        sum(str(eqn.primitive) == "dot_general" for eqn in stage.compute.jaxpr.eqns) for stage in stages
    ]
    # Forward; for each layer the gradient of its weights; between two layers the gradient of their values.
    assert products == [LAYERS + 3, 4, 4, 4]
    assert first.direct, "metrics are made as soon as they can be"
    assert not any(stage.direct for stage in others)


def test_what_no_later_part_reads_is_not_kept() -> None:
    programs = built("deep", 3)
    leaves = programs.state_leaves(layers())
    _, local = programs.compute(leaves, batch_for(0, 0))
    held = [sum(value is not None for value in local.rest)]
    while local.program + 1 < programs.stages.count:
        _, local = programs.compute_next(leaves, (), local)
        held.append(sum(value is not None for value in local.rest))
    assert held[0] > 0
    assert held == sorted(held, reverse=True)
    assert held[-1] == 0


def test_a_step_with_an_effect_is_refused() -> None:
    def train_step(state: Any, batch: Any, rate: float) -> Any:
        jax.debug.print("sum {}", jnp.sum(batch[0]))
        return trained(deep)(state, batch, rate)

    with pytest.raises(
        StepError, match=r"'debug_(print|callback)' \(.*test_overlap.py:\d+.*leave out `overlap`"
    ):
        cut_only(train_step, layers(), batch_for(0, 0), Shared(overlap=4), Given((), (RATE,), {}))


def test_an_overlap_that_changes_bits_is_refused() -> None:
    """Whether XLA rounds otherwise depends on its version, so a program here does."""
    whole, divided = built("deep", 1), built("deep", 3)
    state, batch = whole.state_leaves(layers()), [*batch_for(0, 0), np.int32(0)]
    mine, theirs = (whole.cut, whole.executables.computes), (divided.cut, divided.executables.computes)
    check_same_bits(mine, theirs, state, batch)

    def rounds_otherwise(*inputs: Any) -> list[jax.Array]:
        first, *others = theirs[1][1](*inputs)
        return [jnp.nextafter(first, jnp.inf), *others]

    programs: Any = [theirs[1][0], rounds_otherwise, theirs[1][2]]
    label = divided.cut.stages[1].contributions[0].label
    with pytest.raises(StepError) as refused:
        check_same_bits(mine, (divided.cut, programs), state, batch)
    assert f"computed by 3 programs, {label!r} has other bits than computed by 1" in str(refused.value)
    assert "another number as `overlap`" in str(refused.value)


def test_the_number_of_the_shard_reaches_later_parts() -> None:
    """It is an input like the batch, which every part may read."""

    def train_step(state: Any, batch: Any) -> Any:
        first, second = state
        made = jnp.sin(batch[0][0] * 2.0)
        shard = jaxft.shard_index().astype(jnp.float32)
        return (first - jaxft.pmean(made), second - jaxft.pmean(jnp.cumsum(made * made) + shard)), {}

    state = (jnp.zeros(16), jnp.zeros(16))
    programs = cut_programs(train_step, state, batch_for(0, 0), Shared(overlap=2))
    assert [len(stage.contributions) for stage in programs.cut.stages] == [1, 1]
    assert programs.cut.depends_on_shard
    leaves = programs.state_leaves(state)
    _, local = programs.compute(leaves, batch_for(0, 0), 5)
    (found,), _ = programs.compute_next(leaves, (), local)
    made = jnp.sin(batch_for(0, 0)[0][0] * 2.0)
    np.testing.assert_allclose(found, jnp.cumsum(made * made) + 5.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([1, 1, 1, 1], [[0, 1], [2, 3]]),
        ([1, 1, 8], [[0, 1], [2]]),
        ([8, 1, 1], [[0], [1, 2]]),
        ([1, 0, 8], [[0, 1, 2]]),
        ([8, 1, 0], [[0, 1, 2]]),
        ([0, 4, 4], [[0, 1], [2]]),
        ([0, 0], [[0, 1]]),
        ([5], [[0]]),
    ],
)
def test_groups_of_about_the_same_size(sizes: list[int], groups: list[list[int]]) -> None:
    numbers = range(len(sizes))
    assert _balanced(numbers, numbers, sizes, 2) == groups
    assert _balanced(numbers, [7] * len(sizes), sizes, 2) == [[*numbers]], (
        "contributions that are ready together stay together"
    )


@pytest.mark.parametrize("overlap", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_is_refused(overlap: Any) -> None:
    with pytest.raises(jaxft.ConfigurationError, match="overlap, the number of programs"):
        jaxft.fault_tolerant(trained(deep), None, overlap=overlap)


def test_groups_must_agree_on_it() -> None:
    assert built("deep", 1).fingerprint["overlap"] == "1"
    assert built("deep", 3).fingerprint["overlap"] == "3, 4 + 2 + 3 leaves"
    assert built("deep", 1).fingerprint["program"] != built("deep", 3).fingerprint["program"]


def by_shape(state: Any, batch: Any) -> Any:
    """A step whose gradients are ready in another order if the batch is large."""
    x = batch[0]
    first, second = (jnp.sum(part, axis=0) for part in ((x @ state[0], x @ state[1])))
    if len(x) > 8:
        second, first = (jnp.sum(part, axis=0) for part in ((x @ state[1], x @ state[0])))
    grads = jaxft.pmean((first, second))
    return jax.tree.map(lambda one, grad: one - grad[:, None], state, grads), {}


def large() -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.concatenate([rows, rows]) for rows in batch_for(0, 0))  # type: ignore[return-value]


def test_all_batches_are_divided_as_the_first_one() -> None:
    state = (jnp.ones((16, 16)), jnp.ones((16, 16)))
    alone = [
        cut_only(by_shape, state, batch, Shared(overlap=2)).labels for batch in (batch_for(0, 0), large())
    ]
    assert alone[0] != alone[1]
    shared = Shared(overlap=2)
    for batch in (batch_for(0, 0), large()):
        assert cut_only(by_shape, state, batch, shared).labels == alone[0]
    step = jaxft.fault_tolerant(by_shape, None, overlap=2)
    for number in range(2):
        state, _ = step(state, large() if number % 2 else batch_for(0, 0))
    assert step.step == 2


def test_a_batch_that_is_scanned_over_otherwise_is_refused() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        x = batch[0]
        if len(x) > 8:
            made = jnp.stack([x.sum(axis=0)] * 4)
        else:
            _, made = lax.scan(lambda carry, _: (carry, x.sum(axis=0)), 0.0, None, length=4)
        return state - jaxft.pmean(made), {}

    step = jaxft.fault_tolerant(train_step, None, overlap=2)
    state, _ = step(jnp.zeros((4, 16)), batch_for(0, 0))
    with pytest.raises(StepError, match="With overlap=2, the gradients of this batch come in other parts"):
        step(state, large())


def test_a_step_that_is_not_deterministic_is_said_to_be_that() -> None:
    calls: list[int] = []

    def noise(x: np.ndarray) -> np.ndarray:
        calls.append(1)
        return np.float32(len(calls)) * np.asarray(x)

    def train_step(state: Any, batch: Any) -> Any:
        given = jnp.asarray(batch[0][0])
        made = jax.pure_callback(noise, jax.ShapeDtypeStruct((16,), jnp.float32), given)
        return state - jaxft.pmean(made) - jaxft.pmean(lax.cumsum(given)), {}

    with pytest.raises(StepError, match=r"it is not deterministic.*xla_gpu_deterministic_ops"):
        cut_programs(train_step, jnp.zeros(16), batch_for(0, 0), Shared(overlap=2))
