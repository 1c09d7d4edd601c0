"""One group whose loop is the user's own: `python loops.py --group ... --events ... --loop steps --edit 10`.

Its state has a Python number and a numpy array among its leaves, and is edited by the host.
"""

import argparse
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from tests.processes.worker import KillAt, join_world, spread, wait_for


def init() -> dict[str, Any]:
    return {
        "w": jnp.zeros((4, 3)),
        "sum": np.zeros(2, np.float32),
        "rate": jnp.float32(0.5),
        "step": 0,
        "key": jax.random.key(3),
    }


def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    grads = jax.grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(state["w"])
    grads, mean = jaxft.pmean((grads, jnp.mean(batch)))
    new = {
        "w": state["w"] - state["rate"] * grads,
        "sum": state["sum"] + mean,
        "rate": state["rate"],
        "step": state["step"] + 1,
        "key": jax.random.split(state["key"], 1)[0],
    }
    return new, {"mean": mean}


def slower(state: dict[str, Any]) -> dict[str, Any]:
    """The edit: what schedules, `metrics.reset()` and a new key do."""
    return {
        **state,
        "w": state["w"] * 0.5,
        "rate": state["rate"] * 0.5,
        "sum": np.zeros(2, np.float32),
        "key": jax.random.fold_in(state["key"], 1),
    }


def main() -> None:  # noqa: C901 (a branch for each flag)
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--group", default="alone")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loop", choices=("steps", "range", "while"), default="steps")
    parser.add_argument(
        "--edit", type=int, action="append", default=[], help="before this step, with step.edit"
    )
    parser.add_argument("--copy", action="store_true", help="give the step a copy of its state")
    parser.add_argument("--world", default="", help="RANK:RANKS:PORT:DEVICES, as in worker.py")
    parser.add_argument(
        "--gate", action="append", default=[], help="STEP:FILE, start:FILE or joined:FILE: wait for FILE"
    )
    parser.add_argument("--die", default="")
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--no-restore", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if arguments.die:
        logging.getLogger("jaxft").setLevel(logging.DEBUG)
        logging.getLogger("jaxft").addHandler(KillAt(arguments.die, os.getpid()))
    gates = {step: Path(path) for step, path in (gate.split(":", 1) for gate in arguments.gate)}

    if arguments.world:
        join_world(*map(int, arguments.world.split(":")))

    def batch_for(step: int, shard: int) -> Any:
        if str(step) in gates:
            wait_for(gates[str(step)])
        batch = np.random.default_rng([step, shard]).standard_normal((8, 4), dtype=np.float32)
        return spread(batch) if arguments.world else batch

    with arguments.events.open("a", buffering=1) as events:

        def write(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        def train(manager: jaxft.Manager | None) -> None:  # noqa: C901 (a branch for each flag)
            step = jaxft.fault_tolerant(train_step, manager, shards=4)
            state: Any = spread(init()) if arguments.world else init()
            if manager is not None and arguments.checkpoints and not arguments.no_restore:
                state = manager.restore(state)
            if arguments.loop == "steps":
                state = step.join(state, batch_for)
                write(event="joined", step=step.step, count=int(state["step"]))
                if "joined" in gates:
                    wait_for(gates["joined"])

            def counted() -> Iterator[int]:
                if arguments.loop == "steps":
                    yield from (
                        step.steps(arguments.steps) if manager is None else manager.steps(arguments.steps)
                    )
                elif arguments.loop == "range":
                    yield from range(arguments.steps)
                else:
                    while step.step < arguments.steps:
                        yield step.step

            for number in counted():
                if number in arguments.edit:
                    state = step.edit(state, slower)
                if arguments.copy:
                    state = jax.tree.map(jnp.copy, state)
                state, _ = step(state, batch_for)
                write(event="step", number=number, step=int(state["step"]))
            write(event="finished", step=step.step, digest=jaxft.digest(state))

        if not arguments.coordinator:
            train(None)
            return
        checkpoints = arguments.checkpoints and jaxft.Checkpoints(arguments.checkpoints, every_steps=10)
        with jaxft.Manager(
            arguments.coordinator,
            group=arguments.group,
            job="loops",
            failure_timeout_s=600.0,
            spare=arguments.spare,
            digest_every=1000,
            checkpoints=checkpoints,
        ) as manager:
            if "start" in gates:
                wait_for(gates["start"])
            train(manager)


if __name__ == "__main__":
    main()
