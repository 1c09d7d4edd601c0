"""Members that exchange, in threads: the same bits whatever the assignment, the sizes and the path."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._exchange import _plan, _reducer
from jaxft._exchange._partials import Partials
from jaxft._exchange._tree import Node

from .members import (
    BIG,
    MIXED,
    assert_same_bits,
    exchange_all,
    mesh,
    partials_of,
    reference_means,
    regions_of,
    run_exchange,
    together,
)

pytestmark = pytest.mark.usefixtures("lane")


def check(specs: Sequence[LeafSpec], shards: Sequence[Sequence[int]]) -> None:
    """Exchange among members with these shards, and compare the bits with the reference."""
    layout, total = Layout.of(specs), sum(map(len, shards))
    wanted = reference_means(layout.specs, total)
    with mesh(shards) as links:
        for means in exchange_all(links, [partials_of(layout, total, held) for held in shards]):
            assert_same_bits(means, wanted)


@st.composite
def assignments(draw: st.DrawFn) -> list[list[int]]:
    total = draw(st.integers(1, 7))
    members = draw(st.integers(2, 4))
    owners = draw(st.lists(st.integers(0, members - 1), min_size=total, max_size=total))
    return [[shard for shard in range(total) if owners[shard] == member] for member in range(members)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(assignments())
@pytest.mark.parametrize("trips", [1, 2])
def test_any_assignment_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, trips: int, shards: list[list[int]]
) -> None:
    monkeypatch.setattr(_plan, "ONE_TRIP_BYTES", 0 if trips == 2 else 1 << 30)
    check(MIXED, shards)


@pytest.mark.parametrize(
    "shards",
    [
        [[0], [1]],
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 1, 2], []],
        [[], [0], []],
        [[0, 5], [1, 2, 3], [4], []],
    ],
    ids=str,
)
def test_many_chunks(shards: list[list[int]]) -> None:
    check(BIG, shards)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 32_767, 32_768, 32_769, 100_003, 786_433])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_around_the_edges(size: int, dtype: str) -> None:
    check([LeafSpec("x", (size,), dtype)], [[0], [2], [1]])


def test_many_small_leaves_beside_a_big_one() -> None:
    small = [LeafSpec(f"leaf-{k}", (k % 9,), "float32") for k in range(400)]
    check([*small[:200], LeafSpec("big", (1000, 700), "float32"), *small[200:]], [[1], [0]])


def test_nothing_to_exchange() -> None:
    check([], [[0], [1]])


def test_special_values_arrive_as_the_rule_says() -> None:
    spec = LeafSpec("x", (200_000,), "float32")
    layout = Layout.of([spec])
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, (3, 200_000), dtype=np.uint32).view(np.float32)
    alone = Partials(layout, 3)
    held = [Partials(layout, 3) for _ in range(3)]
    for shard in range(3):
        alone.add(shard, [values[shard]])
        held[shard].add(shard, [values[shard]])
    assert np.isnan(values).any()
    with mesh([[0], [1], [2]]) as links:
        for means in exchange_all(links, held):
            assert_same_bits(means, alone.mean_alone())


def test_links_serve_one_step_after_another() -> None:
    layout = Layout.of(BIG)
    shards = [[0], [1], [2]]
    held = [partials_of(layout, 3, mine) for mine in shards]
    wanted = reference_means(BIG, 3)
    with mesh(shards) as links:
        # Members do not wait for each other between steps: one may send while another still receives.
        calls = [
            lambda one=one, mine=mine: [run_exchange(one, mine, step=step) for step in range(4)]
            for one, mine in zip(links, held, strict=True)
        ]
        for steps in together(calls):
            for means in steps:
                assert_same_bits(means, wanted)


def test_links_serve_several_exchanges_of_each_step() -> None:
    """They share scratch memory, which the second makes larger."""
    layouts = [Layout.of(MIXED), Layout.of(BIG)]
    shards = [[0], [1], [2]]
    held = [[partials_of(layout, 3, mine) for layout in layouts] for mine in shards]
    with mesh(shards) as links:
        calls = [
            lambda one=one, mine=mine: [
                run_exchange(one, part, step=step) for step in range(3) for part in mine
            ]
            for one, mine in zip(links, held, strict=True)
        ]
        for exchanges in together(calls):
            for number, means in enumerate(exchanges):
                assert_same_bits(means, reference_means((MIXED, BIG)[number % 2], 3))


def test_contributions_are_only_read() -> None:
    layout = Layout.of(BIG)
    shards = [[0, 1], [2]]
    held = [partials_of(layout, 3, mine) for mine in shards]
    before = [buffer.copy() for mine in held for node in mine.nodes for buffer in regions_of(mine, node)]
    for mine in held:
        for node in mine.nodes:
            for buffer in regions_of(mine, node):
                buffer.flags.writeable = False
    with mesh(shards) as links:
        exchange_all(links, held)
    assert_same_bits(
        [buffer for mine in held for node in mine.nodes for buffer in regions_of(mine, node)], before
    )


def test_a_peer_that_runs_ahead_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reducer, "WINDOW", 1)
    monkeypatch.setattr(_plan, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(_plan, "_SMALL_CHUNK_BYTES", 64 << 10)
    check(
        [LeafSpec("x", (700_000,), "float32"), LeafSpec("y", (300_000,), "bfloat16")], [[0, 3], [1], [2, 4]]
    )


def test_each_result_has_memory_of_its_own() -> None:
    layout = Layout.of(BIG)
    with mesh([[0], [1]]) as links:
        held = [partials_of(layout, 2, [0]), partials_of(layout, 2, [1])]
        first = exchange_all(links, held, step=1)
        copies = [leaf.copy() for leaf in first[0]]
        second = exchange_all(links, held, step=2)
        for leaf in second[0]:
            leaf[...] = 0
        assert_same_bits(first[0], copies)
        assert all(leaf.ctypes.data % 64 == 0 for leaf in first[0] if leaf.size)


def test_small_contributions_make_one_trip_whatever_the_number_of_members() -> None:
    small, big = (
        Layout.of([LeafSpec("x", (10_000,), "float32")]),
        Layout.of([LeafSpec("x", (70_000,), "float32")]),
    )
    assert _plan.Plan.of(small, [[0], [1]], 2).one_trip
    assert not _plan.Plan.of(small, [[k] for k in range(9)], 9).one_trip
    assert not _plan.Plan.of(big, [[0], [1]], 2).one_trip


def test_a_peer_may_close_once_it_has_what_it_wants() -> None:
    layout = Layout.of(MIXED)
    with mesh([[0], [1]]) as links:
        held = [partials_of(layout, 2, [0]), partials_of(layout, 2, [1])]

        def leave() -> list[np.ndarray]:
            means = run_exchange(links[1], held[1])
            links[1].close()
            return means

        for means in together([lambda: run_exchange(links[0], held[0]), leave]):
            assert_same_bits(means, reference_means(MIXED, 2))


def test_a_lone_member_sends_nothing() -> None:
    layout = Layout.of(MIXED)
    with mesh([[0, 1, 2]]) as (links,):
        means = run_exchange(links, partials_of(layout, 3, [0, 1, 2]))
    assert_same_bits(means, reference_means(MIXED, 3))


def test_a_member_that_does_not_hold_its_shards_is_told() -> None:
    layout = Layout.of(MIXED)
    with mesh([[0], [1]]) as links:
        with pytest.raises(
            ValueError,
            match=r"'group-0' holds the nodes \(\[1,2\),\) of 2 .* quorum 4 are the nodes \(\[0,1\),\)",
        ):
            run_exchange(links[0], partials_of(layout, 2, [1]))
        assert not links[0].closed  # nothing was sent
    with (
        mesh([[0], [2]]) as links,
        pytest.raises(ValueError, match=r"shards \[\[0\], \[2\]\] are not each of 0 to 2 once"),
    ):
        run_exchange(links[0], partials_of(layout, 3, [0]))


def test_a_plan_gives_every_element_one_owner() -> None:
    layout = Layout.of(BIG)
    for members in range(2, 6):
        shards = [[k] if k < 3 else [] for k in range(members)]
        plan = _plan.Plan.of(layout, shards, min(members, 3))
        assert plan.nodes[0] == (Node(0, 1),)
        for number, region in enumerate(layout.regions):
            chunks = [chunk for mine in plan.chunks for chunk in mine if chunk.region == number]
            assert [chunk.offset for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
            assert chunks[-1].stop == region.size
            assert all(0 < chunk.size * region.sum_item_bytes <= _plan.CHUNK_BYTES for chunk in chunks)
            assert all(chunk.offset % 64 == 0 for chunk in chunks)
