"""Train steps with several exchanges, each for any `mean`: `jaxft.pmean`, or JAX's over a named axis."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Mean = Callable[[Any], Any]
Batch = tuple[jax.Array, jax.Array]  # (rows, 16) and (rows, 4), both float32


class Staged(NamedTuple):
    """How to make a step, given a mean; a fresh state; how many exchanges the step has."""

    step: Callable[[Mean], Callable[..., tuple[Any, Any]]]
    state: Callable[[], Any]
    stages: int


def _weights(seed: int, *shapes: tuple[int, int]) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(np.float32(0.3) * rng.standard_normal(shape, np.float32)) for shape in shapes]


def _net(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights[:-1]:
        x = jnp.tanh(x @ weight)
    return x @ weights[-1]


def _loss(weights: list[jax.Array], batch: Batch) -> jax.Array:
    return jnp.mean((_net(weights, batch[0]) - batch[1]) ** 2)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def _moved(tree: Any, by: Any, rate: Any) -> Any:
    return jax.tree.map(lambda one, other: one - rate * other, tree, by)


def _sam(mean: Mean) -> Callable[..., tuple[Any, Any]]:
    """Sharpness-aware minimization: the gradient at the point to which the mean gradient leads uphill."""

    def train_step(state: Any, batch: Batch, rate: Any) -> tuple[Any, Any]:
        local, uphill = jax.value_and_grad(_loss)(state["w"], batch)
        uphill, first = mean((uphill, local))
        there = _moved(state["w"], uphill, -0.05 / (_norm(uphill) + 1e-6))
        second, grads = jax.value_and_grad(_loss)(there, batch)
        grads = mean(grads)
        metrics = {"loss": first, "local": local, "there": second, "apart": second - first}
        return {"w": _moved(state["w"], grads, rate)}, metrics

    return train_step


def _gan(mean: Mean) -> Callable[..., tuple[Any, Any]]:
    """A discriminator, and then a generator against the new one; both see the same fakes."""

    def train_step(state: Any, batch: Batch, rate: Any) -> tuple[Any, Any]:
        x, real = batch
        key, use = jax.random.split(state["key"])
        scale = jax.random.uniform(use, (), minval=0.9)
        fake = _net(state["g"], x) * scale

        def judged(d: Any) -> jax.Array:
            return jnp.mean(jax.nn.softplus(-_net(d, real))) + jnp.mean(jax.nn.softplus(_net(d, fake)))

        d_loss, d_grads = jax.value_and_grad(judged)(state["d"])
        d_grads, d_mean = mean((d_grads, d_loss))
        d = _moved(state["d"], d_grads, rate)

        def fooled(g: Any) -> jax.Array:
            return jnp.mean(jax.nn.softplus(-_net(d, _net(g, x) * scale)))

        g_loss, g_grads = jax.value_and_grad(fooled)(state["g"])
        g_grads, g_mean = mean((g_grads, g_loss))
        new = {"d": d, "g": _moved(state["g"], g_grads, rate), "key": key}
        return new, {"loss": d_mean + g_mean, "local": jnp.mean(fake)}

    return train_step


def _clipped(mean: Mean) -> Callable[..., tuple[Any, Any]]:
    """The means are clipped by their global norm, and then each shard's distance from them is averaged."""

    def train_step(state: Any, batch: Batch, rate: Any) -> tuple[Any, Any]:
        local, own = jax.value_and_grad(_loss)(state["w"], batch)
        grads, loss = mean((own, local))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / _norm(grads)), grads)
        spread = mean(_norm(_moved(own, grads, 1.0)))
        return {"w": _moved(state["w"], grads, rate / (1.0 + spread))}, {"loss": loss, "spread": spread}

    return train_step


def _thrice(mean: Mean) -> Callable[..., tuple[Any, Any]]:
    """Normalised by the mean and by the variance over all shards, in the forward pass: three exchanges."""

    def train_step(state: Any, batch: Batch, rate: Any) -> tuple[Any, Any]:
        hidden = batch[0] @ state["w"][0]
        middle = mean(jnp.mean(hidden, axis=0, keepdims=True))
        spread = mean(jnp.mean((hidden - middle) ** 2, axis=0, keepdims=True))
        normed = (hidden - middle) / jnp.sqrt(spread + 1e-3)
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((normed @ w - batch[1]) ** 2))(state["w"][1])
        grad, loss = mean((grad, loss))
        return {"w": [state["w"][0], state["w"][1] - rate * grad]}, {"loss": loss, "middle": middle}

    return train_step


def _contrastive(mean: Mean) -> Callable[..., tuple[Any, Any]]:
    """Each row is compared with the rows of all shards: the loss gathers them, its gradient scatters their sum."""

    def loss(weights: list[jax.Array], batch: Batch) -> jax.Array:
        x, y = batch
        a, b = x @ weights[0], y @ weights[1]
        others = jax.lax.all_gather(b, AXIS, tiled=True)
        rows = jnp.arange(len(a))
        mine = len(a) * jax.lax.axis_index(AXIS) + rows
        return -jnp.mean(jax.nn.log_softmax(a @ others.T)[rows, mine])

    def train_step(state: Any, batch: Batch, rate: Any) -> tuple[Any, Any]:
        local, grads = jax.value_and_grad(loss)(state["w"], batch)
        grads, mean_loss = mean((grads, local))
        largest = jax.lax.pmax(jnp.max(jnp.abs(batch[0])), AXIS)
        return {"w": _moved(state["w"], grads, rate)}, {"loss": mean_loss, "local": local, "largest": largest}

    return train_step


def _rounds(mean: Mean) -> Callable[..., tuple[Any, Any]]:
    """Three updates in a scan, each on a part of the batch, with momentum, a count and noise for all shards."""

    def train_step(state: Any, batch: Batch, rate: Any) -> tuple[Any, Any]:
        def one(state: Any, rows: Batch) -> Any:
            key, use = jax.random.split(state["key"])
            count = state["count"] + 1
            noise = 0.01 * jax.random.normal(use, rows[0].shape)
            local, grads = jax.value_and_grad(_loss)(state["w"], (rows[0] + noise, rows[1]))
            grads, loss = mean((grads, local))
            momentum = _moved(grads, state["momentum"], -0.5)
            w = _moved(state["w"], momentum, rate / (1 - 0.5 ** count.astype(jnp.float32)))
            return {"w": w, "momentum": momentum, "count": count, "key": key}, (loss, local)

        parts = jax.tree.map(lambda leaf: leaf[: len(leaf) // 3 * 3].reshape(3, -1, leaf.shape[-1]), batch)
        state, (losses, local) = jax.lax.scan(one, state, parts)
        return state, {"loss": losses.mean(), "local": local}

    return train_step


def _quantised(mean: Mean) -> Callable[..., tuple[Any, Any]]:
    """Gradients in eight bits, small as they are, beside a loss in float32."""

    def train_step(state: Any, batch: Batch, rate: Any) -> tuple[Any, Any]:
        local, grads = jax.value_and_grad(_loss)(state["w"], batch)
        grads, loss = functools.partial(mean, quantize=lambda *_: "int8")(grads), mean(local)
        return {"w": _moved(state["w"], grads, rate)}, {"loss": loss, "local": local}

    return train_step


def _in_rounds() -> Any:
    zeros = jax.tree.map(jnp.zeros_like, _weights_only()["w"])
    return {**_weights_only(), "momentum": zeros, "count": jnp.zeros((), jnp.int32), "key": jax.random.key(5)}


def _weights_only() -> Any:
    return {"w": _weights(7, (16, 8), (8, 4))}


def _gan_state() -> Any:
    return {"g": _weights(1, (16, 8), (8, 4)), "d": _weights(2, (4, 8), (8, 1)), "key": jax.random.key(3)}


def _two_towers() -> Any:
    return {"w": _weights(2, (16, 8), (4, 8))}


# Of steps with collectives over an axis of this name.
AXIS = "shards"
OVER_AXIS = {"contrastive": Staged(_contrastive, _two_towers, 3)}
# Of steps whose mean is `jaxft.pmean` alone.
OWN = {"quantised": Staged(_quantised, _weights_only, 2)}
MODELS = {
    "sam": Staged(_sam, _weights_only, 2),
    "gan": Staged(_gan, _gan_state, 2),
    "clipped": Staged(_clipped, _weights_only, 2),
    "thrice": Staged(_thrice, _weights_only, 3),
    "rounds": Staged(_rounds, _in_rounds, 3),
}
