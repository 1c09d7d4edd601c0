"""What the cut costs: the fault-tolerant step of a lone group against the plain jitted step, side by side.

    python -m benchmarks.cut --size debug
    python -m benchmarks.cut --size 50m --rounds 11

Three steps of one Llama 3 on one device, interleaved round by round: the plain jitted step (state donated), the cut
step without a job (`manager=None`), and the cut step of a group that is alone in a job, with a real coordinator: it
packs its gradients, votes, and waits for the decision. The two cut ones must end with the same bits. Those of the
plain step may differ in the last place: XLA fuses one program in another way than two, and may then contract another
multiplication with an addition.
"""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import tyro

import jaxft
from examples.llama3._flags import Flags, check_settings
from examples.llama3._sharding import make_mesh
from examples.llama3._state import init_state
from examples.llama3.train import make_train_step


@dataclass(frozen=True)
class Arguments:
    """Compare the cut step with the plain jitted one."""

    size: Literal["debug", "50m"] = "debug"
    """Model size: debug or 50m."""
    rounds: int = 15
    """Rounds; each runs every step once. The first two are not counted."""
    batch: int = 4
    """Sequences a step."""
    seq_len: int = 128
    """Tokens a sequence."""


def main() -> None:
    arguments = tyro.cli(Arguments, prog="python -m benchmarks.cut", description=__doc__)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with coordinator() as address, jaxft.Manager(address, group="lone") as manager:
        seconds, digests = measure(arguments, manager)
    plain = statistics.median(seconds["plain jit"])
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = (max(values) - min(values)) / median
        print(f"{name:22} {median * 1e3:9.2f} ms   {median / plain:6.3f} of plain   spread {spread:5.1%}")
    report = manager.report
    for name in ("compute", "exchange", "vote", "apply"):
        print(f"  last step in the job, {name:8} {getattr(report, f'{name}_s') * 1e3:9.2f} ms")
    plain_bits, *cut_bits = digests
    print(
        f"same bits alone and in a job: {len(set(cut_bits)) == 1}; same as plain: {plain_bits == cut_bits[0]}"
    )


def measure(arguments: Arguments, manager: jaxft.Manager) -> tuple[dict[str, list[float]], list[str]]:
    """Run the interleaved rounds; return the seconds of each step by name, and the digests of the final states."""
    flags = Flags(
        size=arguments.size,
        shards=1,
        batch_per_shard=arguments.batch,
        seq_len=arguments.seq_len,
        steps=10_000,
    )
    settings, mesh = check_settings(flags), make_mesh(fsdp=1, tp=1)
    model, optimizer, batches = settings.model, settings.optimizer, settings.batches
    plain = jax.jit(make_train_step(model, optimizer, mesh, mean=lambda tree: tree), donate_argnums=0)
    cut = make_train_step(model, optimizer, mesh, mean=jaxft.pmean)
    steps: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
        "plain jit": plain,
        "cut, no job": jaxft.fault_tolerant(cut, None, shards=1),
        "cut, lone in a job": jaxft.fault_tolerant(cut, manager, shards=1),
    }
    states = {name: init_state(model, optimizer, mesh, seed=0) for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds):
        batch = jax.device_put(batches(number, 0))
        for name, step in steps.items():
            given = batch if name == "plain jit" else (lambda step, shard, batch=batch: batch)
            began_s = time.perf_counter()
            states[name], metrics = step(states[name], given)
            jax.block_until_ready((states[name], metrics))
            if number >= 2:
                seconds[name].append(time.perf_counter() - began_s)
    return seconds, [jaxft.digest(state) for state in states.values()]


@contextlib.contextmanager
def coordinator() -> Iterator[str]:
    """A coordinator of one's own on a free port."""
    command = [sys.executable, "-m", "jaxft_coordinator", "--bind", "localhost:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r"\(port (\d+)\)", process.stderr.readline())
        assert found is not None
        yield f"localhost:{found.group(1)}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
