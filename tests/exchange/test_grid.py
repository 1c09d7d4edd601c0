"""Exchanges of large quorums, in rows and columns: the bits of an exchange at once, and who is to blame."""

import contextlib
import gc
import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxft_protocol.credentials import DataKey

from jaxft._arrays._layout import DTYPES, Layout, LeafSpec
from jaxft._arrays._memory import leaves_of, result_regions
from jaxft._errors import ExchangeFailed
from jaxft._exchange import _compiled, _exchange, _grid_links
from jaxft._exchange._compiled_lane import CompiledLane
from jaxft._exchange._grid import Grid, Rounds
from jaxft._exchange._grid_links import AnyLinks, GridLinks, exchange_over, open_links, peers_of_each
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import WINDOW, PeerLost, Task, Turn, value_dtype
from jaxft._exchange._python_lane import PythonLane
from jaxft._transport._listener import Listener
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort
from tests import patience

from .lanes import any_bits, loaded
from .members import BIG, MIXED, assert_same_bits, partials_of, peers_of, reference_means, together
from .single_thread import cut_into, made_by, wired
from .single_thread import run as run_lanes
from .test_links import listeners

Shards = Sequence[Sequence[int]]


def dealt(members: int, total: int) -> list[list[int]]:
    """Neighbouring shards, as at a step's boundary."""
    ends = [total * member // members for member in range(members + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(ends)]


# Who stands where


@pytest.mark.parametrize("members", [4, 5, 8, 9, 12, 48, 50, 63, 64, 99, 1000])
def test_everyone_is_in_one_row_and_in_one_column_at_most(members: int) -> None:
    grid = Grid.of(members)
    assert [member for row in grid.rows for member in row] == list(range(members))
    lengths = {len(row) for row in grid.rows}
    assert max(lengths) - min(lengths) <= 1
    assert grid.columns == min(lengths)
    in_columns = Counter(grid.column_of(member) for member in range(members))
    assert sum(len(column) > 0 for column in in_columns) == grid.columns
    assert all(len(column) == count for column, count in in_columns.items() if column)
    assert in_columns[()] == members - grid.columns * len(grid.rows)


def test_rows_and_columns_are_about_the_square_root() -> None:
    assert (peers_of_each(47), peers_of_each(48), peers_of_each(64), peers_of_each(1000)) == (46, 12, 14, 62)
    assert all(peers_of_each(members) <= 2 * members**0.5 for members in range(48, 2000))


@pytest.mark.parametrize("strands", [1, 3])
@pytest.mark.parametrize(("members", "total"), [(5, 5), (9, 20), (13, 7), (50, 50)])
def test_each_element_is_summed_once_in_each_round(members: int, total: int, strands: int) -> None:
    layout, shards, grid = Layout.of(BIG), dealt(members, total), Grid.of(members)
    in_rows = [[np.zeros(region.size, int) for region in layout.regions] for _ in grid.rows]
    in_columns = [np.zeros(region.size, int) for region in layout.regions]
    for me, strand in itertools.product(range(members), range(strands)):
        rounds = Rounds.of(grid, me, layout, shards, total, strand, strands)
        row, position = grid.rows.index(grid.row_of(me)), grid.row_of(me).index(me)
        for chunk in rounds.sums.chunks[position]:
            in_rows[row][chunk.region][chunk.offset : chunk.stop] += 1
        for plan in (rounds.sums, rounds.results):
            for chunk in plan.chunks[position]:
                first, stop = rounds.slices[chunk.region]
                assert first <= chunk.offset < chunk.stop <= stop
        if rounds.means is None:
            assert not rounds.sums.chunks[position]
            continue
        assert sorted(node for nodes in rounds.means.nodes for node in nodes)[0].start == 0
        for chunk in rounds.means.chunks[row] if not rounds.means.one_trip or row == 0 else ():
            in_columns[chunk.region][chunk.offset : chunk.stop] += 1
    assert all(
        (count == (1 if held else 0)).all()
        for row, held in zip(in_rows, _hold(grid, shards), strict=True)
        for count in row
    )
    assert all((count == 1).all() for count in in_columns)


def _hold(grid: Grid, shards: Shards) -> list[bool]:
    return [any(shards[member] for member in row) for row in grid.rows]


def test_a_thousand_groups_need_few_connections_and_little_memory() -> None:
    """Of a 8B model on 64 accelerators: 250 MB of bfloat16 for each process."""
    members, layout = 1000, Layout.of([LeafSpec("x", (125_000_000,), "bfloat16")])
    grid, shards = Grid.of(members), dealt(members, members)
    region = layout.regions[0]
    for me in (0, 31, 500, 999):
        rounds = Rounds.of(grid, me, layout, shards, members)
        row, column = grid.row_of(me), grid.column_of(me)
        assert len(row) + len(column) - 2 <= 63
        scratch = 0
        for plan, position in ((rounds.sums, row.index(me)), (rounds.means, grid.rows.index(row))):
            if plan is None or not plan.chunks[position]:
                continue  # the last of a longer row
            longest = max(chunk.size for chunk in plan.chunks[position])
            items = [np.dtype(value_dtype(region, node)).itemsize for held in plan.nodes for node in held]
            scratch += WINDOW * longest * sum(items)
            # Frames are not small: a header and a tag for each weigh nothing.
            assert longest * region.item_bytes >= 64 << 10
        assert scratch <= 256 << 20
        # The sums of a row travel as few nodes, for it holds neighbours.
        assert len(rounds.sums.kept or ()) <= 2 * len(row).bit_length()


# The bits


@contextmanager
def grid_of(shards: Shards, strand: int = 0) -> Iterator[list[GridLinks]]:
    """The connections of every member of a grid, in memory."""
    grid, peers = Grid.of(len(shards)), peers_of(shards)
    held = tuple(tuple(each) for each in shards)
    ends: list[dict[int, Connection]] = [{} for _ in shards]
    for one, other in itertools.combinations(range(len(shards)), 2):
        if other in (*grid.row_of(one), *grid.column_of(one)):
            ends[one][other], ends[other][one] = map(Connection.plain, socket.socketpair())

    def links(me: int, numbers: Sequence[int], abort: Abort) -> Links:
        return Links(
            job="job",
            quorum_id=4,
            me=numbers.index(me),
            members=[peers[number] for number in numbers],
            connections={
                position: ends[me][number] for position, number in enumerate(numbers) if number != me
            },
            abort=abort,
            strand=strand,
        )

    made: list[GridLinks] = []
    for me in range(len(shards)):
        abort, column = Abort(), grid.column_of(me)
        row = links(me, grid.row_of(me), abort)
        made.append(GridLinks(grid, me, held, row, links(me, column, abort) if column else None))
    try:
        yield made
    finally:
        for one in made:
            one.close()


def run(links: GridLinks, task: Task, *, timeout_s: float = patience.FAR_S) -> list[np.ndarray]:
    """One member's exchange; the patience of later rounds is longer than any test."""
    limit = lambda later_s: Patience(patience.FAR_S if later_s else timeout_s)  # noqa: E731
    exchange_over(links, task, task.partials.shards, limit)
    return leaves_of(task.layout, task.result)


# Enough for some dozens of turns in which little moves.
PLENTY = (LeafSpec("x", (150_001,), "float32"), LeafSpec("y", (70_000,), "bfloat16"))


def task_of(partials: Partials, strands: int = 1) -> Task:
    return Task(partials.layout, 11, partials, result_regions(partials.layout), strands)


def exchanged(links: Sequence[GridLinks], partials: Sequence[Partials]) -> list[list[np.ndarray]]:
    return together(
        [
            lambda one=one, mine=mine: run(one, task_of(mine))
            for one, mine in zip(links, partials, strict=True)
        ]
    )


@pytest.mark.parametrize(("members", "total"), [(4, 4), (7, 11), (9, 4), (13, 16)])
def test_a_grid_gets_the_bits_of_one_process(members: int, total: int) -> None:
    shards = dealt(members, total)
    with grid_of(shards) as links:
        for specs in (MIXED, BIG, MIXED):
            layout = Layout.of(specs)
            for means in exchanged(links, [partials_of(layout, total, mine) for mine in shards]):
                assert_same_bits(means, reference_means(specs, total))


KINDS = [(operation, dtype) for operation, dtypes in DTYPES.items() for dtype in dtypes]


@settings(max_examples=40, deadline=None)
@given(
    specs=st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 1, 64, 65, 700, 5000])), min_size=1, max_size=4
    ).map(lambda rows: [LeafSpec(f"{n}", (size,), kind[1], kind[0]) for n, (kind, size) in enumerate(rows)]),
    members=st.integers(4, 9),
    owners=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    chunk_bytes=st.sampled_from([512, 8192, 1 << 20]),
    window=st.integers(1, 4),
    one_trip=st.booleans(),
    strands=st.integers(1, 2),
    by=st.lists(st.sampled_from(["python", "compiled"]), min_size=9, max_size=9),
    seed=st.integers(0, 2**32),
)
def test_any_grid_of_any_lanes_gets_numpys_bits(  # noqa: PLR0913 (drawn by name)
    *,
    specs: list[LeafSpec],
    members: int,
    owners: list[int],
    chunk_bytes: int,
    window: int,
    one_trip: bool,
    strands: int,
    by: list[str],
    seed: int,
) -> None:
    layout, total, rng = Layout.of(specs), len(owners), np.random.default_rng(seed)
    shards = [[n for n, owner in enumerate(owners) if owner % members == member] for member in range(members)]
    leaves = [[any_bits(rng, spec.dtype, spec.size) for spec in specs] for _ in range(total)]
    compiled, own = loaded(None), threading.local()
    tasks: list[Task] = []
    wanted = Partials(layout, total)
    for mine in shards:
        held = Partials(layout, total)
        for shard in mine:
            held.add(shard, leaves[shard])
            wanted.add(shard, leaves[shard])
        tasks.append(task_of(held, strands))

    def one(links: GridLinks, task: Task, lane: str) -> None:
        own.lane = lane
        run(links, task)

    with pytest.MonkeyPatch.context() as patch, cut_into(chunk_bytes, window, one_trip=one_trip):
        patch.setattr(
            _compiled, "library", lambda: compiled if getattr(own, "lane", "") == "compiled" else None
        )
        for strand in range(strands):
            with grid_of(shards, strand) as links:
                calls = [lambda given=given: one(*given) for given in zip(links, tasks, by, strict=False)]
                assert together(calls) == [None] * members
        expected = wanted.mean_alone()
    for task in tasks:
        assert_same_bits(leaves_of(layout, task.result), expected)


# Who is to blame

FOUND = [[0], [1], [2], [3], [4], [5], [6], [7], [8]]  # three rows of three: member 4 is in the middle


def fail_together(
    links: Sequence[GridLinks],
    victim: int,
    fault: Callable[[GridLinks], None],
    monkeypatch: pytest.MonkeyPatch,
    round_number: int = 0,
    timeout_s: float = patience.FAR_S,
) -> list[object]:
    """The outcomes of all, where something happens to one member instead of a round of its three."""
    layout, own, carry_out = Layout.of(BIG), threading.local(), _exchange.exchange_into
    begun = threading.Barrier(9)

    def round_of(links: Links, task: Task, *rest: object) -> None:
        own.rounds = getattr(own, "rounds", -1) + 1
        if own.number == victim and own.rounds == round_number:
            fault(every[victim])
            raise ConnectionAbortedError
        carry_out(links, task, *rest)  # pyright: ignore[reportArgumentType]

    def one(number: int) -> list[np.ndarray]:
        own.number = number
        task = task_of(partials_of(layout, 9, FOUND[number]))
        begun.wait(patience.FAR_S)
        return run(every[number], task, timeout_s=timeout_s)

    every = links
    monkeypatch.setattr("jaxft._exchange._grid_links.exchange_into", round_of)
    return together([lambda number=number: one(number) for number in range(len(links))])


@pytest.mark.parametrize("round_number", [0, 1, 2])
@pytest.mark.parametrize("victim", [0, 4])
def test_a_death_in_any_round_ends_all_that_need_it_and_is_named(
    victim: int, round_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with grid_of(FOUND) as links:
        outcomes = fail_together(links, victim, GridLinks.close, monkeypatch, round_number)
        assert isinstance(outcomes[victim], ConnectionAbortedError)
        failed = {n: out for n, out in enumerate(outcomes) if isinstance(out, ExchangeFailed)}
        named = {n for n, out in failed.items() if f"group-{victim}" in out.peers}
        # Its results are missing in its row. Others may have all that they need by then: the vote decides.
        row = set(links[0].grid.row_of(victim)) - {victim}
        column = set(links[0].grid.column_of(victim)) - {victim}
        assert failed.keys() >= row
        assert named & (row if round_number != 1 else row | column)
        assert all(out.peers for out in failed.values())
        for number in set(range(9)) - failed.keys() - {victim}:
            assert_same_bits(outcomes[number], reference_means(BIG, 9))  # pyright: ignore[reportArgumentType]
        for number in failed:
            assert links[number].row.closed
            assert links[number].column is None or links[number].column.closed


def test_those_who_cannot_know_wait_for_those_who_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member stands still: its row names it. Most others see connections close in a cascade.

    Its column waits for no one else, so it learns of it with the next quorum, or by its own patience.
    """
    over, column = threading.Event(), (1, 7)
    with grid_of(FOUND) as links:

        def stand_still(_: GridLinks) -> None:
            assert over.wait(patience.FAR_S)

        def form_the_next_quorum() -> None:
            others = [each for number, each in enumerate(links) if number not in (4, *column)]
            with contextlib.ExitStack() as at_the_end:
                at_the_end.callback(over.set)
                patience.until(lambda: all(each.row.closed for each in others), "all but its column to fail")
                for number in column:
                    links[number].row.abort.set("a new quorum")
                patience.until(
                    lambda: all(links[number].row.closed for number in column), "its column to fail"
                )

        coordinator = threading.Thread(target=form_the_next_quorum)
        coordinator.start()
        outcomes = fail_together(links, 4, stand_still, monkeypatch, timeout_s=patience.stretched(1.0))
        patience.join(coordinator)
    assert isinstance(outcomes[4], ConnectionAbortedError)
    failed = {n: out for n, out in enumerate(outcomes) if isinstance(out, ExchangeFailed)}
    assert failed.keys() == set(range(9)) - {4}
    by_time = {n for n, out in failed.items() if "made no progress" in str(out)}
    assert ("group-4",) in {failed[number].peers for number in by_time & {3, 5}}
    # The patience of others is a quarter longer: on a busy machine it may end before the next quorum ends their wait.
    # And as soon as a member of the column ends, the other may see its connection close.
    by_quorum = {number for number in column if "a new quorum" in str(failed[number])}
    assert by_quorum or by_time & {*column}
    assert all(failed[number].peers for number in {*column} - by_quorum)
    assert all(failed[number].peers for number in range(9) if number not in (4, *column))


def test_later_rounds_have_more_patience() -> None:
    asked: list[float] = []
    layout = Layout.of(MIXED)

    def patient(later_s: float) -> Patience:
        asked.append(later_s)
        return Patience(patience.FAR_S)

    with grid_of(dealt(4, 4)) as links:
        tasks = [task_of(partials_of(layout, 4, [number])) for number in range(4)]
        calls = [
            lambda one=one, task=task: exchange_over(one, task, 4, patient)
            for one, task in zip(links, tasks, strict=True)
        ]
        assert together(calls) == [None] * 4
    assert set(asked) == {0.0, patience.FAR_S / 4, patience.FAR_S / 2}


def slowed(
    turn: Callable[[Any, float], Turn], is_slow: Callable[[], bool], pause_s: float
) -> Callable[[Any, float], Turn]:
    def turned(lane: object, seconds: float) -> Turn:
        if not is_slow():
            return turn(lane, seconds)
        time.sleep(pause_s)  # the fault itself
        return turn(lane, 0.0)

    return turned


@pytest.mark.parametrize("computes_long", [False, True])
@pytest.mark.parametrize("by", ["python", "compiled"])
def test_a_slow_row_is_waited_for_while_its_bytes_move(
    by: str, monkeypatch: pytest.MonkeyPatch, *, computes_long: bool
) -> None:
    """A member moves its bytes bit by bit, for several times as long as the others are patient.

    Or they have waited for it to compute before that, in later rounds, while time did not count.
    """
    compiled = None if by == "python" else loaded(None)
    monkeypatch.setattr(_compiled, "library", lambda: compiled)
    layout, timeout_s, slow = Layout.of(PLENTY), patience.stretched(0.8), 4
    monkeypatch.setattr("jaxft._exchange._grid_links.LOOK_S", timeout_s / 8)
    own, rounds, turns = threading.local(), Counter[int](), Counter[int]()
    carry_out, ready = _exchange.exchange_into, threading.Event()

    def round_of(links: Links, *rest: Any) -> None:
        carry_out(links, *rest)
        rounds[own.number] += 1

    def is_slow() -> bool:
        if own.number != slow or rounds[slow]:
            return False
        turns[slow] += 1
        return True

    monkeypatch.setattr("jaxft._exchange._grid_links.exchange_into", round_of)
    for lane in (CompiledLane, PythonLane):
        monkeypatch.setattr(lane, "turn", slowed(lane.turn, is_slow, timeout_s / 10))

    def one(number: int) -> list[np.ndarray]:
        own.number = number
        if number == slow and computes_long:
            others = [other for other in range(9) if other not in links[slow].grid.row_of(slow)]
            patience.until(lambda: all(rounds[other] for other in others), "the first round of the others")
        if number == slow:
            ready.set()
        task = task_of(partials_of(layout, 9, FOUND[number]))
        exchange_over(
            links[number], task, 9, lambda later_s: Patience(timeout_s + later_s, counts=ready.is_set)
        )
        return leaves_of(layout, task.result)

    with cut_into(16 << 10, 1), grid_of(FOUND) as links:
        for connection in (each for one in links for each in one.all_connections()):
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        outcomes = together([lambda number=number: one(number) for number in range(9)])
    assert {n: str(out) for n, out in enumerate(outcomes) if isinstance(out, BaseException)} == {}
    assert turns[slow] > 15
    for means in outcomes:
        assert_same_bits(means, reference_means(PLENTY, 9))


@pytest.mark.parametrize("by", ["python", "compiled"])
@pytest.mark.parametrize("sealed", [False, True])
def test_what_says_that_bytes_move_counts_where_it_is_heeded(by: str, *, sealed: bool) -> None:
    layout = Layout.of(MIXED)
    make, pieces = made_by(by), lambda: itertools.repeat(1 << 20)
    for heeds in (False, True):
        with cut_into(1 << 20, 4), wired([[0], [1]], sealed=sealed, pieces=pieces) as (links, wires):
            task = replace(task_of(partials_of(layout, 2, [0])), heeds_progress=heeds)
            lane, peer = make(links[0], task), links[1]
            while lane.turn(0.0) is Turn.MOVED:
                pass
            for _ in range(3):
                assert lane.idle() == [1]
                peer.tell([0])
                before_s = lane.moved_s(1)
                wires[1, 0].carry()
                assert lane.turn(0.0) is (Turn.MOVED if heeds else Turn.STILL)
                assert (lane.moved_s(1) > before_s) == heeds
            # The exchange continues as if nothing had been sent, at either end.
            other = make(peer, replace(task_of(partials_of(layout, 2, [1])), heeds_progress=not heeds))
            run_lanes([lane, other], list(wires.values()))
            for each in (lane, other):
                assert_same_bits(leaves_of(layout, each.task.result), reference_means(MIXED, 2))
                each.close()


@pytest.mark.parametrize("by", ["python", "compiled"])
def test_what_says_that_bytes_move_is_refused_where_all_are_connected_to_all(by: str) -> None:
    layout = Layout.of(MIXED)
    with wired([[0], [1]], sealed=False, pieces=lambda: itertools.repeat(1 << 20)) as (links, wires):
        lane = made_by(by)(links[0], task_of(partials_of(layout, 2, [0])))
        links[1].tell([0])
        wires[1, 0].carry()
        with pytest.raises(PeerLost, match="kind is 4, expected 1"):  # noqa: PT012
            while True:
                lane.turn(0.0)
        lane.close()


def test_an_abort_ends_a_round_and_blames_no_one() -> None:
    layout = Layout.of(MIXED)
    with grid_of(dealt(4, 4)) as links:
        links[0].row.abort.set("a new quorum")
        with pytest.raises(ExchangeFailed, match="a new quorum") as caught:
            run(links[0], task_of(partials_of(layout, 4, [0])))
        assert caught.value.peers == ()
        assert links[0].row.closed
        assert links[0].column is not None
        assert links[0].column.closed


# Connections that stay


def quorum_of(
    made: Sequence[Listener],
    quorum_id: int,
    numbers: Sequence[int],
    before: dict[int, AnyLinks],
    members: Sequence[int] | None = None,
    abort: Callable[[int], Abort] = lambda _: Abort(),
) -> dict[int, Any]:
    """Let some processes open a quorum of these members, or of themselves; return what came of it."""
    everyone = numbers if members is None else members
    peers = [
        Peer(f"group-{number}", 7 + number, f"127.0.0.1:{made[number].port}", (position,))
        for position, number in enumerate(everyone)
    ]

    def one(number: int) -> AnyLinks:
        return open_links(
            made[number],
            job="job",
            quorum_id=quorum_id,
            me=f"group-{number}",
            members=peers,
            abort=abort(number),
            patience=Patience(patience.FAR_S),
            before=before.pop(number, None),
        )

    opened = together([lambda number=number: one(number) for number in numbers])
    return dict(zip(numbers, opened, strict=True))


def ports(links: dict[int, AnyLinks]) -> dict[int, set[tuple[int, int]]]:
    return {
        number: {(one.sock.getsockname()[1], one.sock.getpeername()[1]) for one in each.all_connections()}
        for number, each in links.items()
    }


def check(links: dict[int, AnyLinks]) -> None:
    """What travels over them comes to the right bits."""
    layout, total = Layout.of(MIXED), len(links)

    def one(links: AnyLinks, shard: int) -> list[np.ndarray]:
        task = task_of(partials_of(layout, total, [shard]))
        exchange_over(links, task, total, lambda _: Patience(patience.FAR_S))
        return leaves_of(layout, task.result)

    calls = [lambda each=each, shard=shard: one(each, shard) for shard, each in enumerate(links.values())]
    for means in together(calls):
        assert_same_bits(means, reference_means(MIXED, total))


def test_connections_of_rows_and_columns_stay_where_neighbours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_grid_links, "LEAST_MEMBERS", 4)
    everyone = list(range(6))  # two rows of three
    with listeners(6) as made:
        links = quorum_of(made, 1, everyone, {})
        assert all(isinstance(one, GridLinks) for one in links.values())
        first = ports(links)
        assert {len(each) for each in first.values()} == {3}
        check(links)
        links = quorum_of(made, 2, everyone, links)
        assert ports(links) == first
        check(links)
        # One leaves: two rows, of two and of three. Those who have changed positions connect again.
        links = quorum_of(made, 3, everyone[:-1], links)
        assert ports(links)[0] & first[0]
        check(links)
        # So few that all are connected to all, and back again.
        links = quorum_of(made, 4, everyone[:3], {number: links.pop(number) for number in everyone[:3]})
        assert all(isinstance(one, Links) for one in links.values())
        check(links)
        links = quorum_of(made, 5, everyone, links)
        assert all(isinstance(one, GridLinks) for one in links.values())
        check(links)
        for one in links.values():
            one.close()


@pytest.mark.parametrize("key", [None, DataKey(bytes(range(32)))], ids=["checksums", "macs"])
def test_what_no_one_has_read_is_skipped_in_the_next_exchange_and_at_a_new_quorum(
    key: DataKey | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers who receive nothing else over a connection also hear that bytes move."""
    monkeypatch.setattr(_grid_links, "LEAST_MEMBERS", 4)
    everyone = list(range(6))
    with listeners(6, key) as made:
        links = quorum_of(made, 1, everyone, {})
        first = ports(links)
        for quorum_id in (1, 2, 3):
            for one in (each for grid in links.values() for each in grid.both):
                for _ in range(3):
                    one.tell(one.connections)
            if quorum_id < 3:
                check(links)
                for one in (each for grid in links.values() for each in grid.both):
                    one.tell(one.connections)
            links = quorum_of(made, quorum_id + 1, everyone, links)
            assert ports(links) == first
        check(links)
        for one in links.values():
            one.close()


def test_a_frame_that_is_cut_short_ends_its_connection() -> None:
    """The peer would take what follows for the rest of it."""
    with grid_of(dealt(4, 4)) as links:
        row = links[0].row
        connection = row.connections[1]
        sock = connection.sock

        class Short:
            fileno = sock.fileno
            shutdown = sock.shutdown

            def send(self, frame: bytes, flags: int) -> int:
                return sock.send(frame[:70], flags)

        row.connections[1] = replace(connection, sock=cast(Any, Short()))
        row.tell([1])
        row.connections[1] = connection
        assert sock.recv(1) == b""
        assert len(links[1].row.connections[0].sock.recv(100)) == 70
        assert links[1].row.connections[0].sock.recv(100) == b""


def open_sockets() -> int:
    gc.collect()  # exceptions that were raised in threads keep their frames in circles
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))


def test_nothing_is_left_open_where_some_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """group-2 does not come to the second quorum: it is in the column of group-0 and in the row of group-3."""
    monkeypatch.setattr(_grid_links, "LEAST_MEMBERS", 4)
    before = open_sockets()
    with listeners(4) as made:
        links = quorum_of(made, 1, range(4), {})
        check(links)
        absent, stop = links.pop(2), Abort()
        timer = threading.Timer(0.2, stop.set, ["a new quorum"])
        timer.start()
        outcomes = quorum_of(made, 2, (0, 1, 3), links, range(4), lambda n: Abort() if n == 1 else stop)
        timer.join()
        assert [type(outcome) for outcome in outcomes.values()] == [ExchangeFailed, GridLinks, ExchangeFailed]
        for each in (absent, outcomes[1]):
            each.close()
        del absent, outcomes
    assert open_sockets() <= before
