"""What healing costs: a state from one donor and from two, against bare sockets, side by side.

    python -m benchmarks.heal
    python -m benchmarks.heal --megabytes 1024 --leaves 300 --rounds 5

Donors are processes that hold the state as JAX arrays. In each round the joiner fetches it in every way, always into
fresh memory: over one bare connection, over two (half from each donor), and by a heal from one and from two donors.
A heal includes what bare sockets leave out: dialling, the comparison of the leaves' types, a digest of each chunk at
both ends, and making `jax.Array`s of it all.
"""

import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import tyro

from jaxft._dataplane import Abort, Listener
from jaxft._heal._fetch import Fetcher
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore

STEP = 3
# As in the fastest of bare sockets that were tried; a heal's chunks have the same size.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Arguments:
    """Compare healing with bare sockets."""

    megabytes: int = 256
    """Size of the state."""
    leaves: int = 100
    """Leaves of the state, all of one size."""
    rounds: int = 9
    """Rounds; each fetches once in every way. The first is not counted."""


def main() -> None:
    arguments = tyro.cli(Arguments, prog="python -m benchmarks.heal", description=__doc__)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    context = multiprocessing.get_context("spawn")
    donors = [Donor(context, arguments) for _ in range(2)]
    try:
        spent = measure(arguments, donors)
    finally:
        for donor in donors:
            donor.end()
    size_bytes = arguments.leaves * leaf_size(arguments) * 4
    base = spent["bare, 1 connection"]
    print(f"{'':20} {'median':>8}           of bare    CPU of bare")
    for name, rounds in spent.items():
        median_s = statistics.median(seconds for seconds, _ in rounds)
        ratio, cpu = (
            statistics.median(one[kind] / other[kind] for one, other in zip(rounds, base, strict=True))
            for kind in (0, 1)
        )
        quoted = f"{median_s * 1e3:8.1f} ms  {size_bytes / median_s / 1e9:5.2f} GB/s"
        print(f"{name:20} {quoted}  {ratio:5.2f}  {cpu:5.2f}   ({min(rounds)[0] * 1e3:.0f} ms at best)")


def measure(arguments: Arguments, donors: "list[Donor]") -> dict[str, list[tuple[float, float]]]:
    """Run the interleaved rounds; return the seconds, and the CPU seconds of all, of each way by name."""
    import jax

    size_bytes = arguments.leaves * leaf_size(arguments) * 4
    like = [jax.numpy.zeros(leaf_size(arguments), jax.numpy.float32) for _ in range(arguments.leaves)]
    wanted = states(arguments)
    ways: dict[str, Callable[[], Any]] = {
        "bare, 1 connection": lambda: bare(donors[:1], size_bytes),
        "bare, 2 connections": lambda: bare(donors, size_bytes),
        "heal, 1 donor": lambda: heal(donors[:1], like),
        "heal, 2 donors": lambda: heal(donors, like),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name, way in ways.items():
            cpu_began_s = time.process_time() + sum(donor.pin() for donor in donors)
            began_s = time.perf_counter()
            got = way()
            took_s = time.perf_counter() - began_s
            cpu_s = time.process_time() + sum(donor.pin() for donor in donors) - cpu_began_s
            if number > 0:
                spent[name].append((took_s, cpu_s))
            elif "heal" in name:
                assert all(np.array_equal(one, other) for one, other in zip(got, wanted, strict=True))
            del got
    return spent


def heal(donors: "list[Donor]", like: list[Any]) -> list[Any]:
    fetcher = Fetcher(
        job="job",
        group="joiner",
        incarnation=1,
        heal_id=1,
        donors=[(f"donor-{number}", donor.address) for number, donor in enumerate(donors)],
        timeout_s=60.0,
    )
    try:
        return fetcher.state(STEP, like, cancel=Abort())
    finally:
        fetcher.close()


def bare(donors: "list[Donor]", size_bytes: int) -> np.ndarray:
    """Receive the same bytes in equal parts, a thread for each connection."""
    arena = np.empty(size_bytes, np.uint8)
    part = -(-size_bytes // len(donors))

    def receive(number: int, donor: "Donor") -> None:
        rest = arena.data[number * part : (number + 1) * part]
        with socket.create_connection(("127.0.0.1", donor.bare_port)) as sock:
            sock.sendall(rest.nbytes.to_bytes(8))
            while rest.nbytes:
                rest = rest[sock.recv_into(rest) :]

    threads = [threading.Thread(target=receive, args=each) for each in enumerate(donors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return arena


class Donor:
    """A process that holds the state; told over a pipe what to do."""

    def __init__(self, context: Any, arguments: Arguments) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=donate, args=(theirs, arguments), daemon=True)
        self._process.start()
        port, self.bare_port = self._pipe.recv()
        self.address = f"127.0.0.1:{port}"

    def pin(self) -> float:
        """Pin the state anew; the joiner before has said that it holds it. Returns CPU seconds spent so far."""
        self._pipe.send("pin")
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def donate(pipe: Connection, arguments: Arguments) -> None:
    import jax

    store = StateStore()
    store.publish(STEP, [jax.numpy.array(leaf, copy=True) for leaf in states(arguments)])
    listener = Listener(host="127.0.0.1", job="job", on_heal=HealServer(store).serve)
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_all_who_come, args=(plain, arguments), daemon=True).start()
    pipe.send((listener.port, plain.getsockname()[1]))
    while True:
        pipe.recv()
        store.pin(1, STEP)
        pipe.send(time.process_time())


def send_all_who_come(plain: socket.socket, arguments: Arguments) -> None:
    run = memoryview(np.concatenate(states(arguments)).tobytes())
    while True:
        sock, _ = plain.accept()
        with sock:
            rest = run[: int.from_bytes(sock.recv(8))]
            while rest.nbytes:
                rest = rest[sock.send(rest[:PIECE_BYTES]) :]


def states(arguments: Arguments) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.random(leaf_size(arguments), np.float32) for _ in range(arguments.leaves)]


def leaf_size(arguments: Arguments) -> int:
    return arguments.megabytes * 1_000_000 // 4 // arguments.leaves // 16 * 16


if __name__ == "__main__":
    main()
