"""The mean across groups: jaxft's exchange, TorchFT's gloo process group through its Manager, and bare sockets.

One process per group. Each round runs all three, and each round begins with another one. The first exchange of
a turn is not counted: the threads of the turn before it may still be busy (after TorchFT's, an exchange of 16
MB takes twice as long, ours or bare). Ours begins with JAX arrays on the host and ends with arrays that JAX
takes without a copy; TorchFT averages buckets in place. A round's time is from when the last group begins until
the last has its result. Bare sockets move the same bytes between the same processes, in one thread each,
without summing: no exchange over these sockets can be faster. The CPU seconds are the total of all groups, per
gigabyte of gradients.
"""

import contextlib
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import _peer
from benchmarks._result import Goal, Row, times
from benchmarks._worker import Worker, workers

KB, MB = 1 << 10, 1 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# A round of small exchanges repeats them, or it would measure the clock.
ROUND_BYTES, MOST_A_ROUND = 32 * MB, 40
# From this size on, the bytes of a leaf cost more than its frames.
BIG_BYTES = 4 * MB
# From this size on, rounds are slow, so there are fewer.
MANY_BYTES = 64 * MB
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Options:
    groups: tuple[int, ...] = (2, 3, 4)
    """Numbers of groups."""
    sizes: tuple[int, ...] = (KB, 4 * KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
    """Bytes of the one big leaf, in float32."""
    half_sizes: tuple[int, ...] = (MB, 64 * MB)
    """Bytes of the one big leaf, in bfloat16."""
    llama: bool = True
    """Also the leaves of a Llama 3 of 50 million parameters, in both dtypes."""
    rounds: int = 6
    """Rounds; the first is not counted."""
    big_rounds: int = 4
    """The same, from 64 MB on."""
    python: bool = False
    """Also the exchange in Python, in the same rounds: the saving of the compiled lane."""
    token: bool = False
    """Also the exchange of groups with a token, in the same rounds: the cost of a MAC in place of each checksum."""

    quantize: bool = False
    """Also means in eight bits, in the same rounds: both exchanges, and what quantises on CPU."""
    gbit: float | None = None
    """The kernel paces each connection to this rate, in Gbit/s; but for TorchFT's."""

    threads: tuple[int, ...] = ()
    """Also exchanges with these numbers of threads, in the same rounds; each has at most one for each 4 MiB."""

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        """What else is measured of ours: the label of its rows, and the worker's argument."""
        every: dict[str, dict[str, Any]] = {
            "Python": {"python": self.python},
            "with a token": {"token": self.token},
            "int8": {"quantize": self.quantize},
        }
        every |= {f"{number} threads": {"threads": number} for number in self.threads}
        return {label: argument for label, argument in every.items() if any(argument.values())}


@dataclass(frozen=True)
class Case:
    name: str
    shapes: Sequence[Sequence[int]]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * ITEM_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """Exchanges in a round."""
        return max(1, min(MOST_A_ROUND, ROUND_BYTES // self.size_bytes))


def run(options: Options) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    for number in options.groups:
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(workers(*(Worker("benchmarks._ours.exchange") for _ in range(number))))
            ports = [worker.ask("listen", me=me) for me, worker in enumerate(ours)]
            same = {"members": number, "ports": ports, "gbit": options.gbit}
            _all(ours, "join", [{"me": me, **same} for me in range(number)])
            peers = _peers(stack, number)
            for case in _cases(options):
                rounds = options.rounds if case.size_bytes < MANY_BYTES else options.big_rounds
                rows += _measure(case, number, ours, peers, rounds, options.variants)
    return rows, [] if _peer.python() else ["TorchFT is not available here: its column is empty."]


def _cases(options: Options) -> list[Case]:
    big = [
        Case(f"{_size(size)} {dtype}", [[size // ITEM_BYTES[dtype]]], dtype)
        for dtype, sizes in (("float32", options.sizes), ("bfloat16", options.half_sizes))
        for size in sizes
    ]
    if not options.llama:
        return big
    return [*big, *(Case(f"Llama 50m {dtype}", llama_shapes(), dtype) for dtype in ITEM_BYTES)]


def llama_shapes(
    layers: int = 8, width: int = 512, hidden: int = 1792, vocabulary: int = 32_000
) -> list[list[int]]:
    """The leaves of a small Llama 3, layer by layer: matrices and vectors of very different sizes."""
    attention = [[width], [width, width], [width, width // 4], [width, width // 4], [width, width]]
    mlp = [[width], [width, hidden], [width, hidden], [hidden, width]]
    return [[vocabulary, width], *(attention + mlp) * layers, [width], [width, vocabulary]]


def _peers(stack: contextlib.ExitStack, number: int) -> tuple[Worker, ...]:
    python = _peer.python()
    if python is None:
        return ()
    (lighthouse,) = stack.enter_context(workers(Worker("benchmarks._torchft.lighthouse", python=python)))
    address = lighthouse.ask("start", min_replicas=number)
    made = [Worker("benchmarks._torchft.exchange", python=python) for _ in range(number)]
    peers = stack.enter_context(workers(*made))
    _all(peers, "join", [{"me": me, "members": number, "lighthouse": address} for me in range(number)])
    return peers


def _measure(
    case: Case,
    number: int,
    ours: Sequence[Worker],
    peers: Sequence[Worker],
    rounds: int,
    variants: dict[str, dict[str, Any]],
) -> list[Row]:
    same: list[dict[str, Any]] = [{"shapes": case.shapes, "dtype": case.dtype}] * number
    _all(ours, "prepare", same)
    sizes = {"sizes": [math.prod(shape) for shape in case.shapes], "dtype": case.dtype}
    _all(peers, "prepare", [sizes] * len(peers))
    count = {"count": 1 + case.count}
    ways = {
        "ours": (ours, "exchange", count),
        "limit": (ours, "bare", count),
        "peer": (peers, "exchange", count),
        **{label: (ours, "exchange", {**count, **argument}) for label, argument in variants.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    ways = {name: way for name, way in ways.items() if way[0]}
    for round_, place in itertools.product(range(rounds), range(len(ways))):
        name, (group, command, arguments) = list(ways.items())[(round_ + place) % len(ways)]
        answers = _all(group, command, [arguments] * number)
        if len({answer.get("digest") for answer in answers}) > 1:
            raise AssertionError(f"{case.name}: the groups hold different sums")
        if round_ == 0:
            continue
        spans = zip(*(answer["spans"][1:] for answer in answers), strict=True)
        took_s = [max(end for _, end in each) - max(begin for begin, _ in each) for each in spans]
        seconds[name].append(statistics.median(took_s))
        spent_s = sum(sum(answer["cpu_s"][1:]) for answer in answers)
        cpu[name].append(spent_s / case.count / case.size_bytes * 1e9)
    big_leaf = len(case.shapes) == 1 and case.size_bytes >= BIG_BYTES
    least = None if case.size_bytes < 4 * KB else 1.3 if number == 2 else 1.0
    name = f"{number} groups, {case.name}"
    took_ms = {way: [1e3 * each for each in values] for way, values in seconds.items()}
    figures = [("ms", took_ms, Goal(peer=least, limit=0.8 if big_leaf else None))]
    if case.size_bytes >= MB:
        figures.append(("CPU s/GB", cpu, Goal(peer=1.0)))
    rows = [
        Row.of(name, unit, found["ours"], peer=found["peer"], limit=found["limit"], goal=goal)
        for unit, found, goal in figures
    ]
    for label, (unit, found, _) in itertools.product(variants, figures):
        note = times(found[label], found["ours"])
        # Bare sockets move the bytes in one thread.
        limit = () if "threads" in variants[label] else found["limit"]
        rows.append(Row.of(f"{name}, {label}", unit, found[label], limit=limit, note=note))
    return rows


def _all(group: Sequence[Worker], command: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
    """Send each worker its command, then collect all results."""
    for worker, each in zip(group, arguments, strict=True):
        worker.tell(command, **each)
    return [worker.hear(TIMEOUT_S) for worker in group]


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MB} MB" if size_bytes >= MB else f"{size_bytes // KB} KB"
