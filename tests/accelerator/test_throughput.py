"""How fast values move between device, host and groups. The figures are printed, not asserted; the values are."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from tests.accelerator import models
from tests.exchange.members import assert_same_bits

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
    fresh = jax.jit(lambda x: x + jnp.float32(0))  # a copy that was read once keeps its values

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
