"""The two lanes, Python and compiled, against each other: the same bits, the same frames, the same refusals."""

import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxft._arrays._layout import DTYPES, Layout, LeafSpec
from jaxft._arrays._memory import leaves_of
from jaxft._exchange import _compiled, _compiled_lane
from jaxft._exchange._compiled import address
from jaxft._exchange._frames import VERSION
from jaxft._exchange._partials import Partials
from jaxft._exchange._plan import PeerLost
from jaxft._exchange._python_lane import PythonLane
from jaxft._transport._seals import Connection

from .lanes import INSTRUCTIONS, any_bits, built, loaded
from .members import BIG, MIXED, assert_same_bits, exchange_all, mesh, partials_of, reference_means
from .single_thread import compiled_lane, cut_into, fed, made_by, recorded, run, task_of, wired

KINDS = [(operation, dtype) for operation, dtypes in DTYPES.items() for dtype in dtypes]

specs = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 1, 63, 64, 65, 700, 5000])), min_size=1, max_size=6
).map(lambda rows: [LeafSpec(f"{n}", (size,), kind[1], kind[0]) for n, (kind, size) in enumerate(rows)])


def held_by(
    layout: Layout, shards: Sequence[int], total: int, leaves: Sequence[Sequence[np.ndarray]]
) -> Partials:
    partials = Partials(layout, total)
    for shard in shards:
        partials.add(shard, leaves[shard])
    return partials


@st.composite
def assignments(draw: st.DrawFn) -> list[list[int]]:
    members = draw(st.integers(2, 4))
    owners = draw(st.lists(st.integers(0, members - 1), min_size=1, max_size=6))
    return [[shard for shard, owner in enumerate(owners) if owner == member] for member in range(members)]


@settings(max_examples=60, deadline=None)
@given(
    specs=specs,
    shards=assignments(),
    chunk_bytes=st.sampled_from([512, 1024, 8192, 1 << 20]),
    window=st.integers(1, 4),
    one_trip=st.booleans(),
    sealed=st.booleans(),
    mixed=st.lists(st.sampled_from(["python", *INSTRUCTIONS]), min_size=4, max_size=4),
    strands=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_any_members_with_any_lanes_get_numpys_bits(  # noqa: PLR0913 (drawn by name)
    *,
    specs: list[LeafSpec],
    shards: list[list[int]],
    chunk_bytes: int,
    window: int,
    one_trip: bool,
    sealed: bool,
    mixed: list[str],
    strands: int,
    seed: int,
) -> None:
    layout, total, rng = Layout.of(specs), sum(map(len, shards)), np.random.default_rng(seed)
    leaves = [[any_bits(rng, spec.dtype, spec.size) for spec in specs] for _ in range(total)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compiled, "library", lambda: None)
        wanted = held_by(layout, range(total), total, leaves).mean_alone()
        held = [held_by(layout, mine, total, leaves) for mine in shards]
    pieces = lambda: itertools.cycle(rng.integers(1, 3000, 1000).tolist())  # noqa: E731
    made = [PythonLane if kind == "python" else compiled_lane(loaded(kind)) for kind in mixed]
    with cut_into(chunk_bytes, window, one_trip=one_trip), ExitStack() as stack:
        tasks = [task_of(mine, strands) for mine in held]
        every = [
            stack.enter_context(wired(shards, sealed=sealed, pieces=pieces, strand=strand))
            for strand in range(strands)
        ]
        lanes = [
            make(each, task)
            for links, _ in every
            for make, each, task in zip(made, links, tasks, strict=False)
        ]
        run(lanes, [wire for _, wires in every for wire in wires.values()])
        for lane in lanes:
            lane.close()
        for task in tasks:
            assert_same_bits(leaves_of(layout, task.result), wanted)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("one_trip", [False, True])
def test_both_lanes_send_the_same_frames(*, sealed: bool, one_trip: bool) -> None:
    layout = Layout.of(MIXED)
    with cut_into(4096, 4, one_trip=one_trip):
        one, other = (recorded(layout, [[0, 1], [2]], sealed=sealed, by=by) for by in ("python", "compiled"))
    for pair in one:
        # Results and partial sums are interleaved as the sums come; each sequence is the same.
        assert sorted(one[pair]) == sorted(other[pair])
        assert len(one[pair]) == len(other[pair]) > 1000
    if one_trip:
        assert one == other


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("piece", [1, 2, 63, 64, 65, 71, 72, 73, 79, 80, 81])
def test_a_stream_may_be_cut_at_every_byte(piece: int, *, sealed: bool) -> None:
    layout = Layout.of([LeafSpec("x", (300,), "float32"), LeafSpec("y", (65,), "bfloat16")])
    shards = [[0], [1], [2]]
    with (
        cut_into(512, 1),
        wired(shards, sealed=sealed, pieces=lambda: itertools.repeat(piece)) as (links, wires),
    ):
        make = compiled_lane(loaded(None))
        lanes = [
            make(each, task_of(partials_of(layout, 3, mine)))
            for each, mine in zip(links, shards, strict=True)
        ]
        run(lanes, list(wires.values()))
        wanted = reference_means(layout.specs, 3)
        for lane in lanes:
            for region, leaf in zip(lane.task.result, wanted, strict=True):
                assert_same_bits([region[: leaf.size]], [leaf])
            lane.close()


# Frames that a peer should not send


FUZZED = Layout.of([LeafSpec("x", (900,), "float32"), LeafSpec("y", (100,), "float16")])


def outcome(by: str, stream: bytes, pieces: Iterator[int], *, sealed: bool, closes: bool) -> object:
    """A member's result of these bytes from its one peer, or its error about the peer."""
    shards = [[0], [1]]
    make = made_by(by)
    with wired(shards, sealed=sealed, pieces=lambda: itertools.repeat(1)) as (links, wires):
        peer = wires[1, 0].target
        lane = make(links[0], task_of(partials_of(FUZZED, 2, [0])))
        try:
            return fed(lane, peer, stream, pieces, closes=closes)
        except PeerLost as lost:
            return lost.number, lost.why
        finally:
            lane.close()


@pytest.mark.long
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    one_trip=st.booleans(),
    sealed=st.booleans(),
    closes=st.booleans(),
    piece=st.sampled_from([7, 64, 72, 1000, 1 << 20]),
)
def test_both_lanes_make_the_same_of_any_bytes(
    data: st.DataObject, *, one_trip: bool, sealed: bool, closes: bool, piece: int
) -> None:
    with cut_into(1024, 2, one_trip=one_trip):
        stream = bytearray(recorded(FUZZED, [[0], [1]], sealed=sealed, by="python")[1, 0])
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(stream)))
            match data.draw(st.sampled_from(["flip", "cut", "insert", "drop", "repeat"])):
                case "flip" if at < len(stream):
                    stream[at] ^= 1 << data.draw(st.integers(0, 7))
                case "cut":
                    del stream[at:]
                case "insert":
                    stream[at:at] = data.draw(st.binary(min_size=1, max_size=100))
                case "drop":
                    del stream[at : at + data.draw(st.integers(1, 200))]
                case "repeat":
                    stream[at:at] = stream[at : at + data.draw(st.integers(1, 2000))]
        one, other = (
            outcome(by, bytes(stream), itertools.repeat(piece), sealed=sealed, closes=closes)
            for by in ("python", "compiled")
        )
    assert one == other


@pytest.mark.parametrize("kind", [1, 2])
def test_every_byte_of_a_header_counts(kind: int) -> None:
    with cut_into(1024, 2):
        stream = recorded(FUZZED, [[0], [1]], sealed=False, by="python")[1, 0]
        start = stream.index(b"JXFT" + bytes([VERSION]) + bytes([kind]))
        for at in range(start, start + 64):
            changed = stream[:at] + bytes([stream[at] ^ 0x80]) + stream[at + 1 :]
            one, other = (
                outcome(by, changed, itertools.repeat(1 << 20), sealed=False, closes=False)
                for by in ("python", "compiled")
            )
            assert one == other
            assert isinstance(one, tuple)
            assert "sent an unexpected frame" in one[1]


# Foundations of the compiled lane


def test_without_xxh3_in_the_package_checksums_come_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled_lane, "_digest", lambda: None)
    monkeypatch.setattr(_compiled, "library", lambda: loaded(None))
    layout = Layout.of(MIXED)
    with cut_into(4096, 2), mesh([[0], [1], [2]]) as links:
        for means in exchange_all(links, [partials_of(layout, 3, [k]) for k in range(3)]):
            assert_same_bits(means, reference_means(MIXED, 3))


def test_xxh3_is_taken_from_the_package() -> None:
    assert _compiled_lane._digest() is not None


def test_an_error_of_a_mac_ends_the_exchange_with_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        size_bytes = 16

        def tag(self, *_: object) -> bytes:
            raise RuntimeError("no key")

    monkeypatch.setattr(_compiled, "library", lambda: loaded(None))
    layout = Layout.of(MIXED)
    with mesh([[0], [1]]) as links:
        links[0].connections[1] = Connection(links[0].connections[1].sock, Broken(), Broken())
        outcomes = exchange_all(links, [partials_of(layout, 2, [k]) for k in range(2)])
        assert isinstance(outcomes[0], RuntimeError)
        assert links[0].closed


def test_a_result_is_freed_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the next collection of garbage: its memory is for the next step."""
    monkeypatch.setattr(_compiled, "library", lambda: loaded(None))
    layout = Layout.of(MIXED)
    with mesh([[0], [1]]) as links:
        gc.disable()
        try:
            means = exchange_all(links, [partials_of(layout, 2, [k]) for k in range(2)])
            alive = [weakref.ref(leaf.base) for member in means for leaf in member if leaf.size]
            del means
            assert [each() for each in alive] == [None] * len(alive)
        finally:
            gc.enable()


def test_each_exchange_of_a_step_keeps_its_sheet_and_they_share_memory() -> None:
    """SAM exchanges the same gradients twice."""
    twice = [
        Layout.of([replace(spec, path=f"{name} {spec.path}") for spec in BIG]) for name in ("up", "down")
    ]
    with mesh([[0], [1]]) as (links, _):
        sheets = [links.sheet(links.plan(layout, 2), layout, 2) for layout in twice]
        assert sheets[0] is not sheets[1]
        assert [links.sheet(links.plan(layout, 2), layout, 2) for layout in twice] == sheets
        received = [[address(part) for part in sheet._scratch if part.size] for sheet in sheets]
        assert received[0] == received[1]
        assert set(received[0]) == {address(part) for part in links.scratch.values()}


def test_a_library_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_compiled, "PATH", built())
    monkeypatch.setattr(_compiled._lane_structs, "ALL", _compiled._lane_structs.ALL[::-1])
    assert _compiled.library.__wrapped__() is None
    assert "built from other sources than this Python: run `make setup`" in caplog.text


def test_what_is_in_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "library", lambda: replace(loaded("baseline"), macs="pclmul"))
    assert _compiled.describe() == "compiled (baseline; MACs: pclmul)"
    monkeypatch.setattr(_compiled, "library", lambda: None)
    assert _compiled.describe() == "Python"
