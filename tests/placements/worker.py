"""One group that trains a state of `states.py`: `python -m tests.placements.worker --state ... --group ...`."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jaxft  # noqa: E402
from tests.placements.states import STATES, batch_for, train_step_for  # noqa: E402


def places(state: Any) -> list[str]:
    """Where each leaf lies."""
    return [
        f"{leaf.sharding} committed={leaf.committed}" if isinstance(leaf, jax.Array) else "free"
        for leaf in jax.tree.leaves(state)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--group", default="alone")
    parser.add_argument("--state", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--gate", action="append", default=[], help="STEP:FILE: train beyond it with FILE")
    arguments = parser.parse_args()
    gates = {int(step): Path(file) for step, file in (gate.split(":", 1) for gate in arguments.gate)}
    state = STATES[arguments.state]()
    train_step = train_step_for(state)
    with arguments.events.open("a", buffering=1) as events:

        def write(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        def batch(step: int, shard: int) -> Any:
            while step in gates and not gates[step].exists():
                time.sleep(0.01)
            return batch_for(step, shard)

        if not arguments.coordinator:
            step = jaxft.fault_tolerant(train_step, None, shards=2)
            while step.step < arguments.steps:
                state, _ = step(state, batch)
            write(event="finished", digest=jaxft.digest(state), places=places(state))
            return
        manager = jaxft.Manager(
            arguments.coordinator,
            group=arguments.group,
            job="placements",
            digest_every=1,
            checkpoints=arguments.checkpoints and jaxft.Checkpoints(arguments.checkpoints, every_steps=6),
        )
        with manager:
            if arguments.checkpoints:
                state = manager.restore(state)
                write(event="began", step=manager.step)
            step = jaxft.fault_tolerant(train_step, manager, shards=2)
            while manager.step < arguments.steps:
                state, _ = step(state, batch)
                healed = manager.report.heal is not None
                write(event="step", step=manager.step, healed=healed, places=places(state))
            write(event="finished", digest=jaxft.digest(state), places=places(state))


if __name__ == "__main__":
    main()
