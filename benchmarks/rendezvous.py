"""How long a vote and its decision take: all groups vote at once, and the round ends when all have the decision.

Ours is a coordinator in a separate process, and the peer is TorchFT's lighthouse; for each, a second process acts for
all groups, with one connection per group. The clients are the same as in real groups (Python's gRPC, and TorchFT's
own in a thread per group), so this is the time of a decision on a shared machine. The limit is plain sockets between
two processes, which carry as few bytes as ours and decide nothing. The implementations take turns, a few
rounds each; every decision is checked.
"""

import contextlib
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _peer
from benchmarks._coordinator import Coordinator, coordinator
from benchmarks._result import Goal, Row, times
from benchmarks._worker import Worker, WorkerFailed, workers

# From this many groups on. The peer's replies list every member, and cost more the more there are.
_GOALS = {2: Goal(peer=1.0), 64: Goal(peer=2.5), 256: Goal(peer=5.0)}
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
    idle_s: float = 5.0
    """How long a coordinator with the most groups is measured while it is idle: a heartbeat timeout by default."""
    state: bool = True
    """Also measure with every decision on disk."""
    watched: bool = True
    """Also measure while the coordinator is observed: samples, metrics, and a page that is open."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes = [
        "ours includes the heartbeats of all groups, three in 5 s; the peer's groups send none here",
        f"the peer's own clients run with {', '.join(f'{k}={v}' for k, v in _PEER_CLIENT.items())}",
    ]
    for groups in options.groups:
        more_rows, more_notes = _votes(options, groups)
        rows += more_rows
        notes += more_notes
    if options.state:
        rows += _with_state(options)
    if options.watched:
        rows += _watched(options)
    return rows, notes


def _votes(options: Options, groups: int) -> tuple[list[Row], list[str]]:
    """The implementations with their own clients, and the coordinator's resources with the most groups."""
    bare_sockets = _connected(groups, "benchmarks._ours.rendezvous_bare")
    with _coordinator() as held, _ours(held.address, groups) as ours, bare_sockets as bare:
        ways = {"ours": ours, "limit": bare}
        with contextlib.ExitStack() as stack:
            notes = _add_peer(ways, stack, groups)
            samples, cpu_ms = _interleaved(options, ways, {"ours": held})
        peer, limit = samples.get("peer", ()), samples["limit"]
        row = Row.of(f"{groups} groups", "ms", samples["ours"], peer=peer, limit=limit, goal=_goal(groups))
        resources: list[Row] = []
        if groups == max(options.groups):
            resources = _resources(options, groups, held, cpu_ms["ours"])
    return [row, *resources], [*notes, _p99(row.case, samples)]


def _add_peer(ways: dict[str, Worker], stack: contextlib.ExitStack, groups: int) -> list[str]:
    """Add the peer, if available; return why it failed, if that is the peer's limit."""
    if (python := _peer.python()) is None:
        return []
    try:
        peer = _connected(groups, "benchmarks._torchft.rendezvous", python, **_PEER_CLIENT)
        ways["peer"] = stack.enter_context(peer)
    except WorkerFailed as error:
        return [f"the peer cannot hold {groups} groups: {str(error).strip().splitlines()[-1]}"]
    return []


def _with_state(options: Options) -> list[Row]:
    """The same with every decision on disk, compared with none on disk."""
    with tempfile.TemporaryDirectory() as folder, _coordinator("--state", folder) as kept:
        return _beside_the_default(options, kept, "decisions on disk (--state)")


def _watched(options: Options) -> list[Row]:
    """The same while people watch, compared with a coordinator without an HTTP port, to which groups send no samples.

    A page is open, and metrics are scraped every second.
    """
    with _coordinator(http=True) as watched, _watching(watched.url):
        return _beside_the_default(options, watched, "while watched (--http)")


def _beside_the_default(options: Options, variant: Coordinator, what: str) -> list[Row]:
    """A variant of the coordinator and the default one, in turns: times, and the CPU time of each coordinator."""
    with (
        _coordinator() as plain,
        _ours(variant.address, _STATE_GROUPS) as varied,
        _ours(plain.address, _STATE_GROUPS) as ours,
    ):
        ways = {"ours": varied, "limit": ours}
        samples, cpu_ms = _interleaved(options, ways, {"ours": variant, "limit": plain})
    case = f"{_STATE_GROUPS} groups, {what}"
    return [
        Row.of(
            name,
            "ms",
            found["ours"],
            limit=found["limit"],
            note=f"limit: without; {times(found['ours'], found['limit'])}",
        )
        for name, found in ((case, samples), (f"{case}: the coordinator's CPU of a round", cpu_ms))
    ]


@contextlib.contextmanager
def _watching(url: str) -> Iterator[None]:
    """Keep a page's stream open, and scrape the metrics after each of its messages: every second."""
    ends = threading.Event()

    def watch() -> None:
        while not ends.is_set():
            if not page.readline().strip():  # a message ends
                urllib.request.urlopen(f"{url}/metrics", timeout=10).read()

    with urllib.request.urlopen(f"{url}/api/v1/events?job=rendezvous", timeout=60) as page:
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            ends.set()
            watching.join(10)


def _interleaved(
    options: Options, ways: dict[str, Worker], coordinators: dict[str, Coordinator]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The rounds of each implementation, and the CPU of a round of each coordinator in each turn, in milliseconds."""
    # The first round is not counted; the next two determine how many fit.
    warm_s = {name: max(way.ask("rounds", _ROUNDS_TIMEOUT_S, count=3)[1:]) for name, way in ways.items()}
    count = max(2, min(50, round(options.seconds / warm_s["ours"])))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    cpu_ms: dict[str, list[float]] = {name: [] for name in coordinators}
    for turn in range(options.turns):
        for name in ways if turn % 2 else reversed(ways):
            before_s = coordinators[name].cpu_s() if name in coordinators else 0.0
            samples[name] += [1e3 * s for s in ways[name].ask("rounds", _ROUNDS_TIMEOUT_S, count=count)]
            if name in coordinators:
                cpu_ms[name].append(1e3 * (coordinators[name].cpu_s() - before_s) / count)
    return samples, cpu_ms


def _resources(options: Options, groups: int, held: Coordinator, round_ms: Sequence[float]) -> list[Row]:
    time.sleep(options.idle_s)  # for two seconds after a round it is still busy with the rest of the round
    began_s, before_s = time.monotonic(), held.cpu_s()
    time.sleep(options.idle_s)
    idle = (held.cpu_s() - before_s) / (time.monotonic() - began_s)
    case = f"the coordinator with {groups} groups"
    return [
        Row.of(f"{case}: CPU of a round", "ms", round_ms),
        Row(f"{case}: CPU while idle", "% of a core", 100 * idle, goal=Goal(most=10.0)),
        Row(f"{case}: memory", "MiB", held.resident_mib()),
    ]


def _coordinator(*options: str, http: bool = False) -> contextlib.AbstractContextManager[Coordinator]:
    # The benchmark's groups send only on demand, and none has an earlier state.
    return coordinator("--founding-wait-ms", "0", *options, http=http)


@contextlib.contextmanager
def _ours(address: str, groups: int) -> Iterator[Worker]:
    with workers(Worker("benchmarks._ours.rendezvous")) as (worker,):
        worker.ask("join", address=address, groups=groups)
        yield worker


@contextlib.contextmanager
def _connected(groups: int, module: str, python: Path | None = None, **env: str) -> Iterator[Worker]:
    """A client with a connection of each group to a server: two processes of one module."""
    with workers(Worker(module, python=python), Worker(module, python=python, env=env)) as (server, client):
        client.ask("join", address=server.ask("listen", groups=groups), groups=groups)
        yield client


def _goal(groups: int) -> Goal:
    reached = [goal for fewest, goal in _GOALS.items() if groups >= fewest]
    return reached[-1] if reached else Goal()


def _p99(case: str, samples: dict[str, list[float]]) -> str:
    p99 = {name: statistics.quantiles(ms, n=100, method="inclusive")[98] for name, ms in samples.items()}
    return f"p99 of {case}: {', '.join(f'{name} {value:.2f} ms' for name, value in p99.items())}"
