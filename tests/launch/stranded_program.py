"""Training without checkpoints whose step 3 fails in every group: after that no group holds the job's state.

Its timeout is so long that the launcher cannot wait until a group fails for that.
"""

from typing import Any

import jax.numpy as jnp

import jaxft


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    return state + jaxft.pmean(batch), {}


def batch(step: int, shard: int) -> Any:
    if step == 3:
        raise ValueError("record 3 cannot be read")
    return jnp.full((4,), step + shard, jnp.float32)


def main() -> None:
    with jaxft.Manager(failure_timeout_s=900.0) as manager:
        step = jaxft.fault_tolerant(train_step, manager, shards=2)
        state = step.join(jnp.zeros(4), batch)
        for _ in manager.steps(5):
            state, _ = step(state, batch)


if __name__ == "__main__":
    main()
