"""A donor or a joiner of the `heal` benchmark, and the bare sockets beside them.

A heal is all that a joiner does: it dials the donors, compares the leaves' types, fetches the state in stripes
with a digest for each chunk at both ends, and makes `jax.Array`s of it. The bare sockets only move the same bytes
between the same processes.
"""

import gc
import mmap
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxft_protocol.credentials import DataKey

from benchmarks._machine import memory_bytes
from benchmarks._state import make_memory_fresh, sums, values
from benchmarks._worker import serve
from jaxft._arrays._leaf_types import type_of
from jaxft._arrays._placement import place
from jaxft._heal._fetch import DonorAt, Fetcher
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore
from jaxft._transport._listener import Abort, Listener

STEP = 3
HEAL_ID = 1
TIMEOUT_S = 60.0
# The fastest of the sizes that were tried.
PIECE_BYTES = 1 << 20


class Donor:
    """Holds a state, and serves it: to joiners, and to bare sockets."""

    def __init__(self) -> None:
        self._store = StateStore()
        self._leaves: list[jax.Array] = []

    def hold(self, sizes: list[int], seed: int, host: str, number: int) -> dict[str, Any]:
        """Make a state and listen; returns where, without and with a token, and the sums of the leaves."""
        self._leaves = [jax.numpy.array(leaf, copy=True) for leaf in values(sizes, seed)]
        self._store.publish(STEP, self._leaves)
        ports = [
            Listener(
                host=host,
                job="job",
                group=f"donor-{number}",
                incarnation=1,
                on_heal=HealServer(self._store).serve,
                key=_key(token=token),
            ).port
            for token in (False, True)
        ]
        plain = socket.create_server((host, 0))
        threading.Thread(target=self._serve_plain, args=(plain,), daemon=True).start()
        return {
            "addresses": [f"{host}:{port}" for port in ports],
            "plain": [host, plain.getsockname()[1]],
            "sums": sums(map(np.asarray, self._leaves)),
        }

    def pin(self) -> None:
        """Keep the state for a joiner that begins now, with nothing left of the one before."""
        self._store.release(HEAL_ID)
        self._store.pin(HEAL_ID, STEP)

    def _serve_plain(self, plain: socket.socket) -> None:
        views = [np.asarray(leaf).view(np.uint8).data for leaf in self._leaves]
        while True:
            sock, _ = plain.accept()
            threading.Thread(target=_send_part, args=(sock, views), daemon=True).start()


def _send_part(sock: socket.socket, leaves: list[memoryview]) -> None:
    """Send the bytes that are asked for of all leaves in one run, from where they lie."""
    with sock:
        start, stop = np.frombuffer(sock.recv(16, socket.MSG_WAITALL), np.int64).tolist()
        position = 0
        for leaf in leaves:
            wanted = leaf[max(start - position, 0) : max(stop - position, 0)]
            for first in range(0, wanted.nbytes, PIECE_BYTES):
                sock.sendall(wanted[first : first + PIECE_BYTES])
            position += leaf.nbytes


def _key(*, token: bool) -> DataKey | None:
    return DataKey(bytes(32)) if token else None


def make_room(size_bytes: int) -> None:
    """Prepare a heal of this size."""
    gc.collect()  # JAX releases the previous state only now
    make_memory_fresh(size_bytes)


def heal(addresses: list[str], sizes: list[int], *, token: bool = False) -> dict[str, Any]:
    """Fetch the state from these donors; returns when, how much memory it took at most, and the sums."""
    like = [jax.ShapeDtypeStruct((size,), np.float32) for size in sizes]
    donors = [DonorAt(f"donor-{number}", 1, address) for number, address in enumerate(addresses)]
    before_bytes = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    began_s = time.perf_counter()
    fetcher = Fetcher(
        job="job",
        group="joiner",
        incarnation=1,
        heal_id=HEAL_ID,
        donors=donors,
        timeout_s=TIMEOUT_S,
        key=_key(token=token),
    )
    try:
        arrays = fetcher.state(STEP, list(map(type_of, like)), cancel=Abort())
        got = jax.block_until_ready(place(arrays, like))
        ended_s = time.perf_counter()
    finally:
        fetcher.close()
    return {
        "seconds": ended_s - began_s,
        "span": (began_s, ended_s),
        "peak_bytes": memory_bytes("VmHWM") - before_bytes,
        "sums": sums(map(np.asarray, got)),
    }


def bare(plain: list[tuple[str, int]], sizes: list[int], *, reused: bool) -> dict[str, Any]:
    """Receive the state in equal parts, a connection and a thread for each; into fresh memory, or reused."""
    size_bytes = 4 * sum(sizes)
    make_memory_fresh(size_bytes)
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    arena = np.frombuffer(block, np.uint8)
    if reused:
        arena.fill(1)
    part = -(-size_bytes // len(plain) // PIECE_BYTES) * PIECE_BYTES
    began_s = time.perf_counter()
    threads = [
        threading.Thread(
            target=_receive_part, args=(address, arena, number * part, min((number + 1) * part, size_bytes))
        )
        for number, address in enumerate(plain)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - began_s
    ends = np.cumsum(sizes)[:-1]
    return {"seconds": took_s, "sums": sums(np.split(arena.view(np.float32), ends))}


def _receive_part(address: tuple[str, int], arena: np.ndarray, start: int, stop: int) -> None:
    with socket.create_connection(address) as sock:
        sock.sendall(np.array([start, stop], np.int64).tobytes())
        rest = arena.data[start:stop]
        while rest.nbytes:
            received = sock.recv_into(rest)
            if not received:
                raise ConnectionError("the donor closed its bare socket")
            rest = rest[received:]


if __name__ == "__main__":
    donor = Donor()
    hold, pin = donor.hold, donor.pin
    serve(sys.modules[__name__])
