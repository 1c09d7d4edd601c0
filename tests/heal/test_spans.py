"""A joiner of several processes heals from a donor of one, lane by lane, here with all devices in one process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._lanes import Lanes
from jaxft._arrays._leaf_types import type_of
from jaxft._arrays._pieces import Pieces, Spread
from jaxft._errors import HealFailed
from jaxft._heal._fetch import Fetcher
from jaxft._heal._spans import SpanFetcher
from jaxft._heal._store import Gone, StateStore
from jaxft._transport._listener import Abort
from tests.heal.donors import LONG_S, Donor, donor

HEAL = 5
DEADLINE_S = 0.0  # nothing has to be waited for
SPANS = (Span(0, 2), Span(2, 3), Span(3, 4))


def state() -> list[jax.Array]:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    rows, copies = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    return [
        jax.device_put(np.arange(24.0, dtype=np.float32).reshape(8, 3), rows),
        jax.device_put(np.arange(7, dtype=np.int32), copies),
        jax.device_put(jax.random.key(3), copies),
        jax.device_put(np.ones((0, 4), np.float32), copies),
    ]


def pieces_of(leaves: Sequence[Any]) -> Pieces:
    shapes = [leaf.shape for leaf in leaves]
    lanes = Lanes.of(
        shapes, list(map(type_of, leaves)), [leaf.sharding for leaf in leaves], jax.devices()[:4]
    )
    return Pieces(lanes, jax.devices()[:4], [Spread(shape, None) for shape in shapes], rank=0, ranks=1)


def fetcher(one: Donor, spans: Sequence[Span]) -> SpanFetcher:
    common = {"job": "job", "group": "joiner", "incarnation": 3, "heal_id": HEAL, "timeout_s": LONG_S}
    return SpanFetcher([(span, Fetcher(**common, donors=[one.at], span=span)) for span in spans])


def test_a_state_is_fetched_lane_by_lane() -> None:
    leaves = state()
    pieces = pieces_of(leaves)
    with donor() as one:
        one.store.publish(0, leaves, pieces)
        one.store.pin(HEAL, 0)
        fetching = fetcher(one, SPANS)
        fetched = fetching.state(0, pieces, cancel=Abort())
        assert fetching.transferred_bytes < sum(leaf.nbytes for leaf in leaves) + 64 * 8, "each block once"
        fetching.close()
    for leaf, again in zip(leaves, pieces.place(fetched, leaves), strict=True):
        raw = [jax.random.key_data(x) if x.dtype == leaves[2].dtype else x for x in (leaf, again)]
        np.testing.assert_array_equal(*raw)


def test_a_donor_that_was_read_whole_serves_lanes_too_and_the_other_way_round() -> None:
    leaves = state()
    pieces = pieces_of(leaves)
    store = StateStore()
    store.publish(0, leaves, pieces)
    store.pin(HEAL, 0)
    _, whole = store.state(HEAL, deadline_s=DEADLINE_S)
    joined = b"".join(whole.read(0))
    _, part = store.state(HEAL, Span(1, 2), deadline_s=DEADLINE_S)
    rows = np.arange(24.0, dtype=np.float32).reshape(8, 3)[2:4].tobytes()
    assert b"".join(part.read(0)).startswith(rows)
    part.check_intact(0)
    _, again = store.state(HEAL, deadline_s=DEADLINE_S)
    assert b"".join(again.read(0)) == joined


def test_a_state_is_kept_until_all_processes_of_the_joiner_hold_it() -> None:
    leaves = state()
    store = StateStore()
    store.publish(0, leaves, pieces_of(leaves))
    store.pin(HEAL, 0)
    for span in SPANS[:2]:
        store.holds(HEAL, 0, span)
    assert store.state(HEAL, SPANS[2], deadline_s=DEADLINE_S)[0] == 0
    store.holds(HEAL, 0, SPANS[2])
    with pytest.raises(LookupError, match=r"not (reached|kept)"):
        store.state(HEAL, SPANS[0], deadline_s=DEADLINE_S)


def test_a_log_is_kept_until_all_processes_of_the_joiner_are_past_it() -> None:
    leaves = state()
    store = StateStore()
    store.publish(0, leaves, pieces_of(leaves))
    store.pin(HEAL, 0)
    store.holds(HEAL, 0)
    for step in range(2):
        store.log(step, [np.zeros(4)], cut_means=lambda arrays, span: [arrays[0][span.start : span.stop]])
        store.publish(step + 1, leaves, pieces_of(leaves))
    store.holds(HEAL, 1, Span(0, 2))
    assert store.means(HEAL, 0, Span(2, 4), deadline_s=DEADLINE_S).layout.leaves[0].shape == (2,)
    store.holds(HEAL, 1, Span(2, 4))
    with pytest.raises(Gone):
        store.means(HEAL, 0, Span(2, 4), deadline_s=DEADLINE_S)


def test_lanes_that_a_process_does_not_hold_are_refused_by_name() -> None:
    leaves = state()
    pieces = pieces_of(leaves)
    with donor() as one:
        one.store.publish(0, leaves, pieces)
        one.store.pin(HEAL, 0)
        fetching = Fetcher(
            job="job",
            group="joiner",
            incarnation=3,
            heal_id=HEAL,
            donors=[one.at],
            timeout_s=LONG_S,
            span=Span(3, 5),
        )
        wanted = "lanes from 3 up to 5 are asked for, and this process holds the lanes from 0 up to 4"
        with pytest.raises(HealFailed, match=wanted):
            fetching.state(0, pieces.types(Span(3, 4)), cancel=Abort())
        fetching.close()
