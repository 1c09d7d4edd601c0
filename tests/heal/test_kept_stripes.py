"""How much of a state a donor captures for a stripe, and lets go."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxft_protocol.messages import WHOLE, Stripe
from jaxft_protocol.ranks.lanes import Span

from jaxft._heal import _blob, _snapshot, _store
from jaxft._heal._blob import Blob, NotKept, keeps
from jaxft._heal._store import Gone, StateStore
from tests import patience
from tests.accelerators import pretended

from .donors import mesh, own, raw, read, same_bits, sharded, soon, values
from .test_spans import pieces_of

NOW = 0.0
STEP = 7
LEAVES = 12  # of one size: a leaf in each band
LEAF_BYTES = 4 * 40

increase = jax.jit(lambda xs: [x + jnp.ones((), x.dtype) for x in xs], donate_argnums=0)


@pytest.fixture(autouse=True)
def _small_states_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blob, "UNDIVIDED_BYTES", 0)


def state() -> list[jax.Array]:
    return [own(values((40,), seed=number)) for number in range(LEAVES)]


def of_halves(number: int) -> Stripe:
    return Stripe(number, 2)


def pointers(leaves: Sequence[jax.Array]) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in leaves]


def donated(store: StateStore, leaves: list[jax.Array]) -> list[bool]:
    """Make a step; return which leaves it made in the memory of the old ones, and so copied nothing of."""
    before = pointers(leaves)
    store.before_donation()
    after = jax.block_until_ready(increase(leaves))
    store.publish(store._step + 1, after)
    return [each == other for each, other in zip(before, pointers(after), strict=True)]


def chunks_kept(store: StateStore, heal_id: int) -> list[int]:
    """The chunks that a donor still has, found intact and with the right bits."""
    blob = store.state(heal_id, deadline_s=NOW)[1]
    return [chunk for chunk in range(blob.layout.chunks) if has(blob, chunk)]


def has(blob: Blob, chunk: int) -> bool:
    try:
        pieces = read(blob, chunk)
    except NotKept:
        return False
    run = b"".join(pieces)
    return run.startswith(values((40,), seed=chunk).tobytes())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_only_the_stripe_is_copied_by_a_donation(count: int) -> None:
    captured = 0
    for number in range(count):
        store, leaves = StateStore(), state()
        store.publish(STEP, leaves)
        store.pin(1, STEP, stripe=Stripe(number, count))
        in_place = donated(store, leaves)
        kept = chunks_kept(store, 1)
        assert kept == [leaf for leaf in range(LEAVES) if not in_place[leaf]]
        assert len(kept) <= -(-LEAVES // count)
        captured += len(kept) * LEAF_BYTES
    assert captured == LEAVES * LEAF_BYTES, "each byte by a single donor"


def test_until_the_donation_all_can_be_asked_for_and_what_was_asked_for_is_kept() -> None:
    store, leaves = StateStore(), state()
    store.publish(STEP, leaves)
    store.pin(1, STEP, stripe=of_halves(0))
    blob = store.state(1, deadline_s=NOW)[1]
    assert store.keeps(1, deadline_s=NOW) == (of_halves(0), True)
    assert has(blob, 9)
    in_place = donated(store, leaves)
    assert [leaf for leaf in range(LEAVES) if not in_place[leaf]] == [0, 1, 2, 3, 4, 5, 9]
    assert chunks_kept(store, 1) == [0, 1, 2, 3, 4, 5, 9]
    assert store.keeps(1, deadline_s=NOW) == (of_halves(0), False)
    with pytest.raises(NotKept, match="not of the stripe that this donor keeps"):
        blob.read(6)


def test_a_donor_whose_stripe_has_no_leaf_captures_nothing() -> None:
    store, leaves = StateStore(), [own(values((40,)))]
    store.publish(STEP, leaves)
    store.pin(1, STEP, stripe=Stripe(3, 4))
    assert donated(store, leaves) == [True]
    assert chunks_kept(store, 1) == []


def test_leaves_without_bytes_and_numbers_are_divided_too() -> None:
    leaves: list[Any] = [np.zeros((0, 4), np.float32), 3, np.float32(1.5), np.zeros((0,), np.int8), True]
    kept: set[int] = set()
    for number in range(3):
        store = StateStore()
        store.publish(STEP, leaves)
        store.pin(1, STEP, stripe=Stripe(number, 3))
        store.before_donation()
        blob = store.state(1, deadline_s=NOW)[1]
        for chunk in range(blob.layout.chunks):
            try:
                read(blob, chunk)
                assert chunk not in kept
                kept.add(chunk)
            except NotKept:
                continue
    assert kept == set(range(blob.layout.chunks))


def test_a_small_state_is_captured_by_each_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blob, "UNDIVIDED_BYTES", LEAVES * LEAF_BYTES)
    for number in range(2):
        store, leaves = StateStore(), state()
        store.publish(STEP, leaves)
        store.pin(1, STEP, stripe=of_halves(number))
        assert donated(store, leaves) == [False] * LEAVES


def test_a_stripe_of_a_state_that_is_yet_to_come() -> None:
    store, leaves = StateStore(), state()
    store.pin(1, STEP, stripe=of_halves(1))
    store.publish(STEP, leaves)
    donated(store, leaves)
    assert chunks_kept(store, 1) == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("asked_first", [False, True])
def test_two_joiners_at_one_step_with_other_divisions_each_find_their_stripe(*, asked_first: bool) -> None:
    store, leaves = StateStore(), state()
    store.publish(STEP, leaves)
    store.pin(1, STEP, stripe=Stripe(0, 2))
    store.pin(2, STEP, stripe=Stripe(2, 3))
    if asked_first:
        assert has(store.state(2, deadline_s=NOW)[1], 3)
    in_place = donated(store, leaves)
    assert [leaf for leaf in range(LEAVES) if in_place[leaf]] == [6, 7], "a leaf for both is copied once"
    assert chunks_kept(store, 1) == [0, 1, 2, 3, 4, 5]
    assert chunks_kept(store, 2) == [3] * asked_first + [8, 9, 10, 11]
    store.release(1)
    with pytest.raises(Gone):
        store.state(1, deadline_s=soon())
    assert chunks_kept(store, 2)[-4:] == [8, 9, 10, 11]


def test_one_joiner_of_two_that_takes_all_costs_the_other_nothing() -> None:
    store, leaves = StateStore(), state()
    store.publish(STEP, leaves)
    store.pin(1, STEP, stripe=of_halves(1))
    store.pin(2, STEP)
    donated(store, leaves)
    assert chunks_kept(store, 1) == [6, 7, 8, 9, 10, 11]
    assert chunks_kept(store, 2) == list(range(LEAVES))
    store.release(2)
    assert chunks_kept(store, 1) == [6, 7, 8, 9, 10, 11]
    store.holds(1, STEP)
    assert not store._snapshots


def test_a_capture_that_fails_ends_the_heals_of_its_stripe_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store, leaves = StateStore(), state()
    store.publish(STEP, leaves)
    store.pin(1, STEP, stripe=of_halves(0))
    store.pin(2, STEP, stripe=of_halves(1))
    monkeypatch.setattr(store._snapshots[STEP, of_halves(0)], "capture", lambda _: 1 // 0)
    store.before_donation()
    with pytest.raises(Gone):
        store.state(1, deadline_s=soon())
    assert chunks_kept(store, 2) == [6, 7, 8, 9, 10, 11]


def test_a_spread_leaf_is_let_go_too() -> None:
    store = StateStore()
    leaves = increase([sharded(values((8, 4), seed=number), mesh(4), "x") for number in range(2)])
    wanted = raw(leaves[1])
    before = [[shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards] for leaf in leaves]
    store.publish(STEP, leaves)
    store.pin(1, STEP, stripe=of_halves(1))
    store.before_donation()
    after = jax.block_until_ready(increase(leaves))
    where = [[shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards] for leaf in after]
    assert [each == other for each, other in zip(before, where, strict=True)] == [True, False]
    blob = store.state(1, deadline_s=NOW)[1]
    assert b"".join(read(blob, 1)) == wanted
    with pytest.raises(NotKept):
        read(blob, 0)


# ---- lanes ----


def lanes_state() -> list[jax.Array]:
    over = mesh(4)
    return [
        sharded(values((8, 3), seed=number), over, *("x",) * (number % 2 == 0)) for number in range(LEAVES)
    ]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_chunk_of_some_lanes_is_kept_by_one_donor_however_its_joiner_is_cut(count: int) -> None:
    """A donor does not know, when it captures, of how many processes the joiner is."""
    spans = (None, Span(0, 4), Span(0, 2), Span(2, 3), Span(3, 4))
    kept: dict[Span | None, list[int]] = {span: [] for span in spans}
    for number in range(count):
        store, leaves = StateStore(), lanes_state()
        store.publish(STEP, leaves, pieces_of(leaves))
        store.pin(1, STEP, stripe=Stripe(number, count))
        store.before_donation()
        jax.block_until_ready(increase(leaves))
        for span in spans:
            blob = store.state(1, span, deadline_s=NOW)[1]
            for chunk in range(blob.layout.chunks):
                try:
                    read(blob, chunk)
                    kept[span].append(chunk)
                    assert keeps(Stripe(number, count), blob.layout.bands[chunk])
                except NotKept:
                    assert not keeps(Stripe(number, count), blob.layout.bands[chunk])
    for span in spans:
        blob = store.state(1, span, deadline_s=NOW)[1]
        assert sorted(kept[span]) == list(range(blob.layout.chunks))


# ---- accelerators ----


@pytest.mark.parametrize("number", [0, 1])
def test_an_accelerator_copies_its_stripe_and_serves_no_more(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripe = of_halves(number)
    with pretended():
        monkeypatch.setattr(
            _store, "available_bytes", lambda: LEAVES * LEAF_BYTES
        )  # half of which it may take
        store, leaves = StateStore(), state()
        before = [raw(leaf) for leaf in leaves]
        store.publish(STEP, leaves)
        store.pin(1, STEP, stripe=stripe)
        snapshot = store._snapshots[STEP, stripe]
        assert snapshot.copied_bytes == LEAVES * LEAF_BYTES // 2
        assert store.keeps(1, deadline_s=NOW) == (stripe, False)
        first = number * LEAVES // 2
        mine = range(first, first + LEAVES // 2)
        assert chunks_kept(store, 1) == list(mine)
        store.before_donation()
        jax.block_until_ready(increase(leaves))
        assert chunks_kept(store, 1) == list(mine)
        blob = store.state(1, deadline_s=NOW)[1]
        assert [bytes(blob.sources[leaf].flat()) for leaf in mine] == [before[leaf] for leaf in mine]


def test_the_copies_of_an_accelerator_are_of_the_stripe_only(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    host_copies = _snapshot.host_copies

    def noted(arrays: Sequence[jax.Array], *, pinned: bool) -> Any:
        copied.extend(arrays)
        return host_copies(arrays, pinned=pinned)

    monkeypatch.setattr(_snapshot, "host_copies", noted)
    with pretended():
        store, leaves = StateStore(), state()
        store.publish(STEP, leaves)
        store.pin(1, STEP, stripe=Stripe(1, 4))
        patience.until(lambda: len(copied) == 3, "the copies to be started")
        store.before_donation()
        assert same_bits(copied, leaves[3:6])
        assert sorted(map(id, copied)) == sorted(map(id, leaves[3:6]))


def test_an_accelerator_that_has_no_room_for_one_joiner_serves_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pretended():
        store, leaves = StateStore(), state()
        monkeypatch.setattr(_store, "available_bytes", lambda: LEAVES * LEAF_BYTES)
        store.publish(STEP, leaves)
        store.pin(1, STEP, stripe=of_halves(0))
        store.pin(2, STEP, stripe=WHOLE)
        assert chunks_kept(store, 1) == [0, 1, 2, 3, 4, 5]
        with pytest.raises(Gone, match="heal 2 is over"):
            store.state(2, deadline_s=soon())
