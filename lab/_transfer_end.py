"""One process of `lab.transfer`: holds a state, offers it over `jax.experimental.transfer`, and pulls another's."""

import datetime
import gc
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from benchmarks._ours.heal import Donor, heal
from benchmarks._state import make_memory_fresh, sums, values
from benchmarks._worker import serve

CONNECTIONS = 4  # several, as its users choose; with none, it moves data within one process only
PIECE_BYTES = 1 << 20


class End:
    """A transfer server, without which there are no connections to others either."""

    def __init__(self) -> None:
        device = jax.devices()[0]
        self._placement = SingleDeviceSharding(device)
        self._server = transfer.start_transfer_server(
            device.client,
            "127.0.0.1:0",
            ["127.0.0.1:0"] * CONNECTIONS,
            transfer_size=PIECE_BYTES,
        )
        self._leaves: list[jax.Array] = []

    def make(self, sizes: list[int], seed: int) -> str:
        """Make float32 leaves of these sizes; returns the server's address."""
        self._leaves = [jax.numpy.array(leaf, copy=True) for leaf in values(sizes, seed)]
        return self._server.address()

    def offer(self, number: int) -> None:
        """Each offer is good for one pull."""
        self._server.await_pull(number, self._leaves)

    def pull(
        self, address: str, number: int, sizes: list[int], dtype: str, patience_s: float
    ) -> dict[str, Any]:
        """Pull an offer; returns seconds, and the sums of the leaves."""
        gc.collect()
        make_memory_fresh(4 * sum(sizes))
        like = [jax.ShapeDtypeStruct((size,), dtype, sharding=self._placement) for size in sizes]
        deadline = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=patience_s)
        began_s = time.perf_counter()
        connection = self._server.connect(address)
        pulled = jax.block_until_ready(connection.pull(number, like, timeout=deadline))
        return {"seconds": time.perf_counter() - began_s, "sums": sums(map(np.asarray, pulled))}


if __name__ == "__main__":
    end, donor = End(), Donor()
    jax_transfer = {"make": end.make, "offer": end.offer, "pull": end.pull}
    our_heal = {"hold": donor.hold, "pin": donor.pin, "heal": heal}
    serve(SimpleNamespace(**jax_transfer, **our_heal))
