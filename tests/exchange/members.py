"""What tests of the exchange share: contributions, an independent reference, meshes without a network."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._memory import leaves_of, result_regions
from jaxft._exchange._exchange import exchange_into
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import Task
from jaxft._exchange._tree import Node
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort
from tests import patience

MIXED = (
    LeafSpec("matrix", (130, 70), "float32"),
    LeafSpec("half", (3, 41), "bfloat16"),
    LeafSpec("loss", (), "float32"),
    LeafSpec("empty", (0, 4), "float32"),
    LeafSpec("double", (33,), "float64"),
    LeafSpec("brain", (5000,), "bfloat16"),
    LeafSpec("small", (7,), "float16"),
    LeafSpec("count", (19,), "int32", "sum"),
    LeafSpec("total", (257,), "float32", "sum"),
    LeafSpec("half total", (9,), "bfloat16", "sum"),
    LeafSpec("exponents", (21,), "int8", "max"),
    LeafSpec("quantised", (5003,), "int8", "widened"),
)

# Big enough for several chunks in every slice of a few members.
BIG = (LeafSpec("big", (400_001,), "float32"), *MIXED, LeafSpec("wide", (300_000,), "bfloat16"))


@lru_cache(maxsize=200)
def contribution(specs: tuple[LeafSpec, ...], shard: int) -> list[np.ndarray]:
    """Values of very different magnitude, so that another order of summation shows in the bits. Read only."""
    rng = np.random.default_rng(1000 + shard)
    leaves: list[np.ndarray] = []
    for spec in specs:
        if spec.dtype == "int8":
            leaves.append(rng.integers(-127, 128, spec.shape, np.int8))
        else:
            magnitudes = np.array([1e-3, 1e-1, 1.0, 1e2, 1e4])[rng.integers(0, 5, spec.shape)]
            leaves.append(np.asarray(rng.standard_normal(spec.shape) * magnitudes).astype(spec.dtype))
        leaves[-1].flags.writeable = False
    return leaves


def partials_of(layout: Layout, total: int, shards: Sequence[int]) -> Partials:
    partials = Partials(layout, total)
    for shard in shards:
        partials.add(shard, contribution(layout.specs, shard))
    return partials


def regions_of(partials: Partials, node: Node) -> list[np.ndarray]:
    """The held regions of a node."""
    regions = partials.layout.regions
    return [partials.part(node, number, 0, region.size) for number, region in enumerate(regions)]


def reference_sum(values: Sequence[np.ndarray]) -> np.ndarray:
    """The canonical sum, written apart from the code under test: cut at the largest power of two below."""
    if len(values) == 1:
        return values[0]
    cut = 1
    while cut * 2 < len(values):
        cut *= 2
    return reference_sum(values[:cut]) + reference_sum(values[cut:])


@lru_cache(maxsize=50)
def reference_means(specs: tuple[LeafSpec, ...], total: int) -> list[np.ndarray]:
    shards = [contribution(specs, shard) for shard in range(total)]
    means: list[np.ndarray] = []
    for spec, *leaves in zip(specs, *shards, strict=True):
        kinds: dict[str, Any] = {"float64": np.float64, "int32": np.int32, "int8": np.int16}
        dtype = kinds.get(spec.dtype, np.float32)
        result = reference_sum([leaf.astype(dtype) for leaf in leaves])
        if spec.operation == "max":
            result = np.max(leaves, axis=0)
        if spec.operation == "mean":
            result = result / dtype(total)
        means.append(np.asarray(result).astype(spec.result_dtype))
    return means


def assert_same_bits(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    assert len(got) == len(wanted)
    for each, other in zip(got, wanted, strict=True):
        assert each.shape == other.shape
        assert each.dtype == other.dtype
        assert each.tobytes() == other.tobytes()


def peers_of(shards: Sequence[Sequence[int]], addresses: Sequence[str] | None = None) -> list[Peer]:
    """Members named group-0, group-1, ... with these shards."""
    return [
        Peer(
            group=f"group-{number}",
            incarnation=7 + number,
            address=addresses[number] if addresses else f"memory:{number}",
            shards=tuple(held),
        )
        for number, held in enumerate(shards)
    ]


@contextmanager
def mesh(shards: Sequence[Sequence[int]], quorum_id: int = 4, strand: int = 0) -> Iterator[list[Links]]:
    """The links of every member, joined in memory."""
    ends: list[dict[int, Connection]] = [{} for _ in shards]
    for each, other in itertools.combinations(range(len(shards)), 2):
        ends[each][other], ends[other][each] = map(Connection.plain, socket.socketpair())
    links = [
        Links(
            job="job",
            quorum_id=quorum_id,
            me=me,
            members=peers_of(shards),
            connections=mine,
            abort=Abort(),
            strand=strand,
        )
        for me, mine in enumerate(ends)
    ]
    try:
        yield links
    finally:
        for each in links:
            each.close()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each call in a separate thread; return their results or exceptions."""
    outcomes: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        patience.join(thread)
    return outcomes


def run_exchange(
    links: Links,
    partials: Partials,
    *,
    step: int = 11,
    progress_timeout_s: float = 30.0,
    counts: Callable[[], bool] = lambda: True,
    moved: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """One member's exchange, with a patience that only a hanging test would reach."""
    layout = partials.layout
    task = Task(layout, step, partials, result_regions(layout))
    exchange_into(links, task, partials.shards, Patience(progress_timeout_s, counts=counts, moved=moved))
    return leaves_of(layout, task.result)


def exchange_all(links: Sequence[Links], partials: Sequence[Partials], *, step: int = 11) -> list[Any]:
    """Every member's exchange at once; returns the means, or the exceptions."""
    return together(
        [
            lambda one=one, mine=mine: run_exchange(one, mine, step=step)
            for one, mine in zip(links, partials, strict=True)
        ]
    )
