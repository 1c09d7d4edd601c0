"""One group on the device that JAX finds: `python worker.py --coordinator ... --group ... --events FILE`.

Trains a transformer, with an average of its embedding in pinned host memory.
"""

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxft
from tests.accelerator import models
from tests.processes.worker import KillAt, wait_for
from tests.step_models import Model, TrainStep

SHARDS = 4


def start(model: Model) -> dict[str, Any]:
    inner = model.state()
    far = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    zeros = np.zeros(inner["params"]["embed"].shape, np.float32)
    return {"inner": inner, "average": jax.device_put(zeros, far)}


def step_of(model: Model) -> TrainStep:
    train = model.step(jaxft.pmean)

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inner, metrics = train(state["inner"], batch)
        near = jax.device_put(state["average"], jax.memory.Space.Device)
        average = near * 0.9 + inner["params"]["embed"] * 0.1
        return {"inner": inner, "average": jax.device_put(average, jax.memory.Space.Host)}, metrics

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--group", default="alone")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--die", default="", help="kill -9 itself at such a message of the library")
    parser.add_argument("--gate", action="append", default=[], help="STEP:FILE or start:FILE: wait for FILE")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if arguments.die:
        logging.getLogger("jaxft").setLevel(logging.DEBUG)
        logging.getLogger("jaxft").addHandler(KillAt(arguments.die, os.getpid()))
    gates = {step: Path(path) for step, path in (gate.split(":", 1) for gate in arguments.gate)}
    model = models.trained_in_groups()

    def batch_for(step: int, shard: int) -> Any:
        if str(step) in gates:
            wait_for(gates[str(step)])
        return model.batch(step * SHARDS + shard)

    with arguments.events.open("a", buffering=1) as events:

        def write(**event: Any) -> None:
            events.write(json.dumps({"t": time.time(), **event}) + "\n")

        def finish(state: Any, number: int) -> None:
            kind = state["average"].sharding.memory_kind
            write(event="finished", step=number, digest=jaxft.digest(state), kind=kind)

        state, train_step = start(model), step_of(model)
        if not arguments.coordinator:
            step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
            while step.step < arguments.steps:
                state, _ = step(state, batch_for)
            finish(state, step.step)
            return
        with jaxft.Manager(
            arguments.coordinator, group=arguments.group, job="accelerator", digest_every=1
        ) as manager:
            if "start" in gates:
                wait_for(gates["start"])
            step = jaxft.fault_tolerant(train_step, manager, shards=SHARDS)
            while manager.step < arguments.steps:
                state, _ = step(state, batch_for)
                healed = manager.report.heal is not None
                write(event="step", step=manager.step, shards=manager.report.shards, healed=healed)
            finish(state, manager.step)


if __name__ == "__main__":
    main()
