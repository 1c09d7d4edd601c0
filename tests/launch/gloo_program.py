"""A group of several processes, which all-reduces with `jax.distributed` over gloo, without a Manager.

    gloo_program.py FOLDER STEPS [RAISES]

RAISES: `in-manager`: rank 1 raises once the ranks have entered a Manager; `leader`: rank 0 raises once they have met.
Each step adds rank + 1 of all ranks. The file FOLDER/GROUP.RANK holds the number of steps of this rank, so that a
restarted group continues. While FOLDER has a file `hold`, ranks wait before a step.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft


def main(folder: Path, steps: int, raises: str) -> None:
    rank, nproc = int(os.environ["JAXFT_RANK"]), int(os.environ["JAXFT_NPROC"])
    jax.distributed.initialize(num_processes=nproc, process_id=rank, initialization_timeout=100)
    if rank == 0 and raises == "leader":
        raise ValueError("this rank cannot train")
    assert (jax.process_count(), jax.process_index()) == (nproc, rank)
    if raises == "in-manager":
        with jaxft.Manager(os.environ["JAXFT_COORDINATOR"], group=os.environ["JAXFT_GROUP"]):
            if rank == 1:
                raise ValueError("this rank cannot train")
            multihost_utils.sync_global_devices("rank 1 never comes here")
    mesh = Mesh(np.array(jax.devices()), ("rank",))
    ones = jax.make_array_from_callback(
        (nproc,), NamedSharding(mesh, P("rank")), lambda _: np.full(1, rank + 1, np.float32)
    )
    total = jax.jit(lambda x: jnp.sum(x), out_shardings=NamedSharding(mesh, P()))
    done = folder / f"{os.environ['JAXFT_GROUP']}.{rank}"
    for step in range(steps):
        while step == 3 and (folder / "hold").exists():
            done.write_text("holds")
            time.sleep(0.01)
        value = float(total(ones).addressable_data(0))
        assert value == nproc * (nproc + 1) / 2, value
    done.write_text(f"done {value} with {len(jax.devices())} devices")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:] or [""])
