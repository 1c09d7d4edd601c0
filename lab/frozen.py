"""What the first step costs with frozen weights: closed over under `jax.jit`, closed over, or in the state.

    python -m lab.frozen
    python -m lab.frozen --megabytes 64 --rounds 5

Each way is a fresh process that trains adapters of so many weights, with JAX's cache off, in alternating order. It
prints medians: the seconds of the first step and of a later one, the processor time of the first, and by how much the
process's largest memory grew.
"""

import functools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import jaxft

WIDTH = 2048
RANK = 4
WAYS = ("jax.jit", "closed over", "in the state")


@dataclass(frozen=True)
class Arguments:
    """Train adapters of frozen weights."""

    megabytes: int = 256
    """Of frozen weights; 16 are a layer."""
    rounds: int = 3
    """So many processes of each way."""


@dataclass(frozen=True)
class Measured:
    """Of one process."""

    first_s: float
    first_cpu_s: float
    later_s: float
    grown_bytes: int


def loss_of(adapters: Any, frozen: Any, batch: Any) -> jax.Array:
    def layer(x: Any, weights: Any) -> Any:
        matrix, down, up = weights
        return jnp.tanh(x @ matrix + x @ down @ up), None

    made, _ = jax.lax.scan(layer, batch, (frozen, *adapters))
    return jnp.mean((made - batch) ** 2)


def updated(adapters: Any, grads: Any) -> Any:
    return jax.tree.map(lambda weights, grad: weights - 0.1 * grad, adapters, grads)


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((4, WIDTH), np.float32)


def stepper(way: str, frozen: Any) -> Callable[[Any], Any]:
    """A function from the adapters to those after one step."""

    def closed_over(adapters: Any, batch: Any) -> Any:
        loss, grads = jaxft.pmean(jax.value_and_grad(loss_of)(adapters, frozen, batch))
        return updated(adapters, grads), loss

    def in_the_state(state: Any, batch: Any) -> Any:
        weights, adapters = state
        loss, grads = jaxft.pmean(jax.value_and_grad(loss_of)(adapters, weights, batch))
        return (weights, updated(adapters, grads)), loss

    @jax.jit
    def jitted(adapters: Any, batch: Any) -> Any:
        return updated(adapters, jax.grad(loss_of)(adapters, frozen, batch))

    if way == "jax.jit":
        return lambda adapters: jitted(adapters, batch_for(0, 0))
    if way == "closed over":
        over = jaxft.fault_tolerant(closed_over, None, shards=1)
        return lambda adapters: over(adapters, batch_for)[0]
    held = jaxft.fault_tolerant(in_the_state, None, shards=1)
    return lambda adapters: held((frozen, adapters), batch_for)[0][1]


def measure(way: str, megabytes: int) -> Measured:
    """Take two steps."""
    rng = np.random.default_rng(0)
    layers = max(1, megabytes * 10**6 // (4 * WIDTH * WIDTH))
    frozen = jnp.asarray(rng.standard_normal((layers, WIDTH, WIDTH), np.float32) / 45)
    adapters: Any = (
        jnp.asarray(rng.standard_normal((layers, WIDTH, RANK), np.float32) / 45),
        jnp.zeros((layers, RANK, WIDTH)),
    )
    step = stepper(way, frozen)
    before_bytes, before_cpu_s = peak_bytes(), time.process_time()
    first_s, adapters = timed(step, adapters)
    first_cpu_s = time.process_time() - before_cpu_s
    later_s, _ = timed(step, adapters)
    return Measured(first_s, first_cpu_s, later_s, peak_bytes() - before_bytes)


def timed(step: Callable[[Any], Any], adapters: Any) -> tuple[float, Any]:
    began_s = time.perf_counter()
    adapters = jax.block_until_ready(step(adapters))
    return time.perf_counter() - began_s, adapters


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def in_fresh_process(function: Callable[[], Measured]) -> Measured:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function).result()


def main(arguments: Arguments) -> None:
    """Measure all ways in turns and print the medians."""
    found: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            found[way].append(in_fresh_process(functools.partial(measure, way, arguments.megabytes)))
    for way, measured in found.items():
        first_s, first_cpu_s, later_s, grown_bytes = (
            statistics.median(getattr(one, name) for one in measured)
            for name in ("first_s", "first_cpu_s", "later_s", "grown_bytes")
        )
        print(
            f"{way:13} first step {first_s:6.1f} s ({first_cpu_s:.1f} s of processor time), a later one "
            f"{later_s:5.2f} s, memory + {grown_bytes / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments, prog="python -m lab.frozen", description=__doc__))
