"""The cost of calling a step with many small leaves: the engine alone, without a job."""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from benchmarks._worker import serve
from jaxft._programs._build import cut_programs
from jaxft._programs._programs import Programs

State = dict[str, list[jax.Array]]
Call = Callable[[State, jax.Array], State]


def measure(leaves: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of each call, interleaved; the states at the end are compared.

    "plain" is the jitted step, "bare" are the two compiled programs of the cut step, called with their inputs, and
    "wrapped" is the fault-tolerant step, which calls the same two.
    """
    ways = _ways(_state(leaves), jnp.float32(0.0))
    states = {name: _state(leaves) for name in ways}
    took_us: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(calls):
        given = jnp.float32(np.sin(number))
        for name, call in ways.items():
            began_s = time.perf_counter()
            states[name] = call(states[name], given)
            jax.block_until_ready(states[name])
            took_us[name].append((time.perf_counter() - began_s) * 1e6)
    plain, bare, wrapped = (jax.tree.leaves(states[name]) for name in ways)
    for one, other, third in zip(plain, bare, wrapped, strict=True):
        np.testing.assert_allclose(one, third, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(other, third)
    return {name: values[calls // 10 :] for name, values in took_us.items()}


def _step(mean: Callable[[Any], Any]) -> Callable[[State, jax.Array], tuple[State, dict[str, Any]]]:
    def train_step(state: State, batch: jax.Array) -> tuple[State, dict[str, Any]]:
        grads = mean([batch * jnp.tanh(param) for param in state["params"]])
        return {"params": [p - 0.1 * grad for p, grad in zip(state["params"], grads, strict=True)]}, {}

    return train_step


def _state(leaves: int) -> State:
    return {"params": [jnp.full(8, float(number)) for number in range(leaves)]}


def _ways(state: State, batch: jax.Array) -> dict[str, Call]:
    plain = jax.jit(_step(lambda grads: grads), donate_argnums=0)
    step = jaxft.fault_tolerant(_step(jaxft.pmean), None, shards=1)
    programs = cut_programs(_step(jaxft.pmean), state, batch)
    return {
        "plain": lambda state, batch: plain(state, batch)[0],
        "bare": lambda state, batch: _bare(programs, state, batch),
        "wrapped": lambda state, batch: step(state, lambda *_: batch)[0],
    }


def _bare(programs: Programs, state: State, batch: jax.Array) -> State:
    """Only the two programs: both read all leaves, in this order."""
    params = state["params"]
    grads = programs.executables.computes[0](*params, batch)
    return {"params": programs.executables.apply(*params, *grads)}


if __name__ == "__main__":
    serve(sys.modules[__name__])
