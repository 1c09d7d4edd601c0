"""A program that trains on as many devices as it is shown, FSDP over all of them.

ladder_program.py FOLDER STEPS    in FOLDER: `hurry` ends its pauses; it writes GROUP.jsonl
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft

WIDTH, SHARDS = 64, 6
PACE_S = 0.2


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    rows = NamedSharding(mesh, P("fsdp"))
    first = np.random.default_rng(0).standard_normal((2, WIDTH, WIDTH), np.float32) / 8
    state = {"w1": jax.device_put(first[0], rows), "w2": jax.device_put(first[1], rows)}

    def train_step(state: Any, batch: jax.Array) -> Any:
        def loss_of(state: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(batch @ state["w1"]) @ state["w2"] - batch) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state)
        grads, loss = jaxft.pmean((grads, loss))
        scale = jnp.minimum(1.0, 0.1 / jaxft.global_norm(grads))
        return jax.tree.map(lambda leaf, grad: leaf - 0.5 * scale * grad, state, grads), {"loss": loss}

    def batch_for(step: int, shard: int) -> jax.Array:
        random = np.random.default_rng((step, shard))
        return jax.device_put(random.standard_normal((16, WIDTH), np.float32), rows)

    group = os.environ["JAXFT_GROUP"]
    with (folder / f"{group}.jsonl").open("a") as file:

        def tell(**fields: Any) -> None:
            file.write(json.dumps({"t": time.time(), **fields}) + "\n")
            file.flush()

        with jaxft.Manager(failure_timeout_s=60.0) as manager:
            step = jaxft.fault_tolerant(train_step, manager, shards=SHARDS)
            state = step.join(state, batch_for)
            for number in manager.steps(steps):
                state, _ = step(state, batch_for)
                tell(event="step", step=number, devices=jax.device_count(), shards=manager.report.shards)
                if not (folder / "hurry").exists():
                    # Slower and slower: a slow machine must not let the job end before the test has done all.
                    time.sleep(PACE_S * steps / (steps - number))
        tell(event="finished", digest=jaxft.digest(state))


if __name__ == "__main__":
    main()
