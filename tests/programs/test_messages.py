"""Errors of a step that is called with the wrong things: each before anything changes."""

import functools
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._base._calls import one_caller
from jaxft._errors import ConfigurationError, StepError
from tests.patience import FAR_S, join

pytestmark = pytest.mark.unoptimized

ROWS = np.ones(3, np.float32)
NONE: Any = None
LIST: Any = [ROWS]
ANY_OF_ONE: Any = lambda s: s  # noqa: E731


def train_step(state: Any, batch: Any) -> Any:
    return state - jaxft.pmean(batch), {}


def of_five(state: Any, images: Any, labels: Any, key: Any, rate: float) -> Any:  # noqa: ARG001 - its names count
    return state - jaxft.pmean(images), {}


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("labels", [ROWS, 7])
def test_a_step_of_five_arguments(shards: int | None, labels: Any) -> None:
    step = jaxft.fault_tolerant(of_five, None, shards=shards)
    with pytest.raises(
        ConfigurationError,
        match=r"additional argument (array.*|7) at position 2.*put it into the batch, such as `\(images, labels\)`",
    ):
        step(jnp.zeros(3), ROWS, labels, jax.random.key(0), 0.1)
    with pytest.raises(
        StepError,
        match=r"takes \(state.*rate.*\), but it is called with a state, a batch: missing .* 'labels'.*into the batch",
    ):
        step(jnp.zeros(3), lambda *_: ROWS)


def test_static_arguments_that_are_missing_or_too_many() -> None:
    step = jaxft.fault_tolerant(of_five, None, static_argnames=("labels", "key", "rate"))
    with pytest.raises(
        StepError, match=r"a batch and 2 static arguments: missing a required argument: 'key'"
    ):
        step(jnp.zeros(3), ROWS, labels=1, rate=0.1)


@pytest.mark.parametrize("manager", ["localhost:29510", jaxft.Manager, 3])
def test_a_manager_that_is_none(manager: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"manager is .*It is a jaxft\.Manager.*None runs the step alone"
    ):
        jaxft.fault_tolerant(train_step, manager)


@pytest.mark.parametrize("shards", ["4", 4.0, True, np.ones(2)])
def test_shards_that_are_not_a_number(shards: Any) -> None:
    expected = (
        r"shards.* must be an int of at least 1, not .*, a (str\. Convert it: int\('4'\)|float|bool|ndarray)"
    )
    with pytest.raises(ConfigurationError, match=expected):
        jaxft.fault_tolerant(train_step, None, shards=shards)
    with pytest.raises(ConfigurationError, match=expected):
        jaxft.data.Batches([1, 2], shards=shards, samples_per_shard=1)
    with pytest.raises(ConfigurationError, match=expected):
        jaxft.data.from_iterator(lambda _: iter([1]), shards)


@pytest.mark.parametrize("shards", [None, 2])
def test_a_collective_of_jax_that_was_left_in(shards: int | None) -> None:
    def of_pmap(state: Any, batch: Any) -> Any:
        return state - jax.lax.pmean(batch, "batch"), {}

    def batch_for(_step: int, _shard: int) -> np.ndarray:
        return ROWS

    for step in (of_pmap, jax.jit(of_pmap)):
        with pytest.raises(
            StepError,
            match=r"named axis 'batch', which is not bound .*test_messages\.py:\d+ .*`axis_name='batch'`.*jaxft\.p",
        ):
            jaxft.fault_tolerant(step, None, shards=shards)(jnp.zeros(3), batch_for)
    with pytest.raises(
        StepError, match=r"wrapped in jax\.pmap.*Pass the function that pmap was given.*axis_name="
    ):
        jaxft.fault_tolerant(jax.pmap(of_pmap, axis_name="batch"), None, shards=shards)(
            jnp.zeros(3), batch_for
        )
    assert jaxft.fault_tolerant(jax.jit(train_step), None)(jnp.zeros(3), ROWS)[0].tolist() == [-1, -1, -1]


def test_a_batch_function_of_other_arguments() -> None:
    batches = iter([ROWS])
    for wrong in (lambda _number: ROWS, lambda: next(batches), lambda _step, _shard, _key: ROWS):
        with pytest.raises(
            ConfigurationError,
            match=r"takes \(.*\), but it is called with the numbers .*`def batch_for\(step, shard\)`",
        ):
            jaxft.fault_tolerant(train_step, None, shards=2)(jnp.zeros(3), wrong)


@pytest.mark.parametrize("joins", [True, False], ids=["join", "step"])
def test_an_option_that_only_some_calls_have(*, joins: bool) -> None:
    """It is compiled in, so a later value would have no effect."""
    step = jaxft.fault_tolerant(train_step, None, shards=1)
    begin, batch = np.zeros(3, np.float32), lambda *_: np.ones(3, np.float32)
    state = step.join(begin, batch) if joins else step(begin, batch)[0]
    for context, text in (
        (jax.default_matmul_precision("float32"), "jax_default_matmul_precision is 'float32'"),
        (jax.enable_x64(True), "jax_enable_x64 is True"),
        (jax.threefry_partitionable(False), "jax_threefry_partitionable is False"),
        (jax.default_prng_impl("rbg"), "jax_default_prng_impl is 'rbg'"),
    ):
        refused = rf"{text} in this call .* contain `step\.join` and the whole loop"
        with context, pytest.raises(ConfigurationError, match=refused):
            step(state, batch)
    state, _ = step(state, batch)
    other = jaxft.fault_tolerant(train_step, None, shards=1)
    with jax.default_matmul_precision("float32"):
        other(other.join(begin, batch), batch)


def test_disable_jit() -> None:
    expected = (
        r"while jax\.disable_jit \(JAX_DISABLE_JIT\) is on.*cannot run without compiling.*jax\.debug\.print"
    )
    step = jaxft.fault_tolerant(train_step, None)
    state = jnp.zeros(3)
    for _ in range(2):
        with jax.disable_jit(), pytest.raises(ConfigurationError, match=expected):
            step(state, ROWS)
        state, _ = step(state, ROWS)


def test_an_equinox_model_without_arrays() -> None:
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    with pytest.raises(
        ConfigurationError,
        match=r"leaf \.activation of the state is .*not an array of numbers.*, arrays=equinox\.is_array\)",
    ):
        jaxft.fault_tolerant(train_step, None)(model, ROWS)


class Tensor:
    """As a data loader of another library returns."""

    shape = (3,)
    dtype = "float32"

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> np.ndarray:
        return ROWS


@pytest.mark.parametrize(
    "leaf",
    [
        *("x", np.array(["x"]), np.array([None]), object(), Tensor()),
        *(np.zeros(3, "M8[s]"), np.zeros(3, [("x", "f4")]), jax.ShapeDtypeStruct((3,), jnp.float32)),
    ],
)
def test_a_leaf_that_is_not_an_array(leaf: Any) -> None:
    step = jaxft.fault_tolerant(train_step, None)
    with pytest.raises(
        ConfigurationError, match=r"The leaf \['a'\] of the state is .*A state is a pytree of arrays"
    ):
        step({"a": leaf}, ROWS)
    with pytest.raises(
        ConfigurationError, match=r"The leaf \['a'\] of the batch is .*A batch is a pytree of arrays"
    ):
        step(jnp.zeros(3), {"a": leaf})
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    with pytest.raises(ConfigurationError, match=r"The leaf \['a'\] of the batch is "):
        step(jnp.zeros(3), lambda *_: {"a": leaf})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: jaxft.fault_tolerant(NONE, None), r"train_step is None, a NoneType.*not called yet"),
        (
            lambda: jaxft.from_functions(ANY_OF_ONE, ANY_OF_ONE, None),
            r"^grad_fn .* takes \(s\), but .* and a batch: ",
        ),
        (
            lambda: jaxft.from_functions(train_step, ANY_OF_ONE, None),
            r"^update_fn .* the means and the local",
        ),
        (
            lambda: jaxft.data.Prefetch(LIST),
            r"batch function is \[.*, a list, and not a function of the num",
        ),
        (lambda: jaxft.data.Prefetch(iter(LIST)), r"The batch is .*a list_iterator"),
        (lambda: jaxft.data.Prefetch(ANY_OF_ONE), r"takes \(s\), but it is called with the numbers"),
        (
            lambda: jaxft.data.from_iterator(lambda: [1], 2),
            r"^make .* takes \(\), but .* the number of a shard: ",
        ),
    ],
)
def test_functions_that_are_none_or_take_something_else(call: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        call()


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize(
    "batch", [iter([ROWS]), (row for row in [ROWS]), functools.partial(next, iter([ROWS, ROWS]))]
)
def test_an_iterator_as_batch(batch: Any, shards: int | None) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"The batch is .*a (list_iterator|generator|partial)\..*`next\(batches\)`\.",
    ):
        jaxft.fault_tolerant(train_step, None, shards=shards)(jnp.zeros(3), batch)


@pytest.mark.parametrize("make", [iter([ROWS]), functools.partial(next, iter([ROWS, ROWS]))])
def test_an_iterator_in_place_of_a_function_that_opens_one(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"make is a .*must be a function that opens the stream"):
        jaxft.data.from_iterator(make, 2)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        *(
            (value, "must be a dict of texts and numbers by name: `settings=")
            for value in ("abc", ["abc"], 3)
        ),
        ({1: "abc"}, r"must be texts of at most .*, not 1: 'abc'"),
        ({"seed": [1]}, r"must be texts of at most .*, not 'seed': \[1\]"),
        ({"corpus": "gr\udcfcn"}, r"has .*'gr\\udcfcn'.*not Unicode.*Pass a digest of its bytes: `hashlib"),
        ({"gr\udcfcn": "corpus"}, "has .*not Unicode"),
        ({str(number): "" for number in range(101)}, r"has \d+ texts of \d+ bytes in all, but it may have"),
        ({str(number): "x" * 990 for number in range(50)}, r"has \d+ texts of \d+ bytes in all"),
    ],
)
def test_settings_that_cannot_be_compared(settings: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"settings (is .*)?{text}"):
        jaxft.Manager("localhost:29510", group="group-0", settings=settings)


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (0.1, "0.1"), (np.float64(0.1), "0.1"), (np.int32(7), "7"), (True, "True"), ("0.1", "0.1")],
)
def test_settings_may_be_numbers(value: Any, text: str) -> None:
    manager = jaxft.Manager("localhost:29510", group="group-0", settings={"lr": value})
    assert manager._config.compared_settings == {"settings.lr": text}


def test_the_digest_of_a_state_that_was_consumed() -> None:
    step, state = jaxft.fault_tolerant(train_step, None), jnp.zeros(3)
    step(state, ROWS)
    with pytest.raises(
        ConfigurationError, match=r"jaxft\.digest was given a state that was consumed by a step"
    ):
        jaxft.digest(state)


@pytest.mark.parametrize(
    ("number", "kept"),
    [(2**31, "int32"), (-(2**70), "int32"), (np.array([0, 2**40]), "int32"), (np.uint64(2**63), "uint32")],
)
def test_an_integer_of_more_bits_than_those_of_jax(number: Any, kept: str) -> None:
    step = jaxft.fault_tolerant(train_pair, None)
    with pytest.raises(
        ConfigurationError,
        match=rf"The leaf \['b'\] of the state is .*, which JAX cannot keep: .* {kept} here",
    ):
        step({"a": jnp.zeros(3), "b": number}, ROWS)


def test_a_leaf_that_other_code_has_donated() -> None:
    step, donate = jaxft.fault_tolerant(train_pair, None), jax.jit(lambda w: w + 1, donate_argnums=0)
    state, _ = step({"a": jnp.zeros(3), "b": jnp.zeros(3)}, ROWS)
    donate(state["b"])
    with pytest.raises(
        ConfigurationError,
        match=r"The leaf \['b'\] of the state, float32\[3\], was consumed .* of your own that donates it",
    ):
        step(state, ROWS)
    with pytest.raises(
        ConfigurationError, match=r"given a state whose leaf \['b'\] was consumed by a step, or by a func"
    ):
        jaxft.digest(state)


def train_pair(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda w: w - jaxft.pmean(batch), state), {}


def numbered(_step: int, _shard: int) -> np.ndarray:
    return ROWS


NUMBERED: dict[int, Any] = {}


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("batches", [numbered, functools.partial(numbered), NUMBERED.get])
def test_a_batch_function_in_the_place_of_the_state(shards: int | None, batches: Any) -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=shards)
    state = jnp.zeros(3)
    for began in (False, True):
        for call in (step, step.join):
            with pytest.raises(
                ConfigurationError, match=r"Did you swap state and batch\? Write `step\(state, batch_for\)`"
            ):
                call(batches, state)
        if not began:
            state, _ = step(state, numbered)
    step(state, numbered)
    assert step.step == 2


def test_two_threads_that_call_one_step() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(_number: int, _shard: int) -> np.ndarray:
        entered.set()
        assert leave.wait(FAR_S)
        return ROWS

    step = jaxft.fault_tolerant(train_step, None)
    results: list[Any] = []
    first = threading.Thread(
        target=lambda: results.append(step(jnp.zeros(3), slow)), name="trainer", daemon=True
    )
    first.start()
    assert entered.wait(FAR_S)
    for call in (step, step.join):
        with pytest.raises(ConfigurationError, match="while its call in thread 'trainer' is under way"):
            call(jnp.ones(3), ROWS)
    leave.set()
    join(first)
    ((state, _),) = results
    step(state, ROWS)  # from another thread than the first
    assert step.step == 2


def test_what_an_interrupted_call_has_left_behind_stops_no_later_one() -> None:
    """As an exception that arrives on the way into the call does, in a thread that has ended, or that calls again."""
    step = jaxft.fault_tolerant(train_step, None)
    ended = threading.Thread(target=one_caller, args=(step._caller,))
    ended.start()
    join(ended)
    state, _ = step(jnp.zeros(3), ROWS)
    one_caller(step._caller)
    state, _ = step(state, ROWS)
    assert not step._caller
    with pytest.raises(TypeError):
        step(state, LIST)
    assert not step._caller


def test_the_newest_state_survives_ctrl_c_at_the_end_of_a_call() -> None:
    step = jaxft.fault_tolerant(train_step, None)
    state, _ = step(jnp.zeros(3), ROWS)

    class Interrupts(dict[str, threading.Thread]):
        def clear(self) -> None:
            super().clear()
            raise KeyboardInterrupt

    step._caller = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        step(state, ROWS)
    step._caller = {}
    state, _ = step(state, ROWS)
    assert (step.step, state.tolist()) == (3, [-3, -3, -3])
