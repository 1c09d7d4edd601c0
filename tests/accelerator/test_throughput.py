"""How fast values move between device, host and groups. The figures are printed, not asserted; the values are."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._exchange._partials import Partials
from tests import patience
from tests.accelerator import models
from tests.exchange.members import assert_same_bits, exchange_all, mesh

ROUNDS = 3


def best_gb_per_s(size: int, move: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - start_s)
    return size / min(seconds) / 1e9


def test_between_device_and_host(record_property: Any) -> None:
    size = models.sized(1 << 22, 1 << 30)
    device = jax.devices()[0]
    near, far = (
        SingleDeviceSharding(device, memory_kind=kind)
        for kind in (device.default_memory().kind, "pinned_host")
    )
    host = np.arange(size // 4, dtype=np.float32)
    there = jax.block_until_ready(jax.device_put(host, near))
    pinned = jax.block_until_ready(jax.device_put(there, far))
    fresh = jax.jit(lambda x: x + jnp.float32(0))  # a copy that was read once keeps what it read

    def to_host() -> None:
        copy = jax.block_until_ready(fresh(there))
        start_s = time.perf_counter()
        back.append(np.asarray(copy))
        seconds.append(time.perf_counter() - start_s)

    back: list[np.ndarray] = []
    seconds: list[float] = []
    for _ in range(ROUNDS):
        to_host()
    figures = {
        "H2D pageable": best_gb_per_s(size, lambda: jax.block_until_ready(jax.device_put(host, near))),
        "D2H pageable": size / min(seconds) / 1e9,
        "H2D pinned": best_gb_per_s(size, lambda: jax.block_until_ready(jax.device_put(pinned, near))),
        "D2H pinned": best_gb_per_s(size, lambda: jax.block_until_ready(jax.device_put(there, far))),
    }
    for name, figure in figures.items():
        record_property(name, f"{figure:.2f} GB/s, {size >> 20} MiB")
    assert_same_bits([back[-1], np.asarray(jax.device_put(pinned, near))], [host, host])


def test_the_exchange_beside_the_link(record_property: Any) -> None:
    """Two members, one shard each, joined by sockets in one process; the link is one such socket, one way."""
    size = models.sized(1 << 21, 1 << 28)
    layout = Layout.of([LeafSpec("gradients", (size // 4,), "float32")])
    values = [jnp.full(size // 4, shard + 1, jnp.float32) for shard in range(2)]
    start_s = time.perf_counter()
    held = [Partials(layout, 2) for _ in values]
    for shard, (partials, value) in enumerate(zip(held, values, strict=True)):
        partials.add(shard, [value])
    taken_s = time.perf_counter() - start_s
    with mesh([[0], [1]]) as links:
        start_s = time.perf_counter()
        means = exchange_all(links, held)
        exchanged_s = time.perf_counter() - start_s
    for mean in means:
        assert_same_bits(mean, [np.full(size // 4, 1.5, np.float32)])
    record_property("contribution to host", f"{2 * size / taken_s / 1e9:.2f} GB/s, {size >> 20} MiB each")
    record_property("exchange of two", f"{size / exchanged_s / 1e9:.2f} GB/s of gradients")
    record_property("link", f"{link_gb_per_s(size):.2f} GB/s one way")


def link_gb_per_s(size: int) -> float:
    """A plain socket pair: one thread sends, this one receives."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(bytes(size),), name="sender", daemon=True)
        buffer, left = bytearray(1 << 20), size
        start_s = time.perf_counter()
        sender.start()
        while left:
            left -= ours.recv_into(buffer)
        took_s = time.perf_counter() - start_s
        patience.join(sender)
    return size / took_s / 1e9
