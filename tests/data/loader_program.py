"""One group that trains on batches of another library: `python loader_program.py --loader grain ...`."""

import argparse
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxft
from jaxft.data import Batches, Prefetch, from_iterator
from tests.processes.worker import KillAt, wait_for

SHARDS, STEPS = 4, 14
SAMPLES = np.random.default_rng(5).standard_normal((200, 3)).astype(np.float32)


def with_grain() -> Any:
    import grain

    def make(shard: int, start: int = 0) -> Any:
        samples = grain.MapDataset.source(SAMPLES).seed(3).shuffle()[shard::SHARDS]
        return samples.repeat().batch(4)[start:].to_iter_dataset()

    return from_iterator(make, SHARDS)


def with_prefetch() -> Any:
    return Prefetch(
        Batches(SAMPLES, shards=SHARDS, samples_per_shard=4, drop_last=True).samples_only(), ahead=3
    )


LOADERS: dict[str, Callable[[], Any]] = {"grain": with_grain, "prefetch": with_prefetch}


def train_step(w: Any, batch: Any) -> tuple[Any, Any]:
    mean = jaxft.pmean(jnp.mean(batch, axis=0) * (1.0 + w))
    return w + mean, {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--group", default="alone")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--loader", choices=LOADERS, required=True)
    parser.add_argument(
        "--gate", action="append", default=[], help="STEP:FILE, start:FILE or joined:FILE: wait for FILE"
    )
    parser.add_argument("--die", default="")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if arguments.die:
        logging.getLogger("jaxft").setLevel(logging.DEBUG)
        logging.getLogger("jaxft").addHandler(KillAt(arguments.die, os.getpid()))
    gates = {step: Path(path) for step, path in (gate.split(":", 1) for gate in arguments.gate)}
    batches = LOADERS[arguments.loader]()
    with arguments.events.open("a", buffering=1) as events:

        def write(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        def train(manager: jaxft.Manager | None) -> None:
            if "start" in gates:
                wait_for(gates["start"])
            step = jaxft.fault_tolerant(train_step, manager, shards=SHARDS)
            state = step.join(jnp.zeros(3), batches)
            write(event="joined", step=step.step)
            if "joined" in gates:
                wait_for(gates["joined"])
            for number in step.steps(STEPS):
                if str(number) in gates:
                    wait_for(gates[str(number)])
                state, _ = step(state, batches)
                write(event="step", number=number)
            write(event="finished", digest=jaxft.digest(state))

        if not arguments.coordinator:
            train(None)
            return
        with jaxft.Manager(
            arguments.coordinator, group=arguments.group, job="data", failure_timeout_s=600.0
        ) as manager:
            train(manager)


if __name__ == "__main__":
    main()
