"""Train steps of many kinds, each for any `mean`: `jaxft.pmean`, or the identity for a plain jitted step."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxft
from jaxft._programs._build import cut_programs
from jaxft._programs._fingerprint import program_digest as fingerprint_of
from jaxft._programs._partition import cut
from jaxft._programs._programs import Programs
from jaxft._programs._shardings import specs
from jaxft._programs._trace import trace_step

Mean = Callable[[Any], Any]
TrainStep = Callable[[Any, Any], tuple[Any, Any]]


def identity(tree: Any) -> Any:
    return tree


class Model(NamedTuple):
    """How to make a step, given a mean; a fresh state; and the batch of a number."""

    step: Callable[[Mean], TrainStep]
    state: Callable[[], Any]
    batch: Callable[[int], Any]


def numpy_batch(number: int, rows: int = 8, columns: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    x = random.standard_normal((rows, columns), dtype=np.float32)
    return {"x": x, "y": np.tanh(x[:, :2]) * np.float32(2)}


def mlp_params(columns: int = 4, width: int = 16) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    return {
        "w1": normal(random, columns, width),
        "b1": normal(random, width),
        "w2": normal(random, width, 2),
    }


def normal(random: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape, dtype=np.float32) * np.float32(0.3))


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"][None])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


class MuNuParams(NamedTuple):
    """The moments come before the parameters: the order in which a naive donation makes XLA copy."""

    mu: Any
    nu: Any
    params: Any
    count: jax.Array


def mlp_adam(width: int = 16, columns: int = 4) -> Model:
    def make(mean: Mean) -> TrainStep:
        def train_step(state: MuNuParams, batch: Any) -> tuple[MuNuParams, Any]:
            loss, grads = jax.value_and_grad(mlp_loss)(state.params, batch)
            grads, averaged = mean((grads, loss))
            count = state.count + 1
            mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, grads)
            nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state.nu, grads)
            rate = 0.1 / jnp.sqrt(count.astype(jnp.float32))
            params = jax.tree.map(lambda p, m, n: p - rate * m / (jnp.sqrt(n) + 1e-6), state.params, mu, nu)
            metrics = {"loss": averaged, "mine": loss, "rate": rate, "apart": loss - averaged}
            return MuNuParams(mu, nu, params, count), metrics

        return train_step

    def state() -> MuNuParams:
        params = mlp_params(columns, width)
        zeros = partial(jax.tree.map, jnp.zeros_like)
        return MuNuParams(zeros(params), zeros(params), params, jnp.zeros((), jnp.int32))

    return Model(make, state, partial(numpy_batch, columns=columns))


def bf16_sgd() -> Model:
    """bf16 parameters with float32 master weights."""

    def make(mean: Mean) -> TrainStep:
        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch)
            loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
            grads = mean(grads)
            master = jax.tree.map(lambda m, g: m - 0.1 * g.astype(jnp.float32), state["master"], grads)
            params = jax.tree.map(lambda m: m.astype(jnp.bfloat16), master)
            return {"master": master, "params": params}, {"loss": mean(loss)}

        return train_step

    def state() -> Any:
        master = mlp_params()
        return {"master": master, "params": jax.tree.map(lambda m: m.astype(jnp.bfloat16), master)}

    return Model(make, state, numpy_batch)


@partial(jax.custom_vjp)
def clip_gradient(x: jax.Array) -> jax.Array:
    return x


clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def transformer(layers: int = 2, width: int = 16, vocabulary: int = 32, length: int = 8) -> Model:
    """scan over layers, remat, custom_vjp, a nested jit, casts, noise from a typed key in the state."""
    optimizer = optax.sgd(1e-1, momentum=0.9)

    @jax.jit
    def attend(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
        q, k, v = jnp.split(x @ qkv, 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / np.float32(np.sqrt(width))
        mask = jnp.tril(jnp.ones((length, length), bool))[None]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        return clip_gradient(weights @ v) @ out

    def loss_fn(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            x = x + attend(x, weights["qkv"], weights["out"])
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        x = params["embed"][tokens[:, :-1]]
        x = x * jax.random.uniform(key, (), minval=0.5)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = (x.astype(jnp.bfloat16) @ params["embed"].T.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def make(mean: Mean) -> TrainStep:
        @jax.jit  # the whole step under jit, as many write it
        def train_step(state: Any, tokens: jax.Array) -> tuple[Any, Any]:
            key, use = jax.random.split(state["key"])
            loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens, use)
            grads, loss = mean((grads, loss))
            updates, opt_state = optimizer.update(grads, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
            return {"params": params, "opt": opt_state, "key": key}, metrics

        return train_step

    def state() -> Any:
        weights = partial(normal, np.random.default_rng(1))
        params = {
            "embed": weights(vocabulary, width),
            "layers": {
                "qkv": weights(layers, width, 3 * width),
                "out": weights(layers, width, width),
                "up": weights(layers, width, 2 * width),
                "down": weights(layers, 2 * width, width),
            },
        }
        return {"params": params, "opt": optimizer.init(params), "key": jax.random.key(7)}

    def batch(number: int) -> np.ndarray:
        random = np.random.default_rng(number)
        return random.integers(0, vocabulary, (4, length + 1), dtype=np.int32)

    return Model(make, state, batch)


def accumulating() -> Model:
    """Gradients accumulated over micro batches in a scan that also carries the PRNG key of the next step."""

    def make(mean: Mean) -> TrainStep:
        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            def micro(carry: Any, part: Any) -> tuple[Any, Any]:
                key, total = carry
                key, use = jax.random.split(key)
                noisy = {"x": part["x"] + 0.1 * jax.random.normal(use, part["x"].shape), "y": part["y"]}
                loss, grads = jax.value_and_grad(mlp_loss)(state["params"], noisy)
                return (key, jax.tree.map(jnp.add, total, grads)), loss

            parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
            zeros = jax.tree.map(jnp.zeros_like, state["params"])
            (key, grads), losses = jax.lax.scan(micro, (state["key"], zeros), parts)
            grads = mean(jax.tree.map(lambda g: g / 2, grads))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            return {"params": params, "key": key}, {"losses": losses}

        return train_step

    return Model(make, lambda: {"params": mlp_params(), "key": jax.random.key(5)}, numpy_batch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A plain dataclass as state; the average of the parameters starts as the very same arrays."""

    params: Any
    ema: Any
    previous: Any
    fixed: jax.Array


def plain_dataclass() -> Model:
    def make(mean: Mean) -> TrainStep:
        def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            loss, grads = jax.value_and_grad(mlp_loss)(state.params, batch)
            grads, loss = mean((grads, loss))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
            ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state.ema, params)
            new_state = TrainState(params=params, ema=ema, previous=state.params, fixed=state.fixed)
            return new_state, {"loss": loss, "fixed": state.fixed}

        return train_step

    def state() -> TrainState:
        params = mlp_params()
        return TrainState(params=params, ema=params, previous=params, fixed=jnp.arange(3.0))

    return Model(make, state, numpy_batch)


def linen() -> Model:
    """flax.linen with its TrainState, dropout and batch norm."""
    from flax import linen as nn
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Dense(16)(x))
            x = nn.Dropout(0.1, deterministic=False)(x)
            return nn.Dense(2)(nn.LayerNorm()(x))

    class State(train_state.TrainState):
        key: jax.Array

    net, optimizer = Net(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def make(mean: Mean) -> TrainStep:
        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            use = jax.random.fold_in(state.key, state.step)

            def loss_fn(params: Any) -> jax.Array:
                out = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": use})
                return jnp.mean((out - batch["y"]) ** 2)

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            grads, loss = mean((grads, loss))
            return state.apply_gradients(grads=grads), {"loss": loss}

        return train_step

    def state() -> Any:
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = net.init(rngs, jnp.zeros((1, 4)))
        return State.create(
            apply_fn=net.apply, params=variables["params"], tx=optimizer, key=jax.random.key(2)
        )

    return Model(make, state, numpy_batch)


def nnx_split() -> Model:
    """flax.nnx, split into a graph definition and a state."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.one = nnx.Linear(4, 16, rngs=rngs)
            self.two = nnx.Linear(16, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.two(nnx.relu(self.one(x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adam(1e-2)

    def make(mean: Mean) -> TrainStep:
        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            def loss_fn(params: Any) -> jax.Array:
                return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

            loss, grads = jax.value_and_grad(loss_fn)(state["params"])
            grads, loss = mean((grads, loss))
            updates, opt = optimizer.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

        return train_step

    def state() -> Any:
        fresh = jax.tree.map(jnp.copy, params)
        return {"params": fresh, "opt": optimizer.init(fresh)}

    return Model(make, state, numpy_batch)


def equinox_partition() -> Model:
    """equinox: the arrays of a module are the state, the rest of it is closed over."""
    import equinox as eqx

    net = eqx.nn.MLP(4, 2, 16, 2, key=jax.random.key(0))
    arrays, rest = eqx.partition(net, eqx.is_inexact_array)

    def make(mean: Mean) -> TrainStep:
        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            def loss_fn(arrays: Any) -> jax.Array:
                return jnp.mean((jax.vmap(eqx.combine(arrays, rest))(batch["x"]) - batch["y"]) ** 2)

            loss, grads = jax.value_and_grad(loss_fn)(state)
            grads, loss = mean((grads, loss))
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}

        return train_step

    return Model(make, lambda: jax.tree.map(jnp.copy, arrays), numpy_batch)


def bf16_sgd_programs() -> Programs:
    model = bf16_sgd()
    return cut_programs(model.step(jaxft.pmean), model.state(), model.batch(0))


def program_digest(model: Model) -> str:
    """The digest of a model's programs, which need not be compiled for that."""
    (state, state_tree), (batch, batch_tree) = map(jax.tree.flatten, (model.state(), model.batch(0)))
    state_specs, batch_specs = specs(state, batch)
    step = model.step(jaxft.pmean)
    traced = trace_step(step, (state_specs, state_tree), (batch_specs, batch_tree))
    parts = cut(traced.jaxpr, (traced.state_labels, traced.batch_labels), lambda _old, _new: True)
    return fingerprint_of(parts.programs)


def compute(programs: Programs, state: Any, batch: Any) -> Any:
    """The contribution of a batch, for a state that is still a tree."""
    return programs.compute(programs.state_leaves(state), batch)


def apply(programs: Programs, state: Any, means: Any, local: Any) -> tuple[Any, Any]:
    """The new state as a tree, and the metrics."""
    leaves, metrics = programs.apply(programs.state_leaves(state), means, local)
    return programs.unflatten(leaves), metrics


def bits(tree: Any) -> list[bytes]:
    """The bytes of every leaf, PRNG keys included."""
    leaves = jax.tree.leaves(tree)
    raw = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in leaves
    ]
    return [np.asarray(leaf).tobytes() for leaf in raw]


def values(tree: Any) -> list[np.ndarray]:
    """The values of every leaf; the data of PRNG keys."""
    leaves = jax.tree.leaves(tree)
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf)
        for leaf, key in zip(leaves, is_key, strict=True)
    ]


def assert_values_of_vmap(
    step: Any, state: Callable[[], Any], batch_for: Any, *, axis: str, shards: int, steps: int = 1
) -> None:
    """Compare a step alone with `jax.vmap` over the shards, which is JAX's own meaning of a step with an axis."""
    ours = jaxft.fault_tolerant(step, None, shards=shards, axis_name=axis)
    mapped = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name=axis))
    mine, theirs = state(), state()
    for number in range(steps):
        mine, metrics = ours(mine, batch_for)
        batches = jax.tree.map(
            lambda *rows: np.stack(rows), *(batch_for(number, shard) for shard in range(shards))
        )
        theirs, others = jax.tree.map(lambda leaf: leaf[0], mapped(theirs, batches))
        for one, other in zip(values((mine, metrics)), values((theirs, others)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def mostly_long(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test, of which `make test` runs `kept` alone, and `make test-long` the others."""

    def marked(*values: Any) -> Any:
        return pytest.param(*values, marks=pytest.mark.long)

    return [
        value if value in kept else marked(*value) if type(value) is tuple else marked(value)
        for value in values
    ]
