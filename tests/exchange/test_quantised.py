"""The integers of quantised means: one result for all members, dealings, threads, lanes, rows and columns."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._memory import leaves_of
from jaxft._errors import ConfigurationError
from jaxft._exchange import _compiled
from jaxft._exchange._exchange import exchange_into
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import Task
from tests import patience

from .lanes import loaded
from .members import assert_same_bits, mesh, together
from .single_thread import cut_into, recorded
from .test_grid import grid_of, run, task_of


@dataclass(frozen=True)
class Case:
    """How some shards of some leaves are exchanged."""

    sizes: list[int]
    owners: list[int]  # of each shard, its member
    members: int
    in_rows: bool
    strands: int
    chunk_bytes: int
    window: int
    one_trip: bool
    lanes: list[str]
    seed: int


CASES = st.builds(
    Case,
    sizes=st.lists(st.sampled_from([0, 1, 63, 64, 65, 700, 5000]), min_size=1, max_size=3),
    owners=st.lists(st.integers(0, 6), min_size=1, max_size=14),
    members=st.integers(4, 7),
    in_rows=st.booleans(),
    strands=st.integers(1, 2),
    chunk_bytes=st.sampled_from([512, 8192, 1 << 20]),
    window=st.integers(1, 4),
    one_trip=st.booleans(),
    lanes=st.lists(st.sampled_from(["python", "compiled"]), min_size=7, max_size=7),
    seed=st.integers(0, 2**32),
)


def one_result(case: Case) -> None:
    """The largest exponents and the sums of integers equal numpy's over all shards at once."""
    specs = [
        LeafSpec(f"{n} exponents", (-(-size // 256),), "int8", "max") for n, size in enumerate(case.sizes)
    ]
    specs += [LeafSpec(f"{n}", (size,), "int8", "widened") for n, size in enumerate(case.sizes)]
    layout, total, rng = Layout.of(specs), len(case.owners), np.random.default_rng(case.seed)
    leaves = [[rng.integers(-127, 128, spec.shape, np.int8) for spec in specs] for _ in range(total)]
    if case.seed % 2:  # the largest sums that there are
        leaves = [[np.full_like(leaf, 127) for leaf in each] for each in leaves]
    wanted: list[np.ndarray] = [
        np.asarray(np.max(each, axis=0))
        if spec.operation == "max"
        else np.asarray(np.sum(each, axis=0, dtype=np.int64)).astype(np.int16)
        for spec, each in zip(specs, zip(*leaves, strict=True), strict=True)
    ]
    shards = [
        [shard for shard, owner in enumerate(case.owners) if owner % case.members == member]
        for member in range(case.members)
    ]
    held = [Partials(layout, total) for _ in shards]
    compiled, own = loaded(None), threading.local()

    def exchange(links: Any, task: Task, lane: str) -> None:
        own.lane = lane
        if case.in_rows:
            run(links, task)
        else:
            exchange_into(links, task, total, Patience(patience.FAR_S))

    with (
        pytest.MonkeyPatch.context() as patch,
        cut_into(case.chunk_bytes, case.window, one_trip=case.one_trip),
    ):
        patch.setattr(
            _compiled, "library", lambda: compiled if getattr(own, "lane", "") == "compiled" else None
        )
        for number, (partials, mine) in enumerate(zip(held, shards, strict=True)):
            own.lane = case.lanes[number]
            for shard in mine:
                partials.add(shard, leaves[shard])
        tasks = [task_of(partials, case.strands) for partials in held]
        for strand in range(case.strands):
            with grid_of(shards, strand) if case.in_rows else mesh(shards, strand=strand) as links:
                calls = [
                    lambda given=given: exchange(*given)
                    for given in zip(links, tasks, case.lanes, strict=False)
                ]
                assert together(calls) == [None] * case.members
    for task in tasks:
        assert_same_bits(leaves_of(layout, task.result), wanted)


@settings(max_examples=200, deadline=None)
@given(CASES)
def test_integers_have_one_result_however_they_are_exchanged(case: Case) -> None:
    one_result(case)


def test_16_bits_hold_the_sum_of_258_shards() -> None:
    layout = Layout.of([LeafSpec("x", (64,), "int8", "widened")])
    for value in (127, -127):
        partials = Partials(layout, 258)
        for shard in range(258):
            partials.add(shard, [np.full(64, value, np.int8)])
        np.testing.assert_array_equal(partials.mean_alone(), [np.full(64, 258 * value)])
    with pytest.raises(ConfigurationError, match="hold the sum of 258 shards, and this step has 259"):
        Partials(layout, 259)


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("by", ["python", "compiled"])
def test_bytes_on_the_wire(by: str, members: int) -> None:
    """Of each byte of a contribution and of a result, (G - 1) / G: 1 + 2 for an element, 2 for a block of 256."""
    size, shards = 1 << 20, [[number] for number in range(members)]

    def sent(*specs: LeafSpec) -> float:
        """The bytes that a member sends for each element, results included."""
        carried = recorded(Layout.of(specs), shards, sealed=True, by=by)
        return sum(map(len, carried.values())) / members / size * members / (members - 1)

    floats = sent(LeafSpec("x", (size,), "float32"))
    exponents = sent(LeafSpec("x", (size // 256,), "int8", "max"))
    integers = sent(LeafSpec("x", (size,), "int8", "widened"))
    frames = 0.01  # of all bytes
    assert floats == pytest.approx(8, rel=frames)
    assert integers == pytest.approx(3, rel=frames)
    assert exponents <= members / 256 * 1.1  # in one round: each to all others
    assert floats / (integers + exponents) > 2.6
