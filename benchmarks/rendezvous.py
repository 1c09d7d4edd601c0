"""How long a vote and its decision take: all groups vote at once, and the round ends when all have the decision.

Ours is a coordinator in a separate process, and the peer is TorchFT's lighthouse; for each, a second process acts for
all groups, with one connection per group. The clients are those of real groups (Python's gRPC, and TorchFT's own in a
thread per group), so this is the time of a decision on a machine that all of them share. The limit is plain sockets
between two processes, which carry as few bytes as ours and decide nothing. The implementations take turns, a few
rounds each; every decision is checked.
"""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _peer
from benchmarks._result import Goal, Row
from benchmarks._worker import ROOT, Worker, WorkerFailed, workers

# From here on the peer's replies, which list every member, should show.
_MANY_GROUPS = 64
_STATE_GROUPS = 64
# With one Rust thread its clients were no slower than with one per core, and a third faster with 2 groups.
_PEER_CLIENT = {"TOKIO_WORKER_THREADS": "1"}
_ROUNDS_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Options:
    """Measure a vote and its decision for several numbers of groups."""

    groups: tuple[int, ...] = (2, 8, 32, 64, 128, 256, 1000)
    """Numbers of groups that vote."""
    turns: int = 10
    """Turns of each implementation."""
    seconds: float = 0.3
    """Approximate length of a turn of ours; at least two rounds, at most fifty."""
    idle_s: float = 3.0
    """How long a coordinator with the most groups is measured while it is idle."""
    state: bool = True
    """Also measure with every decision on disk."""
    watched: bool = True
    """Also measure while the coordinator is observed: samples, metrics, and a page that is open."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes = [
        "ours includes a heartbeat a second from each group; the peer's groups send none here",
        f"the peer's own clients run with {', '.join(f'{k}={v}' for k, v in _PEER_CLIENT.items())}",
    ]
    for groups in options.groups:
        more_rows, more_notes = _votes(options, groups)
        rows += more_rows
        notes += more_notes
    if options.state:
        rows.append(_with_state(options))
    if options.watched:
        rows.append(_watched(options))
    return rows, notes


def _votes(options: Options, groups: int) -> tuple[list[Row], list[str]]:
    """The implementations with their own clients, and the coordinator's resources with the most groups."""
    with _coordinator() as (address, pid), _ours(address, groups) as ours, _bare(groups) as bare:
        ways = {"ours": ours, "limit": bare}
        with contextlib.ExitStack() as stack:
            notes = _add_peer(ways, stack, groups)
            samples, cpu_s = _interleaved(options, ways, pid)
        row = _row(f"{groups} groups", samples, _goal(groups))
        resources: list[Row] = []
        if groups == max(options.groups):
            resources = _resources(options, groups, pid, cpu_s / row.rounds)
    return [row, *resources], [*notes, _p99(row.case, samples)]


def _add_peer(
    ways: dict[str, Worker],
    stack: contextlib.ExitStack,
    groups: int,
) -> list[str]:
    """Add the peer, if available; return why it failed, if that is the peer's limit."""
    if (python := _peer.python()) is None:
        return []
    try:
        ways["peer"] = stack.enter_context(_peers(python, groups))
    except WorkerFailed as error:
        return [f"the peer cannot hold {groups} groups: {str(error).strip().splitlines()[-1]}"]
    return []


def _with_state(options: Options) -> Row:
    """The same with every decision on disk, compared with none on disk."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address, pid = stack.enter_context(_coordinator("--state", folder))
        plain_address, _ = stack.enter_context(_coordinator())
        ways = {
            "ours": stack.enter_context(_ours(address, _STATE_GROUPS)),
            "plain": stack.enter_context(_ours(plain_address, _STATE_GROUPS)),
        }
        samples, _ = _interleaved(options, ways, pid)
    plain_ms = statistics.median(samples["plain"])
    return Row.of(
        f"{_STATE_GROUPS} groups, decisions on disk (--state)",
        "ms",
        samples["ours"],
        note=f"{plain_ms:.2f} without",
    )


def _watched(options: Options) -> Row:
    """The same while people watch, compared with a coordinator without an HTTP port, to which groups send no samples.

    A page is open, and metrics are scraped every second.
    """
    with contextlib.ExitStack() as stack:
        address, pid, url = stack.enter_context(_coordinator_with_http())
        plain_address, plain_pid = stack.enter_context(_coordinator())
        ways = {
            "ours": stack.enter_context(_ours(address, _STATE_GROUPS)),
            "plain": stack.enter_context(_ours(plain_address, _STATE_GROUPS)),
        }
        stack.enter_context(_watching(url))
        samples, cpu_s = _interleaved(options, ways, pid)
        _, plain_cpu_s = _interleaved(options, {"ours": ways["plain"]}, plain_pid)
    plain_ms = statistics.median(samples["plain"])
    round_ms, plain_round_ms = (1e3 * each_s / len(samples["ours"]) for each_s in (cpu_s, plain_cpu_s))
    return Row.of(
        f"{_STATE_GROUPS} groups, while watched (--http)",
        "ms",
        samples["ours"],
        note=f"{plain_ms:.2f} without; CPU of a round {round_ms:.2f}, and {plain_round_ms:.2f} without",
    )


@contextlib.contextmanager
def _watching(url: str) -> Iterator[None]:
    """Keep a page's stream open, and scrape the metrics every second."""
    ends = threading.Event()

    def scrape() -> None:
        while not ends.wait(1.0):
            urllib.request.urlopen(f"{url}/metrics", timeout=10).read()

    def read() -> None:
        while not ends.is_set():
            page.readline()

    with urllib.request.urlopen(f"{url}/api/v1/events?job=rendezvous", timeout=60) as page:
        reading = threading.Thread(target=read, daemon=True)
        scraping = threading.Thread(target=scrape, daemon=True)
        reading.start()
        scraping.start()
        try:
            yield
        finally:
            ends.set()
            scraping.join(10)
            reading.join(10)  # a line comes every second


def _interleaved(
    options: Options, ways: dict[str, Worker], coordinator: int
) -> tuple[dict[str, list[float]], float]:
    """The rounds of each implementation in milliseconds, and the coordinator's CPU seconds in ours."""
    # The first round is not counted; the next two determine how many fit.
    warm_s = {name: max(way.ask("rounds", _ROUNDS_TIMEOUT_S, count=3)[1:]) for name, way in ways.items()}
    count = max(2, min(50, round(options.seconds / warm_s["ours"])))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s = 0.0
    for _ in range(options.turns):
        for name, way in ways.items():
            before_s = _cpu_s(coordinator)
            samples[name] += [1e3 * s for s in way.ask("rounds", _ROUNDS_TIMEOUT_S, count=count)]
            cpu_s += _cpu_s(coordinator) - before_s if name == "ours" else 0.0
    return samples, cpu_s


def _resources(options: Options, groups: int, coordinator: int, round_cpu_s: float) -> list[Row]:
    began_s, before_s = time.monotonic(), _cpu_s(coordinator)
    time.sleep(options.idle_s)
    idle = (_cpu_s(coordinator) - before_s) / (time.monotonic() - began_s)
    held = f"the coordinator with {groups} groups"
    return [
        Row(f"{held}: CPU of a round", "ms", 1e3 * round_cpu_s),
        Row(f"{held}: CPU while idle", "% of a core", 100 * idle),
        Row(f"{held}: memory", "MiB", _resident_mib(coordinator)),
    ]


@contextlib.contextmanager
def _coordinator(*options: str) -> Iterator[tuple[str, int]]:
    """A coordinator on a free port: its address and its process."""
    with _started(*options) as (process, port):
        threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
        yield f"127.0.0.1:{port}", process.pid


@contextlib.contextmanager
def _coordinator_with_http() -> Iterator[tuple[str, int, str]]:
    """The same with an HTTP port, and its URL."""
    with _started("--http", "127.0.0.1:0") as (process, port):
        found = re.search(r" are at (http://\S+)/", process.stderr.readline())
        assert found is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield f"127.0.0.1:{port}", process.pid, found.group(1)


@contextlib.contextmanager
def _started(*options: str) -> Iterator[tuple[Any, str]]:
    # The benchmark's groups send only on demand, and none has an earlier state.
    command = [sys.executable, "-m", "jaxft_coordinator", "--bind", "127.0.0.1:0", "--founding-wait-ms", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        found = re.search(r"\(port (\d+)\)", process.stderr.readline())
        assert found is not None
        yield process, found.group(1)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _ours(address: str, groups: int) -> Iterator[Worker]:
    with workers(Worker("benchmarks._ours.rendezvous")) as (worker,):
        worker.ask("join", address=address, groups=groups)
        yield worker


@contextlib.contextmanager
def _bare(groups: int) -> Iterator[Worker]:
    module = "benchmarks._ours.rendezvous_bare"
    with workers(Worker(module), Worker(module)) as (server, client):
        client.ask("join", port=server.ask("listen", groups=groups), groups=groups)
        yield client


@contextlib.contextmanager
def _peers(python: Path, groups: int) -> Iterator[Worker]:
    module = "benchmarks._torchft.rendezvous"
    with workers(Worker(module, python=python), Worker(module, python=python, env=_PEER_CLIENT)) as made:
        server, client = made
        client.ask("join", address=server.ask("listen", groups=groups), groups=groups)
        yield client


def _row(case: str, samples: dict[str, list[float]], goal: Goal) -> Row:
    return Row.of(
        case, "ms", samples["ours"], peer=samples.get("peer", ()), limit=samples["limit"], goal=goal
    )


def _goal(groups: int) -> Goal:
    if groups >= _MANY_GROUPS:
        return Goal(peer=3.0, most=15.0 if groups == 256 else None)
    return Goal(peer=1.0 if groups == 2 else None)


def _p99(case: str, samples: dict[str, list[float]]) -> str:
    parts = [f"{name} {_quantile(values, 99):.2f} ms" for name, values in samples.items()]
    return f"p99 of {case}: {', '.join(parts)}"


def _quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _cpu_s(process: int) -> float:
    """The CPU time of all threads of a process, with a resolution of 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mib(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) / 1024
