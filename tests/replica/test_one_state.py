"""A step is given the state that it returned, or an edit of it: with a Manager and without."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxft
from jaxft._session._mailbox import Mailbox
from tests.clusters import cluster

Programs = tuple[Any, jaxft.Manager | None]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("coordinator")) as here:
        here.start_coordinator()
        yield f"localhost:{here.port}"


@pytest.fixture(params=["alone", "in a job"])
def manager(request: pytest.FixtureRequest, coordinator: str) -> Iterator[jaxft.Manager | None]:
    if request.param == "alone":
        yield None
        return
    manager = jaxft.Manager(
        coordinator, group="group-0", job=request.node.name.replace(" ", "-"), failure_timeout_s=600.0
    )
    manager.__enter__()
    yield manager
    manager.__exit__(RuntimeError, RuntimeError(), None)  # the job needs no last wait


def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    mean = jaxft.pmean(batch)
    new = {
        **state,
        "w": state["w"] - state["rate"] * mean,
        "n": state["n"] + 1,
        "host": state["host"] + mean[0],
    }
    return new, {"w": state["w"]}


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.full(3, step + shard, np.float32)


def fresh(rate: float = 0.5) -> dict[str, Any]:
    """As `TrainState.create` makes it: with a Python number and a numpy array."""
    return {
        "host": np.zeros(2, np.float32),
        "n": 0,
        "rate": jnp.float32(rate),
        "w": jnp.zeros(3),
        "key": jax.random.key(1),
    }


def begun(manager: jaxft.Manager | None = None) -> tuple[Any, Any]:
    step = jaxft.fault_tolerant(train_step, manager, shards=2)
    return step, step.join(fresh(), batch_for)


def test_numbers_and_numpy_arrays_become_arrays() -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    state, _ = step(fresh(), batch_for)
    for _ in range(2):
        state, _ = step(state, batch_for)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert (int(state["n"]), state["n"].weak_type) == (3, True)
    assert state["host"].tolist() == [4.5, 4.5]


def test_a_train_state_of_flax() -> None:
    def of_flax(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        grads = jax.grad(lambda params: jnp.mean((state.apply_fn(params, batch) - 1.0) ** 2))(state.params)
        return state.apply_gradients(grads=jaxft.pmean(grads)), {}

    state = TrainState.create(
        apply_fn=lambda params, x: x * params["w"],
        params={"w": np.zeros(3, np.float32)},
        tx=optax.sgd(0.1, momentum=0.9),
    )
    assert state.step == 0
    assert isinstance(state.step, int)
    step = jaxft.fault_tolerant(of_flax, None, shards=2)
    for _ in range(2):
        state, _ = step(state, batch_for)
    assert int(state.step) == 2
    assert float(state.params["w"][0]) > 0.0


def test_a_state_that_was_changed_is_refused_and_the_leaf_is_named(manager: jaxft.Manager | None) -> None:
    step, state = begun(manager)
    state, _ = step(state, batch_for)
    for changed, name in (
        ({**state, "rate": jnp.float32(0.1)}, r"\['rate'\]"),
        ({**state, "n": 0}, r"\['n'\]"),
        ({**state, "key": jax.random.key(2)}, r"\['key'\]"),
        (fresh(), r"\['host'\]"),
    ):
        with pytest.raises(
            jaxft.ConfigurationError, match=rf"leaf {name} has other values.*at step 1\. .*step\.edit"
        ):
            step(changed, batch_for)
    step(state, batch_for)
    assert step.step == 2, "and nothing has happened"


def test_an_equal_state_is_the_same() -> None:
    step, state = begun()
    state, _ = step(state, batch_for)
    state, _ = step(jax.tree.map(jnp.copy, state), batch_for)
    numpy = {name: leaf if name == "key" else np.asarray(leaf) for name, leaf in state.items()}
    state, _ = step(numpy, batch_for)
    assert int(state["n"]) == 3


def test_an_edit_is_part_of_the_next_step(manager: jaxft.Manager | None) -> None:
    step, state = begun(manager)
    for number in step.steps(4):
        if number == 2:
            before = state
            state = step.edit(
                state, lambda state: {**state, "rate": state["rate"] / 2, "host": np.zeros(2, np.float32)}
            )
            state = step.edit(state, lambda state: {**state, "n": 100, "key": jax.random.key(9)})
            assert float(before["rate"]) == 0.5, "it consumes nothing"
        state, _ = step(state, batch_for)
    # Means are 0.5, 1.5, 2.5 and 3.5.
    assert state["w"].tolist() == [-(2.0 * 0.5 + 6.0 * 0.25)] * 3
    assert state["host"].tolist() == [6.0, 6.0]
    assert (int(state["n"]), float(state["rate"])) == (102, 0.25)
    assert jax.random.key_data(state["key"]).tolist() == jax.random.key_data(jax.random.key(9)).tolist()


class Unreadable:
    """Batches; at first, step 2's cannot be read."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, step: int, shard: int) -> np.ndarray:
        if step == 2 and self.times:
            self.times -= 1
            raise OSError("cannot read sample 17")
        return batch_for(step, shard)


def halved(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "rate": state["rate"] / 2}


def reset(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "n": state["n"] * 10}


@pytest.mark.parametrize("way", ["next iteration", "another loop", "the call alone"])
def test_an_edit_is_not_repeated_with_its_iteration(manager: jaxft.Manager | None, way: str) -> None:
    batches = Unreadable(2)
    step = jaxft.fault_tolerant(train_step, manager, shards=2)
    state = step.join(fresh(), batches)

    def body(number: int) -> None:
        nonlocal state
        after = state
        if number == 2:
            after = step.edit(step.edit(after, halved), reset)
        state, _ = step(after, batches)

    def once(number: int) -> None:
        with contextlib.suppress(OSError):
            body(number)

    def the_call_again(number: int) -> None:
        nonlocal state
        if number == 2:
            state = step.edit(step.edit(state, halved), reset)
        while step.step == number:
            with contextlib.suppress(OSError):
                state, _ = step(state, batches)

    ways = {"next iteration": once, "another loop": body, "the call alone": the_call_again}
    while step.step < 4:
        with contextlib.suppress(OSError):
            for number in step.steps(4):
                ways[way](number)
    assert not batches.times
    assert (int(state["n"]), float(state["rate"])) == (22, 0.25)


def test_an_edit_that_raises_is_made_when_it_is_called_again() -> None:
    step, state = begun()

    def fails(_state: dict[str, Any]) -> dict[str, Any]:
        raise OSError("no")

    for number in step.steps(2):
        if number == 1:
            with pytest.raises(OSError, match="no"):
                step.edit(state, fails)
            state = step.edit(state, halved)
        state, _ = step(state, batch_for)
    assert float(state["rate"]) == 0.25


@pytest.mark.parametrize("where", ["made", "on its way out"])
def test_ctrl_c_once_the_state_is_consumed_goes_on_with_the_new_one(
    coordinator: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state that the loop still has is gone, and the step counts."""

    def interrupted(*_arguments: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with jaxft.Manager(coordinator, group="group-0", job=where, failure_timeout_s=600.0) as manager:
        step, state = begun(manager)
        state, _ = step(state, batch_for)
        place = (jax, "block_until_ready") if where == "made" else (Mailbox, "sample")
        monkeypatch.setattr(*place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(state, batch_for)
        state, _ = step(state, batch_for)
        assert (manager.step, int(state["n"])) == (3, 3)
    assert "interrupted before it could return the state: continues with the state of step 2" in caplog.text


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda state: {**state, "w": jnp.zeros(4)},
            r"leaf \['w'\] a float32\[4\], but it is a float32\[3\]",
        ),
        (lambda state: {**state, "w": jnp.zeros(3, jnp.int32)}, r"leaf \['w'\] a int32\[3\]"),
        (lambda state: {**state, "rate": 1}, r"leaf \['rate'\] a int32\[\]"),
        (lambda state: {"w": state["w"]}, "another structure than it was given"),
        (lambda state: state.update(new=state["w"]) or state, r"was given: the keys \[.*\] became \["),
        (lambda state: state.update(w=[state["w"]]) or state, r"at \['w'\], a leaf became a list"),
    ],
)
def test_an_edit_keeps_types_and_structure(function: Any, text: str) -> None:
    step, state = begun()
    for _ in step.steps(1):
        with pytest.raises(jaxft.ConfigurationError, match=text):
            step.edit(state, function)
        state, _ = step(state, batch_for)
    assert int(state["n"]) == 1


def test_an_edit_belongs_before_the_step_of_an_iteration() -> None:
    step, state = begun()
    refused = pytest.raises(
        jaxft.ConfigurationError, match="not at the beginning of an iteration over `steps`"
    )
    with refused:
        step.edit(state, lambda state: state)
    for _ in step.steps(2):
        state, _ = step(state, batch_for)
        with refused:
            step.edit(state, lambda state: state)


def faster(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Exchanges what `train_step` does, and does something else with the means."""
    new, metrics = train_step(state, batch)
    return {**new, "rate": state["rate"] * 2}, metrics


def of_two_means(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Exchanges one value more."""
    new, _ = train_step(state, batch)
    return new, {"sum": jaxft.pmean(batch.sum())}


@pytest.mark.parametrize(
    ("second", "shards", "text"),
    [
        (faster, 2, "in its use of the means"),
        (of_two_means, 2, "in contribution: .* then, .* now"),
        (train_step, 3, "in shards: '2' then, '3' now"),
    ],
)
def test_a_second_step_is_refused(second: Any, shards: int, text: str) -> None:
    """A group that joins could not replay both."""
    step, state = begun()
    state, _ = step(state, batch_for)
    other = jaxft.fault_tolerant(second, None, shards=shards)
    refused = rf"this step differs from the step that .*{text}.* A run has one training step"
    for _ in range(2):
        with pytest.raises(jaxft.ConfigurationError, match=refused):
            other(state, batch_for)
    state, _ = step(state, batch_for)
    assert int(state["n"]) == 2


def test_the_same_step_may_be_made_again() -> None:
    """As in a notebook whose cell is run again."""
    step, state = begun()
    state, _ = step(state, batch_for)
    again = jaxft.fault_tolerant(train_step, None, shards=2)
    state, _ = again(state, batch_for)
    assert int(state["n"]) == 2


def test_a_state_that_is_the_whole_result_of_a_step_is_refused_with_what_to_write() -> None:
    step, state = begun()
    result = step(state, batch_for)
    with pytest.raises(
        jaxft.ConfigurationError, match=r"whole result of the step: write `state, metrics = step"
    ):
        step(result, batch_for)
    state, _ = step(result[0], batch_for)
    assert int(state["n"]) == 2


def test_a_loop_over_steps_that_calls_the_step_twice_is_refused_before_it_passes_its_total() -> None:
    step, state = begun()
    loop = step.steps(3)
    next(loop)
    state, _ = step(state, batch_for)
    with pytest.raises(
        jaxft.ConfigurationError, match=r"calls the step again, at step 1: .* Call the step once"
    ):
        step(state, batch_for)
    assert next(loop) == 1
    state, _ = step(state, batch_for)
    assert int(state["n"]) == 2


def test_steps_needs_a_join_and_a_call_in_each_iteration(manager: jaxft.Manager | None) -> None:
    step = jaxft.fault_tolerant(train_step, manager, shards=2)
    with pytest.raises(
        jaxft.ConfigurationError, match=r"Call `state = step\.join\(state, batch\)` before the loop"
    ):
        next(step.steps(3))
    state = step.join(fresh(), batch_for)
    loop = step.steps(3)
    for number in (0, 1):
        assert next(loop) == number
        state, _ = step(state, batch_for)
    assert next(loop) == 2
    with pytest.raises(jaxft.ConfigurationError, match="has not called the step, so step 2 is still"):
        next(loop)
    for wrong in ("3", 3.0, True):
        logged = rf"number of all steps of the run, must be an int, not {wrong!r}, a {type(wrong).__name__}\."
        with pytest.raises(jaxft.ConfigurationError, match=logged):
            next(step.steps(wrong))  # pyright: ignore[reportArgumentType]
    assert next(step.steps(np.int64(3))) == 2  # pyright: ignore[reportArgumentType]
    assert next(step.steps(None)) == 2
    assert list(step.steps(2)) == []
