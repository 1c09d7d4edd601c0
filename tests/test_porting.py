"""The loop of docs/porting.md, as it stands there: in two groups, with the bits of the step alone."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from tests import patience
from tests.clusters import cluster

PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text()
LOOP, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOTAL = 250
BATCHES = jaxft.data.Batches(
    np.random.default_rng(0).standard_normal((50, 3), dtype=np.float32), shards=4, samples_per_shard=3
)


def train_step(w: Any, batch: Any) -> tuple[Any, Any]:
    def loss(w: Any) -> Any:
        return jnp.mean(batch.weight * (batch.samples @ w - 1.0) ** 2)

    value, gradient = jaxft.pmean(jax.value_and_grad(loss)(w))
    return w - 0.01 * gradient, {"loss": value}


def run(address: str, group: str, written: list[tuple[int, float]]) -> jax.Array:
    """Run the loop in a group of this name; its output goes to `written`."""

    def manager(coordinator: str, **arguments: Any) -> jaxft.Manager:
        assert (coordinator, arguments) == ("coordinator:29510", {"group": "group-0"})
        return jaxft.Manager(address, group=group, min_replicas=2, failure_timeout_s=600.0)

    names = {
        "jaxft": SimpleNamespace(
            **{**{name: getattr(jaxft, name) for name in jaxft.__all__}, "Manager": manager}
        ),
        "print": lambda *values: written.append(values),
        **{"train_step": train_step, "state": jnp.zeros(3), "batches": BATCHES, "total": TOTAL},
    }
    exec(compile(LOOP, "docs/porting.md", "exec"), names)
    assert names["manager"].step == TOTAL
    return names["state"]


def alone() -> jax.Array:
    """The recipe's first try: the same step without a manager."""
    step = jaxft.fault_tolerant(train_step, manager=None, shards=BATCHES.shards)
    state = step.join(jnp.zeros(3), BATCHES)
    for _ in step.steps(TOTAL):
        state, _ = step(state, BATCHES)
    return state


@pytest.mark.long
@pytest.mark.processes
def test_the_loop_of_the_page_runs_in_two_groups(tmp_path: Path) -> None:
    written: list[tuple[int, float]] = []
    states: dict[str, jax.Array] = {}
    with cluster(tmp_path) as here:
        here.start_coordinator()

        def group(name: str) -> None:
            states[name] = run(f"localhost:{here.port}", name, written)

        threads = [
            threading.Thread(target=group, args=(f"group-{number}",), daemon=True) for number in range(2)
        ]
        for thread in threads:
            thread.start()
        patience.until(
            lambda: not any(thread.is_alive() for thread in threads), "both groups to end", limit_s=60.0
        )
    expected = np.asarray(alone()).tobytes()
    assert {name: np.asarray(state).tobytes() == expected for name, state in states.items()} == {
        "group-0": True,
        "group-1": True,
    }
    # One group writes, once in each hundred, or again where another has taken over.
    steps = [step for step, _ in written]
    assert len(set(steps)) == len(steps)
    assert {step // 100 for step in steps} == {1, 2}


class Jumping:
    """A Manager and its step in one, whose calls come back at later steps, as after heals."""

    def __init__(self, jumps: dict[int, int]) -> None:
        self.step, self.is_writer, self._jumps = 0, True, jumps

    def __enter__(self) -> "Jumping":
        return self

    def __exit__(self, *error: object) -> None:
        return

    def join(self, state: Any, _batches: Any) -> Any:
        return state

    def steps(self, total: int) -> Iterator[int]:
        while self.step < total:
            yield self.step

    def __call__(self, state: Any, _batches: Any) -> Any:
        self.step = self._jumps.get(self.step, self.step + 1)
        return state, {"loss": 0.5}


def test_a_loop_that_jumps_over_a_hundredth_step_writes_at_the_next() -> None:
    manager = Jumping({98: 103, 104: 160, 199: 201})
    written: list[tuple[int, float]] = []
    names = {
        "jaxft": SimpleNamespace(Manager=lambda *_, **__: manager, fault_tolerant=lambda *_, **__: manager),
        "print": lambda *values: written.append(values),
        **{"train_step": None, "state": None, "batches": BATCHES, "total": TOTAL},
    }
    exec(compile(LOOP, "docs/porting.md", "exec"), names)
    assert written == [(103, 0.5), (201, 0.5)]
