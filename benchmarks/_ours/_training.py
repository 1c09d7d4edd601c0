"""The loop of one group: a step with a sleep as device time, and random gradients."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxft
from benchmarks._words import DECAY, LEARNING_RATE, MOMENT, Words
from tests.processes import worker

State = dict[str, list[jax.Array]]


class Batches:
    """`batch_for(step, shard)`: takes as long as a device would; deterministic."""

    def __init__(self, shard_ms: float, noise: list[jax.Array]) -> None:
        self.busy_s = 0.0  # of the last shard: the real length of the sleep
        self._shard_s = shard_ms / 1e3
        self._noise = noise

    def __call__(self, step: int, shard: int) -> dict[str, Any]:
        began_s = time.monotonic()
        time.sleep(self._shard_s)
        self.busy_s = time.monotonic() - began_s
        return self.batch(step, shard)

    def batch(self, step: int, shard: int) -> dict[str, Any]:
        return {"scale": np.float32(np.sin(step * 7.0 + shard)), "noise": self._noise}


def make_step(mean: Callable[[Any], Any]) -> Callable[[State, dict[str, Any]], tuple[State, dict[str, Any]]]:
    def train_step(state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        pairs = zip(state["params"], batch["noise"], strict=True)
        grads = mean([_gradient(param, batch["scale"], noise) for param, noise in pairs])
        params = [param - LEARNING_RATE * grad for param, grad in zip(state["params"], grads, strict=True)]
        moments = {
            name: [MOMENT * old + grad for old, grad in zip(state[name], grads, strict=True)]
            for name in state
            if name != "params"
        }
        return {"params": params, **moments}, {}

    return train_step


def _gradient(param: jax.Array, scale: Any, noise: jax.Array) -> jax.Array:
    """A gradient that lies in memory before it is used, as a model's, which a matrix product makes.

    Outside of a branch, XLA would compute it within the update. A plain step would then write and read less than any
    step of a model, and less than the peer's.
    """
    return lax.cond(scale < 2.0, lambda: scale * noise + DECAY * param, lambda: jnp.zeros_like(param))


def layered(mean: Callable[[Any], Any], shard_s: float) -> Callable[..., tuple[State, dict[str, Any]]]:
    """The same step with a device's time in it: a third forwards, the rest in equal parts before each gradient."""

    def train_step(state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        count = len(batch["noise"])
        scale = _busy(batch["scale"], shard_s / 3)
        scales = [scale := _busy(scale, shard_s * 2 / 3 / count) for _ in range(count)]
        noise = [one * leaf for one, leaf in zip(scales, batch["noise"], strict=True)]
        return make_step(mean)(state, {"scale": np.float32(1.0), "noise": noise})

    return train_step


def _busy(value: Any, seconds: float) -> jax.Array:
    """The same value, once a device would have it."""

    def wait(given: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return np.asarray(given)

    return jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), value)


def not_ready(batch: dict[str, Any]) -> dict[str, Any]:
    """The same batch, of which a leaf is still being computed: JAX then starts a program with a callback and returns.

    Otherwise it would wait for such a program on a CPU, and for no program on a device.
    """
    return {**batch, "scale": _soon(batch["scale"], np.zeros((800, 800), np.float32))}


@jax.jit
def _soon(value: jax.Array, zeros: jax.Array) -> jax.Array:
    return value + (zeros @ zeros)[0, 0]


def make_state(megabytes: float, leaves: int, *, moments: bool) -> tuple[State, list[jax.Array]]:
    """The initial state, equal in all groups, and the noise for its gradients; each process holds a part."""
    random = np.random.default_rng(0)
    count = jax.process_count()
    size = int(megabytes * (1 << 20) / 4 / leaves) // count * count
    params, noise = (
        [_spread(random.standard_normal(size, np.float32)) for _ in range(leaves)] for _ in range(2)
    )
    state = {"params": params}
    if moments:
        zeros = np.zeros(size, np.float32)
        state |= {name: [_spread(zeros) for _ in params] for name in ("first", "second")}
    return state, noise


def _spread(values: np.ndarray) -> jax.Array:
    if jax.process_count() == 1:
        return jax.numpy.array(values)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def train(  # noqa: PLR0913 - the options of a benchmark, by name
    words: Words,
    *,
    address: str,
    group: str,
    shard_ms: float,
    megabytes: float,
    leaves: int,
    shards: int | None,
    moments: bool,
    spare: bool,
    plain: bool,
    overlap: int | None = None,
    world: tuple[int, int, int] | None = None,
) -> None:
    """Train until the parent sends "stop"; each event is a line.

    With `plain`, each step of the job is followed by a plain jitted step of a separate state. `world`: the rank of
    this process, the number of ranks of its group, and the port at which they meet.
    """
    if world is not None:
        worker.join_world(*world)
    _report_plans(words)
    state, noise = make_state(megabytes, leaves, moments=moments)
    batches = Batches(0.0 if overlap else shard_ms, noise)
    alone = _Plain(megabytes, leaves, noise, moments=moments) if plain else None
    words.say("made")
    words.hear("enter")
    words.say("entering")
    words.listen()
    with jaxft.Manager(address, group=group, spare=spare) as manager:
        words.say("entered")
        train_step = layered(jaxft.pmean, shard_ms / 1e3) if overlap else make_step(jaxft.pmean)
        step = jaxft.fault_tolerant(train_step, manager, shards=shards, overlap=overlap or 1)
        batch_for = batches if overlap is None else lambda step, shard: not_ready(batches(step, shard))
        while not words.over(manager.step):
            began_s = time.monotonic()
            state, _ = step(state, batch_for)
            took_s = time.monotonic() - began_s
            plain_s = None if alone is None else alone.step(batches, manager.step)
            _say_commit(words, manager.report, took_s, plain_s)
        words.say("end", step=manager.step, digest=jaxft.digest(state))


class _Plain:
    """The same step as one jitted program, without a job."""

    def __init__(self, megabytes: float, leaves: int, noise: list[jax.Array], *, moments: bool) -> None:
        self._state, _ = make_state(megabytes, leaves, moments=moments)
        self._step = jax.jit(make_step(lambda grads: grads), donate_argnums=0)
        self._state, _ = self._step(self._state, Batches(0.0, noise).batch(0, 0))

    def step(self, batches: Batches, number: int) -> float:
        began_s = time.monotonic()
        self._state, _ = self._step(self._state, batches(number, 0))
        jax.block_until_ready(self._state)
        return time.monotonic() - began_s


def _say_commit(words: Words, report: jaxft.StepReport, took_s: float, plain_s: float | None) -> None:
    names = ("step", "shards", "attempts", "compute_s", "exchange_s", "vote_s", "apply_s")
    values = {name: getattr(report, name) for name in names}
    heal = None if report.heal is None else dataclasses.asdict(report.heal)
    groups = {"members": len(report.members), "names": report.members}
    words.say("commit", took_s=took_s, plain_s=plain_s, heal=heal, **groups, **values)


def _report_plans(words: Words) -> None:
    """Report when this group has got its donors."""

    class Plans(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "heals to step" in record.msg:
                words.say("plan")

    logger = logging.getLogger("jaxft")
    logger.addHandler(Plans())
    logger.setLevel(logging.INFO)
