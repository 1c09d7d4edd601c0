"""Donors in separate processes that take orders over a pipe and are killed or stopped."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from jaxft_protocol.messages import WHOLE, Stripe

from jaxft._heal import _server
from jaxft._heal._blob import Blob
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore
from jaxft._transport._listener import Listener
from tests.forks import Actor

from .donors import MB, values

HEAL = 5


def state_of(size_mb: int) -> list[np.ndarray]:
    return [
        values((size_mb * MB // 2,), "uint8"),
        values((3,), "bfloat16"),
        values((size_mb * MB // 2,), "uint8", 1),
    ]


def means_of(step: int) -> list[np.ndarray]:
    return [values((3 * MB,), "uint8", 100 + step)]


class _Trap:
    """Stops the thread that reads the n-th chunk, reports it, and lets it go on when the test asks for it."""

    def __init__(self, pipe: Connection) -> None:
        self.countdown = 0
        self.opened = threading.Event()
        read = Blob.read

        def trapped(blob: Blob, chunk: int) -> Any:
            self.countdown -= 1
            if self.countdown == 0:
                pipe.send("in the trap")
                self.opened.wait()
            return read(blob, chunk)

        Blob.read = trapped


class _Process:
    """What runs in a donor's process: its methods are called by name from the test."""

    def __init__(self, pipe: Connection, name: str) -> None:
        _server.LONG_POLL_S = 0.05
        self.trap = _Trap(pipe)
        self.store = StateStore()
        self.listener = Listener(
            host="127.0.0.1", job="job", group=name, incarnation=1, on_heal=HealServer(self.store).serve
        )

    def address(self) -> str:
        return f"127.0.0.1:{self.listener.port}"

    def hold(self, size_mb: int, steps: int, stripe: Stripe) -> None:
        """Pin a stripe of state 0, and train over some steps."""
        self.store.publish(0, state_of(size_mb))
        self.store.pin(HEAL, 0, stripe=stripe)
        for step in range(steps):
            self.store.log(step, means_of(step))
            self.store.before_donation()
            self.store.publish(step + 1, [])

    def hold_again(self, size_mb: int, step: int) -> None:
        """Pin a newer state, which is the same here, for the next heal."""
        self.store.release(HEAL)
        self.store.publish(step, state_of(size_mb))
        self.store.pin(HEAL + 1, step)

    def set_trap(self, chunk: int) -> None:
        """Counted from 1."""
        self.trap.countdown = chunk

    def open_trap(self) -> None:
        self.trap.opened.set()


class DonorProcess(Actor):
    """A donor of numpy arrays, which never starts a backend of JAX."""

    def __init__(self, name: str) -> None:
        super().__init__(_Process, name)
        self.name = name

    @property
    def address(self) -> tuple[str, str]:
        return self.name, self.ask("address")


@contextmanager
def donors(
    names: Sequence[str], *, size_mb: int = 24, steps: int = 0, striped: bool = False
) -> Iterator[list[DonorProcess]]:
    """Processes that hold the same state, pinned, and the means of some steps; `striped`: a stripe of it each."""
    made = [DonorProcess(name) for name in names]
    try:
        for number, each in enumerate(made):
            each.ask("hold", size_mb, steps, Stripe(number, len(made)) if striped else WHOLE)
        yield made
    finally:
        for each in made:
            each.end()
