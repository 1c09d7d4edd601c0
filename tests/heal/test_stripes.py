"""How a blob is divided among its donors."""

import socket
from collections.abc import Callable

import numpy as np
import pytest

from jaxft._arrays._leaf_types import LeafType
from jaxft._heal import _stripes
from jaxft._heal._blob import BlobLayout
from jaxft._heal._frames import Kind, Request
from jaxft._heal._stripes import SPAN_CHUNKS, Stripes, _Taken
from jaxft._transport._seals import Connection

from .donors import MB, blob_of_leaves, fetch_state, hostile, joiner, manifest, same_bits, send_chunk, values

STATE = [values((5 * MB + 5,))]  # 21 chunks
BLOB = blob_of_leaves(STATE)


def stripes(chunks: int, donors: int) -> Stripes:
    layout = BlobLayout.of([LeafType((chunks * MB,), "uint8")])
    return Stripes(Request(Kind.STATE, 5, 0), layout, np.empty(0, np.uint8), timeout_s=30.0, donors=donors)


def taken_in_turn(made: Stripes) -> list[int]:
    counts: list[int] = []
    while made._free:
        counts.append(made._take(_Taken()).count)
    return counts


def test_a_donor_that_is_alone_is_asked_for_whole_spans():
    assert taken_in_turn(stripes(20, donors=1)) == [SPAN_CHUNKS, SPAN_CHUNKS, 20 - 2 * SPAN_CHUNKS]


@pytest.mark.parametrize("donors", [2, 3, 7])
@pytest.mark.parametrize("chunks", [1, 31, 500])
def test_spans_shrink_towards_the_end(chunks: int, donors: int):
    counts = taken_in_turn(stripes(chunks, donors))
    assert sum(counts) == chunks
    assert counts == sorted(counts, reverse=True)
    assert counts[0] <= max(1, chunks // donors // 4)
    assert counts[-1] == 1


def test_what_is_put_back_is_taken_again_in_its_order():
    made = stripes(40, donors=2)
    taken = _Taken()
    spans = [(span.first, span.count) for span in (made._take(taken), made._take(taken))]
    made._put_back(taken)
    assert made._free_chunks == 40
    assert [(span.first, span.count) for span in (made._take(taken), made._take(taken))] == spans


def test_a_donor_is_asked_for_the_next_span_while_it_sends():
    asked: list[tuple[int, int]] = []

    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        manifest(sock, STATE)
        request = ask()
        while len(asked) < 3:
            asked.append((request.first, request.count))
            send_chunk(sock, BLOB, request.first)
            following = ask() if len(asked) < 3 else request
            for chunk in range(request.first + 1, request.first + request.count):
                send_chunk(sock, BLOB, chunk)
            request = following

    with hostile("one", script) as one, joiner(one) as fetcher:
        assert same_bits(fetch_state(fetcher, 0, [np.zeros_like(leaf) for leaf in STATE]), STATE)
    assert asked == [(0, 8), (8, 8), (16, 5)]


def test_the_last_chunks_are_left_to_those_who_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch):
    asked: list[Request] = []
    monkeypatch.setattr(_stripes, "ask", lambda _, request, *__: asked.append(request))
    made = stripes(4, donors=3)
    taken = _Taken()
    with Connection.plain(socket.socket()) as sock:
        assert made._ask_for_some(sock, taken)
        made._ask_ahead(sock, taken)
        made._ask_ahead(sock, taken)
        assert [request.first for request in asked] == [0, 1], "two at a time"
        taken.spans.popleft()
        made._ask_ahead(sock, taken)
        assert len(asked) == 2, "two are free, for two others"
