"""Rounds of inner steps, without a job: known answers, an oracle in one program, and refusals."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxft
from jaxft._base._calls import Parts, Paused, reporting

SHARDS, EVERY = 4, 5
INNER = optax.adamw(1e-2)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax adds numbers of different types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Inner(NamedTuple):
    params: Any
    moments: Any
    key: Any


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"].astype(jnp.float32) - y) ** 2)


def inner_step(state: Inner, batch: Any) -> tuple[Inner, Any]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, moments = INNER.update(grads, state.moments, state.params)
    key, _ = jax.random.split(state.key)
    new = Inner(optax.apply_updates(state.params, updates), moments, key)
    return new, {"loss": loss, "rows": jnp.int32(len(batch[0]))}


def first() -> Inner:
    rng = np.random.default_rng(7)
    params = {
        "hidden": jnp.asarray(rng.standard_normal((6, 16)), jnp.float32),
        "out": jnp.asarray(rng.standard_normal((16, 2)), jnp.bfloat16),
    }
    return Inner(params, INNER.init(params), jax.random.key(3))


def batch_for(number: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([number, shard]).standard_normal((8, 6), np.float32)
    return x, np.tanh(x[:, :2])


def made(**changed: Any) -> Any:
    arguments = {"params": lambda state: state.params, "outer": OUTER, "every": EVERY, "carry": "average"}
    return jaxft.diloco(inner_step, **{**arguments, **changed})


def run(train: Any, inner_state: Any, rounds: int, batches: Any = batch_for, shards: int = SHARDS) -> Any:
    step = jaxft.fault_tolerant(train, None, shards=shards)
    state, metrics = train.init(inner_state), None
    for _ in range(rounds):
        state, metrics = step(state, batches)
    return state, metrics


def down(weight: Any, batch: Any) -> tuple[Any, Any]:
    return weight - batch, {}


@pytest.mark.parametrize(
    ("every", "start", "wanted"), [(3, 1.0, [-11.0]), (6, 1.0, [-23.0, -47.0]), (6, -11.0, [-35.0])]
)
def test_a_round_by_hand(every: int, start: float, wanted: list[float]) -> None:
    """Each inner step goes down by 2, and the outer one twice as far: the weights that TorchFT's own tests expect."""
    train = jaxft.diloco(down, params=lambda w: w, outer=optax.sgd(2.0), every=every, carry="average")
    for rounds, weight in enumerate(wanted, 1):
        state, _ = run(train, jnp.float32(start), rounds, lambda _number, _shard: np.float32(2.0), shards=1)
        assert float(state["params"]) == weight


def test_with_one_inner_step_and_one_shard_it_is_plain_training() -> None:
    """With plain SGD inside and LocalSGD outside. The values are such that no difference is rounded."""

    def target(number: int, shard: int) -> np.ndarray:
        return np.array([number % 4, -(number % 2), shard + 1], np.float32)

    def sgd(w: Any, batch: Any) -> tuple[Any, Any]:
        return w - 0.5 * (w - batch), {}

    def plain(w: Any, batch: Any) -> tuple[Any, Any]:
        return w - 0.5 * jaxft.pmean(w - batch), {}

    train = jaxft.diloco(sgd, params=lambda w: w, outer=optax.sgd(1.0), every=1, carry="reset")
    state, _ = run(train, jnp.zeros(3), 8, target, shards=1)
    step, wanted = jaxft.fault_tolerant(plain, None, shards=1), jnp.zeros(3)
    for _ in range(8):
        wanted, _ = step(wanted, target)
    np.testing.assert_array_equal(state["params"], wanted)


def test_with_one_shard_and_a_plain_outer_step_it_is_look_ahead() -> None:
    def gradient(w: Any, batch: Any) -> Any:
        return w - batch

    target = np.array([1.0, -2.0], np.float32)
    look_ahead = optax.lookahead(optax.sgd(0.5), sync_period=4, slow_step_size=0.5)
    weights: Any = optax.LookaheadParams.init_synced(jnp.zeros(2))
    opt = look_ahead.init(weights)
    for _ in range(12):
        updates, opt = look_ahead.update(gradient(weights.fast, target), opt, weights)
        weights = optax.apply_updates(weights, updates)

    def sgd(w: Any, batch: Any) -> tuple[Any, Any]:
        return w - 0.5 * gradient(w, batch), {}

    train = jaxft.diloco(sgd, params=lambda w: w, outer=optax.sgd(0.5), every=4, carry="average")
    state, _ = run(train, jnp.zeros(2), 3, lambda _number, _shard: target, shards=1)
    np.testing.assert_array_equal(state["params"], weights.slow)


def tree_mean(values: Any) -> Any:
    """The mean over a leading axis of four, in the job's order of summation."""
    return jax.tree.map(lambda v: ((v[0] + v[1]) + (v[2] + v[3])) / 4, values)


def oracle(carry: str, rounds: int) -> tuple[Any, Any, Any]:
    """The same training by `lax.map` over the shards in one program; returns params, moments and the loss."""
    start = first()
    wide, half = {name: leaf.astype(jnp.float32) for name, leaf in start.params.items()}, jnp.bfloat16

    def shard(inner: Inner, batches: Any) -> Any:
        end, shown = jax.lax.scan(inner_step, inner, batches)
        return end, functools.reduce(jnp.add, shown["loss"]) / EVERY

    @jax.jit
    def a_round(params: Any, moments: Any, batches: Any) -> Any:
        inner = Inner({**params, "out": params["out"].astype(half)}, moments, start.key)
        ends, losses = jax.lax.map(lambda b: shard(inner, b), batches)
        went = {
            name: jax.vmap(lambda end, name=name: inner.params[name].astype(jnp.float32) - end)(
                ends.params[name].astype(jnp.float32)
            )
            for name in params
        }
        return tree_mean(went), ends.moments, tree_mean(losses)

    @jax.jit
    def outer_step(params: Any, outer: Any, grads: Any) -> Any:
        updates, outer = OUTER.update(grads, outer, params)
        return jax.tree.map(jnp.add, params, updates), outer

    def kept(ends: Any, before: Any) -> Any:
        adam = ends[0]
        zeros = jax.tree.map(jnp.zeros_like, before[0].mu)
        if carry == "reset":
            return INNER.init(start.params)
        mean = lambda tree: jax.tree.map(  # noqa: E731
            lambda v: tree_mean(v.astype(jnp.float32)).astype(v.dtype), tree
        )
        mu = zeros if carry == "second" else mean(adam.mu)
        return (adam._replace(count=adam.count[0], mu=mu, nu=mean(adam.nu)), *before[1:])

    outer, moments, loss = OUTER.init(wide), start.moments, None
    for number in range(rounds):
        shards = [
            [batch_for(number * EVERY + each, shard) for each in range(EVERY)] for shard in range(SHARDS)
        ]
        batches = jax.tree.map(
            lambda *leaves: np.stack(leaves),
            *[jax.tree.map(lambda *leaves: np.stack(leaves), *some) for some in shards],
        )
        grads, ends, loss = a_round(wide, moments, batches)
        wide, outer = outer_step(wide, outer, grads)
        moments = kept(ends, moments)
    return wide, moments, loss


@pytest.mark.parametrize("carry", ["average", "second", "reset"])
def test_rounds_have_the_bits_of_one_program_over_all_shards(carry: str) -> None:
    state, metrics = run(made(carry=carry), first(), 3)
    params, moments, loss = oracle(carry, 3)
    for name, leaf in params.items():
        np.testing.assert_array_equal(state["params"][name], leaf, err_msg=name)
    assert state["params"]["out"].dtype == jnp.float32
    assert float(metrics["loss"]) == float(loss)
    assert int(metrics["rows"]) == 8
    carried = dict(state["inner"])
    assert jax.random.key_data(carried.pop(".key")).tolist() != jax.random.key_data(first().key).tolist()
    named = {
        f".moments{jax.tree_util.keystr(path)}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(moments)
    }
    wanted = {"average": named.keys(), "second": {n for n in named if ".mu" not in n}, "reset": set()}[carry]
    assert carried.keys() == wanted
    for name, leaf in carried.items():
        np.testing.assert_array_equal(leaf, named[name], err_msg=name)


def test_small_steps_of_half_precision_parameters_add_up() -> None:
    """Each round goes a hundredth of what bfloat16 can tell from 1; in the job's state nothing is lost."""

    def tiny(w: Any, batch: Any) -> tuple[Any, Any]:
        return w - batch, {}

    train = jaxft.diloco(tiny, params=lambda w: w, outer=optax.sgd(1 / 128), every=1, carry="reset")
    state, _ = run(train, jnp.bfloat16(1.0), 64, lambda _number, _shard: jnp.bfloat16(1 / 128), shards=1)
    assert float(state["params"]) == 1 - 64 / 128**2


def test_quantised_rounds_learn_the_same() -> None:
    """Each element is within half a step of its block's grid, for an outer step of SGD(1.0)."""

    def towards(w: Any, batch: Any) -> tuple[Any, Any]:
        return w - 0.5 * (w - batch), {}

    def target(number: int, shard: int) -> np.ndarray:
        return np.random.default_rng([number, shard]).uniform(-1, 1, (256, 256)).astype(np.float32)

    found = []
    for quantize in (None, "int8"):
        train = jaxft.diloco(
            towards, params=lambda w: w, outer=optax.sgd(1.0), every=3, carry="reset", quantize=quantize
        )
        state, _ = run(train, jnp.zeros((256, 256)), 1, target, shards=2)
        found.append(np.asarray(state["params"]))
    assert 0 < np.abs(found[0] - found[1]).max() <= 1 / 128


def test_each_inner_step_is_asked_for_its_batch_and_reports_progress() -> None:
    asked: list[tuple[int, int]] = []

    def batches(number: int, shard: int) -> Any:
        asked.append((number, shard))
        return batch_for(number, shard)

    train = made()
    step = jaxft.fault_tolerant(train, None, shards=2)
    state = step.join(train.init(first()), batches)
    assert set(asked) == {(0, 0)}, "one inner step, to compile it"
    asked.clear()
    moves: list[None] = []
    with reporting(lambda: moves.append(None)):
        state, _ = step(state, batches)
        state, _ = step(state, batches)
    rounds = range(2)
    assert asked == [
        (number * EVERY + each, shard) for number in rounds for shard in range(2) for each in range(EVERY)
    ]
    assert len(moves) == 2 * 2 * (EVERY - 1)


def test_a_paused_shard_goes_on_where_it_was() -> None:
    """With the bits of one that was not paused, and no inner step is taken twice."""
    train, asked = made(), list[int]()

    def batches(number: int, shard: int) -> Any:
        asked.append(number)
        return batch_for(number, shard)

    state = train.init(first())
    leaves = jax.tree.leaves(state)
    ask = train.over(batches, lambda: leaves, state).ask
    wanted = ask(0, 1)
    asked.clear()
    left = [2]

    def goes_on() -> bool:
        left[0] -= 1
        return left[0] != 0

    parts = Parts(goes_on)
    with reporting(lambda: None, parts):
        with pytest.raises(Paused):
            ask(0, 1)
        assert asked == [0, 1]
        assert jaxft.digest(ask(0, 1)) == jaxft.digest(wanted)
    assert asked == list(range(EVERY))
    assert not parts.begun


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"delay": 2, "mix": 0.5}, "jaxft.diloco has no delay, mix. .* any group can compute any shard"),
        ({"carry": "shard"}, "carry is .shard., and must be one of .average., .second., .reset."),
        ({"outer": 0.7}, r"outer is a float. It must be an optimizer of optax"),
        ({"every": 0}, "every, the inner steps of a round, must be at least 1"),
        ({"params": 3}, "params is 3, a int, and not a function"),
    ],
)
def test_arguments_that_cannot_be_right(change: dict[str, Any], text: str) -> None:
    with pytest.raises(jaxft.ConfigurationError, match=text):
        made(**change)


def test_an_unknown_argument_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="no argument evry"):
        made(evry=5)


@pytest.mark.parametrize(
    ("change", "inner", "text"),
    [
        ({"params": lambda s: s.key}, first, r"The parameter .key is key<fry>, and not floating point"),
        (
            {"params": lambda s: {**s.params, "out": s.params["out"] * 2}},
            first,
            "must return leaves of the inner state as they are, each once",
        ),
        (
            {"carry": "second"},
            lambda: first()._replace(moments={"trace": jnp.zeros(2)}),
            r"the inner state has none. Its moments are .moments\['trace'\]",
        ),
        (
            {"carry": "reset"},
            lambda: first()._replace(moments={"trace": jnp.ones(2)}),
            "does not begin at zero",
        ),
        ({}, lambda: first()._replace(key=jnp.uint4(1)), "which groups cannot exchange"),
        ({}, lambda: first()._replace(key="text"), "and not an array of numbers"),
    ],
)
def test_inner_states_that_do_not_fit(change: dict[str, Any], inner: Callable[[], Any], text: str) -> None:
    with pytest.raises(jaxft.ConfigurationError, match=text):
        made(**change).init(inner())


def test_another_inner_state_needs_another_diloco() -> None:
    train = made()
    train.init(first())
    train.init(first())
    with pytest.raises(jaxft.ConfigurationError, match="Make one for each model"):
        train.init(first()._replace(key=jnp.zeros(2, jnp.uint32)))


def averages(state: Inner, batch: Any) -> tuple[Inner, Any]:
    grads = jax.jit(lambda: jaxft.pmean(jax.grad(loss_fn)(state.params, batch)))()
    return state._replace(params=jax.tree.map(jnp.subtract, state.params, grads)), {}


def draws(state: Inner, _batch: Any) -> tuple[Inner, Any]:
    return state, {"noise": jax.random.normal(jax.random.fold_in(state.key, jaxft.shard_index()))}


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (averages, "inner_step calls jaxft.pmean.* exchange nothing: jaxft.diloco averages at its end"),
        (draws, "inner_step calls jaxft.shard_index.* Put the number of the shard into the batch"),
        (lambda state, _: (jax.lax.pmean(state, "batch"), {}), "inner_step uses a named axis"),
        (lambda state, _: state, "inner_step returned a tuple of 3, but it must return a pair"),
        (lambda state, _: (state.params, {}), "inner_step returned a state of another structure"),
        (
            lambda state, _: (state._replace(params={**state.params, "out": state.params["hidden"]}), {}),
            r"returned the leaf .params\['out'\] as float32\[6, 16\], but it was given bfloat16\[16, 2\]",
        ),
    ],
)
def test_inner_steps_that_are_refused(inner: Any, text: str) -> None:
    train = jaxft.diloco(inner, params=lambda s: s.params, outer=OUTER, carry="average")
    with pytest.raises(jaxft.StepError, match=text):
        run(train, first(), 1)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (jaxft.data.FromState(lambda _step, _shard, _state: 0), "A single batch, and a FromState"),
        (np.zeros((8, 6)), "A single batch, and a FromState"),
    ],
)
def test_a_round_needs_a_batch_function(batches: Any, text: str) -> None:
    with pytest.raises(jaxft.ConfigurationError, match=text):
        run(made(), first(), 1, batches, shards=1)


def test_a_state_of_something_else() -> None:
    step = jaxft.fault_tolerant(made(), None, shards=1)
    with pytest.raises(jaxft.ConfigurationError, match="called with the state that its `init` returns"):
        step(first(), batch_for)


def test_what_does_not_go_with_rounds() -> None:
    with pytest.raises(jaxft.ConfigurationError, match="axis_name, overlap does not go with"):
        jaxft.fault_tolerant(made(), None, shards=2, axis_name="batch", overlap=2)
