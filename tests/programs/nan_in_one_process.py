"""One of two processes of a mesh, of which the last has a NaN in its part of a step: `... RANK PORT`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft


def main(rank: int, port: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_debug_nans", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    spread = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))

    def put(values: list[float]) -> jax.Array:
        whole = np.array(values, np.float32)
        return jax.make_array_from_callback(whole.shape, spread, lambda part: whole[part])

    def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        grads = jax.grad(lambda state: jnp.sum(jnp.sqrt(batch) * state))(state)
        return state - 0.1 * jaxft.pmean(grads), {}

    step = jaxft.fault_tolerant(train_step, None)
    state, _ = step(put([1, 1]), put([1, 2]))
    try:
        step(state, put([1, -1]))
    except FloatingPointError as error:
        sys.stdout.write(f"{error}\n")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
