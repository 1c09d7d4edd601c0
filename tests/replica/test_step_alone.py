"""The callable step, without a manager: signatures, static arguments, shards, and refusals."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from step_models import bits, mlp_adam, numpy_batch

import jaxft
from jaxft._arrays._layout import Layout
from jaxft._errors import ConfigurationError, StepError
from jaxft._replica._call import Call
from jaxft._replica._engine import Engine
from jaxft._replica._steps import LoopWatch


class Counted:
    """A step that counts how often it is traced."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.traces = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self.step(*args, **kwargs)


def train_step(state: Any, batch: Any, scale: float = 1.0, *, train: bool = True) -> Any:
    """Static arguments that matter only before the average."""
    loss, grads = jax.value_and_grad(step_models.mlp_loss)(state, batch)
    grads, loss = jaxft.pmean((jax.tree.map(lambda g: g * scale, grads), loss if train else loss * 0.0))
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


# Signatures


def test_one_trace_for_each_shape_of_the_batch() -> None:
    counted = Counted(mlp_adam().step(jaxft.pmean))
    step, state = jaxft.fault_tolerant(counted, None), mlp_adam().state()
    for rows in (8, 8, 4, 8, 4, 4):
        state, _ = step(state, numpy_batch(0, rows=rows))
    assert counted.traces == 2
    applies = {id(programs.executables.apply) for programs in step._cache.all}
    assert len(step._cache.all) == 2
    assert len(applies) == 1, "one apply serves batches of all shapes"


def test_metrics_that_are_numbers_make_no_other_programs() -> None:
    """The last batch of an epoch has fewer rows, and logs say how many."""

    def numbers(batch: Any) -> Any:
        rows = batch.shape[0]
        return {"rows": rows, "half": rows / 2, "float32": np.float32(rows), "bfloat16": jnp.bfloat16(rows)}

    step = jaxft.fault_tolerant(
        lambda state, batch: (state + jaxft.pmean(jnp.mean(batch)), {**numbers(batch), "whole": True}), None
    )
    state: Any = jnp.zeros(())
    for rows in (4, 3, 4, 1):
        batch = np.ones(rows, np.float32)
        state, metrics = step(state, batch)
        expected = jax.jit(lambda batch: {**numbers(batch), "whole": True})(batch)
        assert jax.tree.map(jax.typeof, metrics) == jax.tree.map(jax.typeof, expected)
        assert bits(metrics) == bits(expected)
    assert len({programs.executables.apply_key for programs in step._cache.all}) == 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        pytest.param(0.3, lambda decay: decay * jnp.float32(1), id="no longer weak"),
        pytest.param(np.float32(0.3), lambda _decay: 0.3, id="weak from then on"),
    ],
)
def test_weak_types_that_change_make_no_other_programs(first: Any, later: Any) -> None:
    """A step is replayed by groups that have other batches, or come later: all must round alike."""

    @jax.numpy_dtype_promotion("standard")
    def decaying(state: Any, batch: Any, scale: float) -> Any:
        mean, decay = jaxft.pmean(jnp.mean(batch) * scale), state["decay"]
        wide = state["wide"] + mean
        narrow = state["narrow"] * decay  # with a weak factor in bfloat16, else in float32
        return {"narrow": narrow.astype(jnp.bfloat16), "wide": wide, "decay": later(decay)}, {}

    def run(rows: list[int], scales: list[float]) -> Any:
        step = jaxft.fault_tolerant(decaying, None, static_argnames="scale")
        narrow = jax.random.normal(jax.random.key(0), (64,), jnp.bfloat16)
        state: Any = {"narrow": narrow, "wide": jnp.zeros(()), "decay": first}
        for each, scale in zip(rows, scales, strict=True):
            state, _ = step(state, np.ones(each, np.float32), scale=scale)
        assert len({programs.executables.apply_key for programs in step._cache.all}) == 1
        return bits(state["narrow"])

    alike = run([4, 4, 4], [1.0, 1.0, 1.0])
    assert run([4, 8, 2], [1.0, 1.0, 1.0]) == alike
    assert run([4, 4, 4], [1.0, 2.0, 3.0]) == alike


def some_with_a_score(score: Any) -> Any:
    """A step that is given validation data in some batches only; `score` of the loss is its metric in the others."""

    def train_step(state: Any, batch: Any) -> Any:
        loss = jnp.mean(batch["train"])
        metrics = {"loss": loss, "score": jnp.max(batch["held_out"]) if "held_out" in batch else score(loss)}
        metrics = jaxft.pmean(metrics)
        return state + metrics["loss"], metrics

    return train_step


def with_a_score(number: int, shard: int) -> Any:
    batch = {"train": np.full(4, shard + 1.0, np.float32)}
    return {**batch, "held_out": np.full(2, shard, np.float32)} if number % 2 else batch


def test_what_only_some_batches_exchange_is_named() -> None:
    """A constant is the same in all shards, so it is not exchanged, although it is given to pmean."""
    step = jaxft.fault_tolerant(some_with_a_score(lambda _loss: jnp.zeros(())), None, shards=4)
    state, _ = step(jnp.zeros(()), with_a_score)
    with pytest.raises(
        StepError, match=r"this one exchanges float32\[\] .*'score'\].*that one does not.*`0 \* loss`"
    ):
        step(state, with_a_score)


def test_batches_as_under_jit() -> None:
    """numpy arrays, also of a wider type, and JAX arrays with and without a chosen placement."""
    model = mlp_adam()
    counted = Counted(model.step(jaxft.pmean))
    step, plain = jaxft.fault_tolerant(counted, None), jax.jit(model.step(step_models.identity))
    state, expected = model.state(), model.state()
    for number, convert in enumerate(
        [
            lambda x: x,
            jnp.asarray,
            lambda x: jax.device_put(x, jax.devices()[0]),
            lambda x: x.astype(np.float64),
            lambda x: np.asfortranarray(x),
        ]
    ):
        batch = jax.tree.map(convert, model.batch(number))
        state, metrics = step(state, batch)
        expected, expected_metrics = plain(expected, batch)
        assert bits((state, metrics)) == bits((expected, expected_metrics))
    assert counted.traces == 1


def test_numbers_in_the_state_keep_their_weak_type() -> None:
    def scaled(state: Any, batch: Any) -> Any:
        w = state["w"] - jaxft.pmean(batch) * state["rate"]
        return {"w": w, "rate": state["rate"] * 0.5, "n": state["n"] + 1}, {}

    counted = Counted(scaled)
    step = jaxft.fault_tolerant(counted, None)
    state: Any = {"w": np.zeros(2, jnp.bfloat16), "rate": 0.5, "n": 0}
    for _ in range(3):
        state, _ = step(state, jnp.ones(2, jnp.bfloat16))
    assert state["w"].dtype == jnp.bfloat16
    assert state["n"] == 3
    assert counted.traces == 1


def test_a_step_trains_one_state() -> None:
    """Without a manager as with one: another state, of other types or not, is another run."""
    step = jaxft.fault_tolerant(train_step, None)
    step(step_models.mlp_params(), numpy_batch(0))
    with pytest.raises(ConfigurationError, match=r"leaf \['b1'\] has other values .* make another step"):
        step(step_models.mlp_params(), numpy_batch(0))
    with pytest.raises(ConfigurationError, match=r"other types|other values"):
        step(step_models.mlp_params(width=8), numpy_batch(0))
    with pytest.raises(ConfigurationError, match="another structure"):
        step({"w": jnp.ones(3)}, numpy_batch(0))
    assert step.step == 1


def test_apply_must_not_depend_on_the_shape_of_the_batch() -> None:
    def summed(state: jax.Array, batch: jax.Array) -> Any:
        return state + jaxft.pmean(batch.sum()) / batch.size, {}

    step = jaxft.fault_tolerant(summed, None)
    state, _ = step(jnp.zeros(()), np.ones(4, np.float32))
    with pytest.raises(StepError, match=r"depends on the batch's structure, shape.*before jaxft\.pmean"):
        step(state, np.ones(3, np.float32))


# Static arguments


@pytest.mark.parametrize(
    "declared",
    [
        {"static_argnums": 2, "static_argnames": "train"},
        {"static_argnums": (2,), "static_argnames": ("train",)},
        {"static_argnames": ("scale", "train")},
    ],
)
def test_static_arguments(declared: Any) -> None:
    counted = Counted(train_step)
    counted.__wrapped__ = train_step  # type: ignore[attr-defined]  # for inspect.signature
    step, state = jaxft.fault_tolerant(counted, None, **declared), step_models.mlp_params()
    state, one = step(state, numpy_batch(0), 0.0)
    state, _ = step(state, numpy_batch(0), scale=0.0)
    state, two = step(state, numpy_batch(0), 0.0, train=False)
    state, _ = step(state, numpy_batch(0), 0.0)
    assert one["loss"] > 0
    assert two["loss"] == 0
    assert counted.traces == 3
    assert bits(state) == bits(step_models.mlp_params())


def scaled(state: Any, batch: Any, scale: float) -> Any:
    return state + jaxft.pmean(batch) * scale, {}


def test_undeclared_arguments() -> None:
    step, state = jaxft.fault_tolerant(train_step, None), step_models.mlp_params()
    with pytest.raises(ConfigurationError, match=r"additional argument 0\.5 at position 2.*static_argnums=2"):
        step(state, numpy_batch(0), 0.5)
    with pytest.raises(ConfigurationError, match=r"additional argument train=False.*static_argnames='train'"):
        step(state, numpy_batch(0), train=False)
    with pytest.raises(ConfigurationError, match=r"additional argument Array.*at position 2.*into the state"):
        step(state, numpy_batch(0), jnp.ones(3))
    step = jaxft.fault_tolerant(lambda state, batch, _rate: train_step(state, batch), None, static_argnums=2)
    with pytest.raises(ConfigurationError, match=r"must be hashable.*Put arrays into the state"):
        step(state, numpy_batch(0), jnp.ones(3))


def test_wrong_declarations() -> None:
    with pytest.raises(ConfigurationError, match="Argument 1 of the train step is declared static"):
        jaxft.fault_tolerant(train_step, None, static_argnums=(1,))
    with pytest.raises(ConfigurationError, match="Argument 0 of the train step is declared static"):
        jaxft.fault_tolerant(train_step, None, static_argnames="state")
    with pytest.raises(ConfigurationError, match="Argument 1 of the train step is declared static"):
        jaxft.fault_tolerant(scaled, None, static_argnums=-2)
    with pytest.raises(ConfigurationError, match="Argument -9 of the train step is declared static"):
        jaxft.fault_tolerant(scaled, None, static_argnums=-9)
    with pytest.raises(ConfigurationError, match=r"'traim'.*state, batch, scale, train"):
        jaxft.fault_tolerant(train_step, None, static_argnames="traim")


def test_static_arguments_must_not_matter_after_the_average() -> None:
    def flagged(state: jax.Array, batch: jax.Array, *, update: bool) -> Any:
        mean = jaxft.pmean(batch)
        return (state + mean if update else state), {}

    step = jaxft.fault_tolerant(flagged, None, static_argnames="update")
    state, _ = step(jnp.zeros(2), np.ones(2, np.float32), update=True)
    with pytest.raises(StepError, match="or on a static argument"):
        step(state, np.ones(2, np.float32), update=False)


# Shards


def test_one_call_for_each_shard_of_the_step() -> None:
    asked: list[tuple[int, int]] = []

    def batch_for(step: int, shard: int) -> Any:
        asked.append((step, shard))
        return numpy_batch(step * 10 + shard)

    step, state = jaxft.fault_tolerant(train_step, None, shards=3), step_models.mlp_params()
    for _ in range(2):
        state, _ = step(state, batch_for)
    # The first is asked for twice, to see that the function is pure.
    assert asked == [(0, 0), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_a_batch_function_without_shards() -> None:
    step, state = jaxft.fault_tolerant(train_step, None), step_models.mlp_params()
    other = jaxft.fault_tolerant(train_step, None)
    by_function, _ = step(state, lambda number, shard: numpy_batch(number + shard))
    by_value, _ = other(step_models.mlp_params(), numpy_batch(0))
    assert bits(by_function) == bits(by_value)


def test_several_shards_need_a_batch_function() -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    with pytest.raises(ConfigurationError, match=r"has 2 shards.*`batch\(step, shard\) -> batch`"):
        step(step_models.mlp_params(), numpy_batch(0))
    with pytest.raises(ConfigurationError, match=r"shards.* must be at least 1, not 0"):
        jaxft.fault_tolerant(train_step, None, shards=0)


# As documented


# Refusals


@pytest.mark.parametrize("transform", [jax.jit, lambda f: lambda tree: jax.eval_shape(f, tree)])
def test_inside_other_transformations(transform: Any) -> None:
    step = jaxft.fault_tolerant(train_step, None)
    with pytest.raises(ConfigurationError, match=r"called on tracers.*Call it from plain Python"):
        transform(lambda state: step(state, numpy_batch(0)))(step_models.mlp_params())
    unused = step_models.mlp_params()
    with pytest.raises(ConfigurationError, match="called on tracers"):
        transform(lambda batch: step(unused, batch))(numpy_batch(0))
    state, _ = step(unused, numpy_batch(0))
    with pytest.raises(ConfigurationError, match="called on tracers"):
        transform(lambda batch: step(state, batch))(numpy_batch(0))


@pytest.mark.parametrize(
    ("transform", "before"),
    [
        (jax.jit, "join"),
        (jax.vmap, "a call"),
        (lambda f: jax.grad(lambda state: f(state)[1]["loss"]), "a call that raised"),
    ],
)
def test_inside_other_transformations_once_it_has_joined(transform: Any, before: str) -> None:
    unreadable: list[int] = []

    def batch_for(step: int, _shard: int) -> Any:
        if step in unreadable:
            raise OSError("no such file")
        return numpy_batch(step)

    step = jaxft.fault_tolerant(train_step, None, shards=1)
    state = step.join(step_models.mlp_params(), batch_for)
    if before != "join":
        state, _ = step(state, batch_for)
    held = step.step
    if before == "a call that raised":
        unreadable.append(held)
        with pytest.raises(OSError, match="no such file"):
            step(state, batch_for)
        unreadable.clear()
    # vmap divides the first dimension, so each leaf gets one more.
    given = jax.tree.map(lambda leaf: leaf[None], state) if transform is jax.vmap else state
    with pytest.raises(ConfigurationError, match=r"called on tracers.*Call it from plain Python"):
        transform(lambda state: step(state, batch_for))(given)
    assert step.step == held
    step(state, batch_for)  # nothing has been consumed


def test_not_arrays() -> None:
    step = jaxft.fault_tolerant(train_step, None)
    with pytest.raises(ConfigurationError, match=r"leaf \['x'\] of the batch is 'text', a str"):
        step(step_models.mlp_params(), {"x": "text", "y": None})


def test_from_functions_alone() -> None:
    def grad_fn(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(step_models.mlp_loss)(state, batch)
        return grads, loss

    def update_fn(state: Any, means: Any, loss: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, means), {"loss": loss}

    step = jaxft.from_functions(grad_fn, update_fn, None, shards=2)
    same = jaxft.fault_tolerant(train_step, None, shards=2)
    one, _ = step(step_models.mlp_params(), lambda _number, shard: numpy_batch(shard))
    two, _ = same(step_models.mlp_params(), lambda _number, shard: numpy_batch(shard))
    assert bits(one) == bits(two)
    with pytest.raises(ConfigurationError, match="additional argument 1 at position 2"):
        step(one, lambda _number, shard: numpy_batch(shard), 1)


# With a manager


class Recorder:
    """A fake manager and engine: runs one given shard twice, as after an aborted attempt."""

    step = 5
    handed = None
    away = False

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.loop = LoopWatch()

    @property
    def _engine(self) -> Engine:
        return self

    def _compare_ranks(self, settings: Mapping[str, str]) -> None:
        """It is a group of one process."""

    def run(self, call: Call, state: list[jax.Array]) -> Any:
        assert call.nonfinite == "warn"
        self.calls.append(call)
        for shard in (1, 0):
            contribution, local = call.programs.compute(state, call.batch_for(self.step, shard), shard)
        return call.programs.apply(state, contribution, local)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        self.away = True
        yield
        self.away = False


def test_a_manager_is_given_programs_and_the_rest() -> None:
    manager, counted = Recorder(), Counted(train_step)
    step, state = jaxft.fault_tolerant(counted, manager, shards=2), step_models.mlp_params()
    assert step.step == 5
    asked: list[tuple[int, int]] = []

    def batch_for(number: int, shard: int) -> Any:
        asked.append((number, shard))
        return numpy_batch(number + shard)

    for _ in range(2):
        state, _ = step(state, batch_for)
    assert asked == [(5, 0), (5, 0), (0, 0)] + 2 * [(5, 1), (5, 0)], "examples are asked for once"
    first, second = manager.calls
    assert second.programs is first.programs
    assert first.programs.stages.layout == Layout.of(first.programs.contribution)
    assert first.shards == 2
    assert counted.traces == 1


def test_outside_of_the_managers_with_block_nothing_is_compiled() -> None:
    counted = Counted(train_step)
    step = jaxft.fault_tolerant(counted, jaxft.Manager("localhost:9", group="group-0", step=7))
    assert step.step == 7
    with pytest.raises(
        ConfigurationError, match=r"group 'group-0' is not in its job.*inside `with jaxft\.Manager"
    ):
        step(step_models.mlp_params(), numpy_batch(0))
    assert counted.traces == 0


def test_a_group_is_away_while_it_compiles_also_for_another_shape_in_the_midst_of_a_step() -> None:
    """So no job takes it for a group that hangs."""
    manager, away = Recorder(), list[bool]()

    def traced(state: Any, batch: Any) -> Any:
        away.append(manager.away)
        return train_step(state, batch)

    step, state = jaxft.fault_tolerant(traced, manager, shards=2), step_models.mlp_params()
    state, _ = step(state, lambda number, shard: numpy_batch(number, rows=4 if shard else 8))
    assert away == [True, True]
    assert not manager.away
