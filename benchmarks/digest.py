"""What the digest of the state costs that is taken on the devices, beside host code that reads the same bytes.

    python -m benchmarks.digest
    python -m benchmarks.digest --devices 2

For each state, interleaved round by round: `StateDigest`, dispatched and waited for; the part of it for which the
training thread is held up, that is the dispatch; `numpy.sum` and `xxh3_64` over numpy copies of the leaves, which
neither count the time to bring the bytes to the host, nor see two swapped words (the sum) or work where the bytes are
not on the host. XXH3 reads leaf by leaf.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
import tyro
import xxhash
from jax.sharding import NamedSharding, PartitionSpec

from jaxft._arrays._device_digest import StateDigest, period_steps

# Leaves by their shapes: one leaf, a small model of many leaves, a larger one of few.
STATES = {
    "1 MB, 1 leaf": [(512, 512)],
    "12 MB, 300 leaves": [(80 + number % 40, 100) for number in range(300)],
    "200 MB, 10 leaves": [(5000, 1000)] * 10,
}


@dataclass(frozen=True)
class Arguments:
    """Measure the digest of the state."""

    devices: int = 1
    """Simulated CPU devices; the leaves' last dimension is sharded over them. Ignored on other platforms."""
    rounds: int = 21
    """Rounds; each runs everything once. The first two are not counted."""


def main() -> None:
    arguments = tyro.cli(Arguments, prog="python -m benchmarks.digest", description=__doc__)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    for name, shapes in STATES.items():
        leaves = make_leaves(shapes)
        state_bytes = sum(leaf.nbytes for leaf in leaves)
        period = period_steps(state_bytes, jax.default_backend())
        print(f"{name}, on {len(jax.devices())} {jax.devices()[0].device_kind}: every {period} steps")
        for what, seconds in measure(leaves, arguments.rounds).items():
            median = statistics.median(seconds)
            rate = "" if what in ("first call", "dispatch") else f"{state_bytes / median / 1e9:7.1f} GB/s"
            print(f"  {what:12} {median * 1e3:8.2f} ms {rate:12} ({min(seconds) * 1e3:.2f} at best)")


def make_leaves(shapes: list[tuple[int, int]]) -> list[jax.Array]:
    """Leaves of noise, f32, on all devices."""
    mesh = jax.make_mesh((len(jax.devices()),), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "devices"))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return jax.block_until_ready(jax.device_put(leaves, sharding))


def measure(leaves: list[jax.Array], rounds: int) -> Mapping[str, list[float]]:
    """Run the interleaved rounds; return the seconds of each contestant by name."""
    digest = StateDigest()
    host = [np.array(leaf) for leaf in leaves]
    contestants: dict[str, Callable[[], object]] = {
        "digest": lambda: digest.start(leaves).result(),
        "numpy sum": lambda: [leaf.view(np.uint32).sum(dtype=np.uint32) for leaf in host],
        "xxh3_64": lambda: [xxhash.xxh3_64_intdigest(leaf.data) for leaf in host],
    }
    began_s = time.perf_counter()
    digest.start(leaves).result()
    seconds: dict[str, list[float]] = {"first call": [time.perf_counter() - began_s], "dispatch": []}
    for number in range(rounds):
        for name, run in contestants.items():
            began_s = time.perf_counter()
            run()
            if number >= 2:
                seconds.setdefault(name, []).append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        pending = digest.start(leaves)
        if number >= 2:
            seconds["dispatch"].append(time.perf_counter() - began_s)
        pending.result()
    return seconds


if __name__ == "__main__":
    main()
