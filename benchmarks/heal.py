"""The cost of healing: a whole state to a joiner, compared with TorchFT's transports and bare sockets.

Donors and joiners are processes. A state is parameters and two moments, in leaves of mixed sizes. Only our heal
computes a digest of each chunk at both ends. In each round, each way moves the state once, and the result is checked
by the sums of its leaves. A heal puts the state into fresh memory, so bare sockets are also measured into fresh
memory, in huge pages; TorchFT's process group receives in place, so it is compared with bare sockets into memory in
use.

A group of two processes heals by halves: each rank gets its half of each leaf from a donor, both at the same time.

Donors with limited bandwidth, in network namespaces, show whether several donors add up their bandwidths.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import _peer
from benchmarks._machine import memory_bytes
from benchmarks._result import Goal, Row, times
from benchmarks._state import sizes
from benchmarks._worker import Worker, workers
from tests.faults import namespaces

_HOST = "127.0.0.1"
_DEFAULT_OF_PEER = 2.0
_OF_BARE = 0.7
_OF_CAPS = 0.9
_PEAK = 1.3
# The most states in memory at once: two donors, a joiner, two ranks' halves with their donors', the peer's three; and
# one as a margin.
_STATES_IN_MEMORY = 9
_WORST_BYTES_PER_S = 20e6

_Way = Callable[[], dict[str, Any]]
_Rounds = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Options:
    """Heal a joiner."""

    megabytes: tuple[float, ...] = (64, 256, 1024, 2048)
    """Sizes of the state."""
    leaves: int = 150
    """Leaves of the state."""
    rounds: int = 7
    """Rounds for states below 1 GB, after an uncounted one."""
    big_rounds: int = 3
    """Rounds for states of 1 GB and more."""
    http_chunks: tuple[int, ...] = (0, 2, 4, 8)
    """Settings of TorchFT's HTTP transport; each size's row has the best. 0 is its default."""
    capped_donors: int = 3
    """Donors whose sending is capped; 0 leaves this out."""
    capped_megabits: float = 400
    """Bandwidth of each of them, in Mbit/s."""
    capped_megabytes: float = 64
    """Size of the state that they send."""
    capped_rounds: int = 3
    """Rounds with capped donors."""
    token: bool = False
    """Also the heal with a token, in the same rounds: the cost of a MAC in place of each checksum."""


class WrongState(Exception):
    """A way moved other values than the donors hold."""


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    for megabytes in options.megabytes:
        needed_gb = _STATES_IN_MEMORY * megabytes / 1000
        if needed_gb > memory_bytes("MemAvailable", "meminfo") / 1e9:
            notes.append(f"{megabytes:g} MB is left out: it needs {needed_gb:.1f} GB of free memory")
            continue
        _measure(options, megabytes, rows, notes)
    if options.capped_donors == 0:
        return rows, notes
    if namespaces.available():
        rows += _measure_capped(options)
    else:
        notes.append("capped donors are left out: network namespaces need root, ip, tc and nft")
    return rows, notes


# ---- on one machine ----


def _measure(options: Options, megabytes: float, rows: list[Row], notes: list[str]) -> None:
    leaves = sizes(megabytes, options.leaves)
    counted = options.rounds if megabytes < 1000 else options.big_rounds
    with _ours(leaves, token=options.token) as (ways, held), _theirs(leaves, options.http_chunks) as theirs:
        found = _rounds({**ways, **theirs}, counted, held)
    state_bytes = 4 * sum(leaves)
    ms = {name: [1e3 * each["seconds"] for each in rounds] for name, rounds in found.items()}
    http = {name: samples for name, samples in ms.items() if name.startswith("HTTP")}
    default = http.get(f"HTTP in {_chunks(0)}", ())
    best = min(http, key=lambda name: statistics.median(http[name]), default="")
    case = f"{megabytes:g} MB"

    def add(what: str, way: str, *, limit: str, note: str = "", **more: Any) -> None:
        rows.append(
            Row.of(f"{case} {what}", "ms", ms[way], limit=ms[limit] if limit else (), note=note, **more)
        )

    for count in (1, 2):
        what = f"from {_donors(count)}, against HTTP at its default"
        goal = Goal(peer=_DEFAULT_OF_PEER, limit=_OF_BARE)
        add(what, f"heal {count}", limit=f"bare fresh {count}", peer=default, goal=goal)
    add("from 1 donor, against HTTP at its best", "heal 1", limit="", peer=http.get(best, ()), note=best)
    add(
        "from 1 donor, against the process group in place",
        "heal 1",
        limit="bare reused 1",
        peer=ms.get("group", ()),
        goal=Goal(peer=1.0),
        note="they receive into memory in use",
    )
    for count in (1, 2) if options.token else ():
        way = f"heal {count} with a token"
        note = times(ms[way], ms[f"heal {count}"])
        add(f"from {_donors(count)}, with a token", way, limit=f"bare fresh {count}", note=note)
    note = times(ms["heal by 2 ranks"], ms["heal 1"], "one process")
    add("to 2 ranks, a half each", "heal by 2 ranks", limit="bare fresh 2", note=note)
    peaks = [each["peak_bytes"] / state_bytes for each in found["heal 1"]]
    rows.append(Row.of(f"{case}: the joiner's peak memory", "x state", peaks, goal=Goal(most=_PEAK)))
    if http:
        medians = ", ".join(f"{name} {statistics.median(samples):.0f} ms" for name, samples in http.items())
        notes.append(f"{case}, TorchFT: {medians}")


@contextlib.contextmanager
def _ours(leaves: list[int], *, token: bool) -> Iterator[tuple[dict[str, _Way], list[int]]]:
    """Our ways, by name, and the sums of the donors' state."""
    made = [Worker("benchmarks._ours.heal") for _ in range(6)]
    with workers(*made) as (joiner, *donors, other_joiner, left, right):
        held = [_hold(donor, leaves, number=number) for number, donor in enumerate(donors)]
        ranks = ((joiner, left), (other_joiner, right))
        half = [size // 2 for size in leaves]
        parts = [(*pair, _hold(pair[1], half)) for pair in ranks]

        def by_ranks() -> dict[str, Any]:
            return {**_heal_by_ranks(parts, half), "sums": held[0]["sums"]}

        plain = [each["plain"] for each in held]

        def bare(count: int, *, reused: bool) -> _Way:
            arguments = {"plain": plain[:count], "sizes": leaves, "reused": reused}
            return lambda: joiner.ask("bare", timeout_s=_patience(leaves), **arguments)

        ways: dict[str, _Way] = {
            "bare fresh 1": bare(1, reused=False),
            "heal 1": lambda: _heal(joiner, donors[:1], held, leaves),
            "bare fresh 2": bare(2, reused=False),
            "heal 2": lambda: _heal(joiner, donors, held, leaves),
            "heal by 2 ranks": by_ranks,
            "bare reused 1": bare(1, reused=True),
        }
        if token:
            ways["heal 1 with a token"] = lambda: _heal(joiner, donors[:1], held, leaves, token=True)
            ways["heal 2 with a token"] = lambda: _heal(joiner, donors, held, leaves, token=True)
        yield ways, held[0]["sums"]


def _hold(donor: Worker, leaves: list[int], *, number: int = 0, host: str = _HOST) -> dict[str, Any]:
    return donor.ask("hold", sizes=leaves, seed=0, host=host, number=number, timeout_s=_patience(leaves))


def _heal_by_ranks(
    parts: Sequence[tuple[Worker, Worker, dict[str, Any]]], leaves: list[int]
) -> dict[str, Any]:
    """Heal each rank from its donor, from the first one's begin to the last one's end."""
    for joiner, donor, _ in parts:
        donor.ask("pin")
        joiner.ask("make_room", size_bytes=4 * sum(leaves))
    for joiner, _, held in parts:
        joiner.tell("heal", addresses=held["addresses"][:1], sizes=leaves)
    found = [joiner.hear(_patience(leaves)) for joiner, *_ in parts]
    if any(one["sums"] != held["sums"] for one, (*_, held) in zip(found, parts, strict=True)):
        raise WrongState("a rank healed to other values than its donor holds")
    begins, ends = zip(*(each["span"] for each in found), strict=True)
    return {"seconds": max(ends) - min(begins)}


def _heal(
    joiner: Worker,
    donors: Sequence[Worker],
    held: list[dict[str, Any]],
    leaves: list[int],
    *,
    token: bool = False,
) -> dict[str, Any]:
    for donor in donors:
        donor.ask("pin")
    joiner.ask("make_room", size_bytes=4 * sum(leaves))
    addresses = [each["addresses"][token] for each in held[: len(donors)]]
    return joiner.ask("heal", addresses=addresses, sizes=leaves, token=token, timeout_s=_patience(leaves))


@contextlib.contextmanager
def _theirs(leaves: list[int], http_chunks: Sequence[int]) -> Iterator[dict[str, _Way]]:
    """TorchFT's ways, by name; none if it is not available."""
    patience_s = _patience(leaves)
    with _their_workers((), (), leaves) as made:
        if not made:
            yield {}
            return
        donor, joiner = made
        joiner.ask("make_room", sizes=leaves)
        port = donor.ask("open_store")
        for rank, worker in enumerate((donor, joiner)):
            worker.tell("join_group", port=port, rank=rank)
        for worker in (donor, joiner):
            worker.hear()

        def group() -> dict[str, Any]:
            joiner.ask("clear")
            donor.tell("send_by_group")
            fetched = joiner.ask("fetch_by_group", timeout_s=patience_s)
            donor.hear()
            return fetched

        ways = {f"HTTP in {_chunks(chunks)}": _http(donor, joiner, leaves, chunks) for chunks in http_chunks}
        yield {**ways, "group": group}


@contextlib.contextmanager
def _their_workers(
    donor: tuple[str, ...], joiner: tuple[str, ...], leaves: list[int]
) -> Iterator[tuple[Worker, ...]]:
    """TorchFT's donor, which holds a state, and its joiner, behind these commands; none if it is not available."""
    python, module, env = _peer.python(), "benchmarks._torchft.heal", {"GLOO_SOCKET_IFNAME": "lo"}
    if python is None:
        yield ()
        return
    made = [Worker(module, python=python, prefix=prefix, env=env) for prefix in (donor, joiner)]
    with workers(*made) as pair:
        pair[0].ask("hold", sizes=leaves, seed=0, timeout_s=_patience(leaves))
        yield pair


def _http(donor: Worker, joiner: Worker, leaves: list[int], chunks: int = 0, host: str = _HOST) -> _Way:
    address = donor.ask("offer_http", chunks=chunks, host=host)
    arguments = {"chunks": chunks, "address": address, "size_bytes": 4 * sum(leaves)}
    return lambda: joiner.ask("fetch_http", timeout_s=_patience(leaves), **arguments)


# ---- with capped donors ----


def _measure_capped(options: Options) -> list[Row]:
    leaves = sizes(options.capped_megabytes, options.leaves)
    names = [f"donor{number}" for number in range(options.capped_donors)]
    counts = range(1, options.capped_donors + 1)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(namespaces.switch((*names, "joiner")))
        for name in names:
            hosts.cap_sending(name, round(1e6 * options.capped_megabits))
        made = [Worker("benchmarks._ours.heal", prefix=hosts.within(name)) for name in ("joiner", *names)]
        joiner, *donors = stack.enter_context(workers(*made))
        held = [
            _hold(donor, leaves, number=number, host=hosts.address(name))
            for number, (donor, name) in enumerate(zip(donors, names, strict=True))
        ]
        ways: dict[str, _Way] = {
            f"heal {count}": lambda count=count: _heal(joiner, donors[:count], held, leaves)
            for count in counts
        }
        pair = stack.enter_context(_their_workers(hosts.within(names[0]), hosts.within("joiner"), leaves))
        if pair:
            ways["HTTP"] = _http(pair[0], pair[1], leaves, host=hosts.address(names[0]))
        found = _rounds(ways, options.capped_rounds, held[0]["sums"])
    ms = {name: [1e3 * each["seconds"] for each in rounds] for name, rounds in found.items()}
    each = f"{options.capped_megabytes:g} MB over {options.capped_megabits:g} Mbit/s each"
    return [
        Row.of(
            f"{each}, from {_donors(count)}",
            "ms",
            ms[f"heal {count}"],
            peer=ms.get("HTTP", ()),
            limit=[alone / count for alone in ms["heal 1"]],
            goal=Goal(limit=_OF_CAPS) if count > 1 else Goal(),
            note="limit: one donor's time, divided; TorchFT has one donor" if count > 1 else "",
        )
        for count in counts
    ]


# ---- both ----


def _rounds(ways: dict[str, _Way], counted: int, held: list[int]) -> _Rounds:
    """Run each way once per round, in alternating order, and check its result. Raises WrongState."""
    found: _Rounds = {name: [] for name in ways}
    for number in range(1 + counted):
        for name in ways if number % 2 else reversed(ways):
            one = ways[name]()
            if one.pop("sums") != held:
                raise WrongState(f"{name} moved other values than the donors hold")
            if number > 0:
                found[name].append(one)
    return found


def _patience(leaves: list[int]) -> float:
    return 60.0 + 4 * sum(leaves) / _WORST_BYTES_PER_S


def _donors(count: int) -> str:
    return "1 donor" if count == 1 else f"{count} donors"


def _chunks(count: int) -> str:
    return f"{count} chunks" if count else "1 run"
