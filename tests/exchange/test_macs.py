"""MACs that C makes: Python's bits, one count of frames for both, and the same refusals."""

import itertools
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._exchange import _compiled
from jaxft._exchange._frames import HEADER_BYTES, PARTIAL, RESULT
from jaxft._exchange._plan import PeerLost
from jaxft._transport._seals import Connection, Macs
from tests.exchange.lanes import INSTRUCTIONS, loaded
from tests.exchange.members import MIXED, assert_same_bits, partials_of, reference_means
from tests.exchange.single_thread import compiled_lane, cut_into, fed, made_by, recorded, run, task_of, wired

LAYOUT = Layout.of([LeafSpec("x", (900,), "float32"), LeafSpec("y", (100,), "float16")])
LANES = ["python", *INSTRUCTIONS]
DAMAGED = (1, "sent a frame whose tag does not match: its data were damaged or changed on the way")
_KIND, _LENGTH = 5, 52  # where a header has its kind and the size of its payload


def with_macs(instructions: str | None) -> _compiled.Library:
    library = loaded(instructions)
    if library.macs is None:
        pytest.skip("this machine has no instructions for MACs")
    return library


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.integers(0, 1100), st.sampled_from([1 << 16, (1 << 20) - 1, (1 << 20) + 24, 5_000_003])),
    st.integers(0, 2**64 - 1),
    st.integers(0, 63),
    st.lists(st.floats(0, 1), max_size=3),
    st.integers(0, 2**32),
)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_every_tag_is_that_of_cryptography(
    instructions: str, size: int, count: int, offset: int, cuts: list[float], seed: int
) -> None:
    library, rng = with_macs(instructions), np.random.default_rng(seed)
    key, header = rng.bytes(32), rng.bytes(HEADER_BYTES)
    payload = rng.integers(0, 256, size + offset, np.uint8)[offset:]
    python = Macs(key)
    python.count.value = count
    at = [0, *sorted(int(cut * size) for cut in cuts), size]
    wanted = python.tag(header, *(payload[a:b].data for a, b in itertools.pairwise(at)))
    assert library.mac(key, count, header, payload) == wanted


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_c_makes_them_all(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call of Python, which would need its lock."""
    lane = compiled_lane(with_macs(instructions))
    monkeypatch.delattr(Macs, "tag")
    with (
        cut_into(4096, 2),
        wired([[0], [1]], sealed=True, pieces=lambda: itertools.repeat(999)) as (
            links,
            wires,
        ),
    ):
        lanes = [lane(one, task_of(partials_of(Layout.of(MIXED), 2, [k]))) for k, one in enumerate(links)]
        run(lanes, list(wires.values()))
        for each in lanes:
            each.close()


def test_both_lanes_count_the_frames_of_a_connection_together() -> None:
    """One lane continues where the other was, in both members, and Python's frames fit in between."""
    with_macs(None)
    wanted = reference_means(LAYOUT.specs, 2)
    with (
        cut_into(1024, 2),
        wired([[0], [1]], sealed=True, pieces=lambda: itertools.repeat(999)) as (
            links,
            wires,
        ),
    ):
        one, other = links[0].connections[1], links[1].connections[0]
        for made in itertools.product(LANES[:1] + LANES[-1:], repeat=2):
            assert one.outgoing.tag(b"control", b"frame") == other.incoming.tag(b"control", b"frame")
            lanes = [
                made_by(by)(mine, task_of(partials_of(LAYOUT, 2, [number])))
                for number, (by, mine) in enumerate(zip(made, links, strict=True))
            ]
            run(lanes, list(wires.values()))
            for lane in lanes:
                for region, leaf in zip(lane.task.result, wanted, strict=True):
                    assert_same_bits([region[: leaf.size]], [leaf])
                lane.close()
        assert counts(one) == counts(other)[::-1]
        assert counts(one) > (4, 4)


def counts(connection: Connection) -> tuple[int, ...]:
    both = (connection.outgoing, connection.incoming)
    assert all(isinstance(tags, Macs) for tags in both)
    return tuple(tags.count.value for tags in both if isinstance(tags, Macs))


def frames(stream: bytes) -> list[bytes]:
    """The frames of a stream, each with its tag."""
    found: list[bytes] = []
    while stream:
        (length,) = struct.unpack_from("<I", stream, _LENGTH)
        size = HEADER_BYTES + length + Macs.size_bytes
        found.append(stream[:size])
        stream = stream[size:]
    return found


def hears(by: str, *streams: bytes) -> tuple[list[object], tuple[int, ...]]:
    """What member 0 makes of these streams of its peer, one for each exchange, and its counts after them."""
    outcomes: list[object] = []
    with wired([[0], [1]], sealed=True, pieces=lambda: itertools.repeat(1)) as (links, wires):
        for stream in streams:
            lane = made_by(by)(links[0], task_of(partials_of(LAYOUT, 2, [0])))
            try:
                got = fed(lane, wires[1, 0].target, stream, itertools.repeat(1 << 20), closes=False)
                outcomes.append("done" if isinstance(got, list) else got)
            except PeerLost as lost:
                outcomes.append((lost.number, lost.why))
            finally:
                lane.close()
        return outcomes, counts(links[0].connections[1])


def stream_of() -> list[bytes]:
    """The frames of an honest peer."""
    return frames(recorded(LAYOUT, [[0], [1]], sealed=True, by="python")[1, 0])


@pytest.fixture(autouse=True)
def _small_chunks():
    with cut_into(1024, 2):
        yield


@pytest.mark.parametrize("by", LANES)
class TestOfThePeersFrames:
    def test_the_true_ones_are_taken(self, by: str) -> None:
        honest = stream_of()
        assert len(honest) > 3
        outcomes, (_, incoming) = hears(by, b"".join(honest))
        assert outcomes == ["done"]
        assert incoming == len(honest)

    def test_a_forged_one_is_refused(self, by: str) -> None:
        first, *rest = stream_of()
        body = first[: -Macs.size_bytes]
        forged = body + Macs(b"x" * 32).tag(body[:HEADER_BYTES], body[HEADER_BYTES:])
        assert hears(by, forged + b"".join(rest))[0] == [DAMAGED]

    def test_a_flipped_bit_is_refused(self, by: str) -> None:
        first, *rest = stream_of()
        places = [HEADER_BYTES, len(first) // 2, *range(len(first) - Macs.size_bytes - 1, len(first))]
        for at in places:
            flipped = bytearray(first)
            flipped[at] ^= 1 << at % 8
            assert hears(by, bytes(flipped) + b"".join(rest))[0] == [DAMAGED]

    def test_a_replayed_exchange_is_refused(self, by: str) -> None:
        """Of the same step, so that only the count of frames shows it."""
        stream = b"".join(stream_of())
        assert hears(by, stream, stream)[0] == ["done", DAMAGED]

    def test_reordered_ones_are_refused(self, by: str) -> None:
        """A result and a partial sum, which the headers allow in any order."""
        honest = stream_of()
        kinds = [frame[_KIND] for frame in honest]
        at = kinds.index(RESULT)
        assert kinds[at - 1] == PARTIAL
        honest[at - 1 : at + 1] = honest[at], honest[at - 1]
        assert hears(by, b"".join(honest))[0] == [DAMAGED]

    def test_an_abort_in_the_middle_leaves_pythons_counts(self, by: str) -> None:
        some = b"".join(stream_of()[:2]) + b"JXFT"
        assert hears(by, some) == hears("python", some)
        assert hears(by, some)[1][1] == 2


def test_without_the_instructions_python_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    library = replace(loaded("baseline"), macs=None)
    with wired([[0], [1]], sealed=True, pieces=lambda: itertools.repeat(999)) as (links, wires):
        made = compiled_lane(library)
        lanes = [made(each, task_of(partials_of(LAYOUT, 2, [k]))) for k, each in enumerate(links)]
        monkeypatch.setattr(Macs, "tag", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(lanes, list(wires.values()))
        for lane in lanes:
            lane.close()
    monkeypatch.setattr(_compiled, "library", lambda: library)
    assert _compiled.describe() == "compiled (baseline; MACs: Python)"
