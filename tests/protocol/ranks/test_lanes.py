"""Which lanes a rank holds, and which travel together."""

import pytest
from jaxft_protocol.ranks.lanes import Span, rank_of, span_of, spans


@pytest.mark.parametrize(
    ("own", "sizes", "wanted"),
    [
        (Span(0, 8), (1,), [(0, 8)]),
        (Span(0, 8), (1, 2), [(0, 4), (4, 8)]),
        (Span(4, 8), (2, 2), [(4, 8)]),
        (Span(4, 8), (1, 2, 8), [(4, 5), (5, 6), (6, 7), (7, 8)]),
        (Span(3, 4), (1, 2, 8), [(3, 4)]),
        (Span(0, 3), (2, 3), [(0, 2), (2, 3)]),
        (Span(0, 6), (2, 3, 1), [(0, 2), (2, 3), (3, 4), (4, 6)]),
    ],
)
def test_spans_end_where_a_process_of_any_member_begins(
    own: Span, sizes: tuple[int, ...], wanted: list[tuple[int, int]]
) -> None:
    count = 6 if own.stop in (3, 6) else 8
    assert [(span.start, span.stop) for span in spans(own, sizes, count)] == wanted


def test_a_rank_holds_the_lanes_of_its_span() -> None:
    for ranks in (1, 2, 4):
        for lane in range(4):
            span = span_of(rank_of(lane, ranks, 4), ranks, 4)
            assert span.start <= lane < span.stop
