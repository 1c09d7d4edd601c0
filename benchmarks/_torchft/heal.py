"""TorchFT's two checkpoint transports, as a donor and as a joiner: HTTP, and its process group over gloo.

Runs under TorchFT's own interpreter. Neither transport verifies what arrived; the sums here are taken afterwards.
"""

import re
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroupGloo

from benchmarks._state import make_memory_fresh, sums, values
from benchmarks._worker import serve

STEP = 3
TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")


class Side:
    """A donor (rank 0) or a joiner (rank 1)."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}
        self._http: dict[int, HTTPTransport] = {}
        self._store: Any = None
        self._group: PGTransport | None = None

    def hold(self, sizes: list[int], seed: int) -> list[int]:
        """Make the donor's state; returns the sums of its leaves."""
        leaves = enumerate(values(sizes, seed))
        self._state = {f"leaf/{number}": torch.from_numpy(leaf) for number, leaf in leaves}
        return _sums(self._state)

    def make_room(self, sizes: list[int]) -> None:
        """Make the joiner's state, into which the process group receives in place."""
        self._state = {f"leaf/{number}": torch.ones(size) for number, size in enumerate(sizes)}

    # ---- HTTP ----

    def offer_http(self, chunks: int, host: str) -> str:
        """Serve the state in this many chunks; returns its address. The server's own names the machine."""
        transport = HTTPTransport(TIMEOUT, chunks)
        transport.send_checkpoint([1], STEP, self._state, TIMEOUT)
        self._http[chunks] = transport
        return re.sub(r"(?<=//)[^/]*(?=:\d+/)", host, transport.metadata())

    def fetch_http(self, chunks: int, address: str, size_bytes: int) -> dict[str, Any]:
        if chunks not in self._http:
            self._http[chunks] = HTTPTransport(TIMEOUT, chunks)
        make_memory_fresh(size_bytes)
        began_s = time.perf_counter()
        got = self._http[chunks].recv_checkpoint(0, address, STEP, TIMEOUT)
        took_s = time.perf_counter() - began_s
        return {"seconds": took_s, "sums": _sums(got)}

    # ---- the process group ----

    def open_store(self) -> int:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        return self._store.port

    def join_group(self, port: int, rank: int) -> None:
        group = ProcessGroupGloo(timeout=TIMEOUT)
        group.configure(f"127.0.0.1:{port}/heal", f"replica-{rank}", rank, 2)
        self._group = PGTransport(group, TIMEOUT, CPU, state_dict=lambda: self._state)

    def send_by_group(self) -> None:
        assert self._group is not None
        self._group.send_checkpoint([1], STEP, self._state, TIMEOUT)

    def clear(self) -> None:
        """Forget what came before; the memory stays."""
        for leaf in self._state.values():
            leaf.fill_(1)

    def fetch_by_group(self) -> dict[str, Any]:
        assert self._group is not None
        began_s = time.perf_counter()
        got = self._group.recv_checkpoint(0, "<n/a>", STEP, TIMEOUT)
        took_s = time.perf_counter() - began_s
        for name, leaf in got.items():
            assert leaf.data_ptr() == self._state[name].data_ptr(), "it was not received in place"
        return {"seconds": took_s, "sums": _sums(got)}


def _sums(state: dict[str, torch.Tensor]) -> list[int]:
    return sums(np.asarray(leaf) for leaf in state.values())


if __name__ == "__main__":
    serve(Side())
