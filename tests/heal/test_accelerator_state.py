"""A state on an accelerator that is kept for joiners: copied during the step. CPU devices take its place."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxft_protocol.messages import WHOLE, Stripe

from jaxft._arrays import _host_copies
from jaxft._arrays._host_copies import HostCopy, host_copies
from jaxft._heal import _blob, _snapshot, _store
from jaxft._heal._snapshot import Snapshot
from jaxft._heal._store import Gone, StateStore
from tests import patience
from tests.accelerators import pretended

from .donors import content, leaves_of, raw, same_bits, soon, values

STEP = 7


@pytest.fixture(autouse=True)
def _accelerator() -> Iterator[None]:
    with pretended():
        yield


def state() -> list[jax.Array]:
    mesh = jax.make_mesh((4,), ("x",))
    spread, copied = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    return [
        jax.device_put(values((64, 3)), spread),
        jax.device_put(values((5,)).astype(jnp.bfloat16), copied),
        jax.device_put(np.arange(6).astype(jnp.int4), copied),
        jax.device_put(values((3,)), copied.with_memory_kind("pinned_host")),
        jax.random.key(3),
        jax.device_put(np.zeros((0, 2), np.float32), copied),
    ]


def overwritten(leaves: list[jax.Array]) -> list[jax.Array]:
    """The next state, in the memory of the last."""
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    plain = [
        leaf
        for leaf, key in zip(leaves, keys, strict=True)
        if not key and leaf.sharding.memory_kind == "device"
    ]
    step = jax.jit(
        lambda given: [each + jnp.ones((), each.dtype) for each in given],
        donate_argnums=0,
        out_shardings=[leaf.sharding for leaf in plain],
    )
    return jax.block_until_ready(step(plain))


def copied(snapshot: Snapshot) -> bool:
    """Whether all copies have been started."""
    return all(source._leaf is None for source in snapshot._leaf_sources())


@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_pinned_state_is_copied_before_a_step_overwrites_it(*, pinned_first: bool) -> None:
    store, leaves = StateStore(), state()
    before = [raw(leaf) for leaf in leaves]
    if pinned_first:
        store.pin(1, STEP)
    store.publish(STEP, leaves)
    if not pinned_first:
        store.pin(1, STEP)
    # A thread does it, long before the training thread has to.
    patience.until(lambda: copied(store._snapshots[STEP, WHOLE]), "the copies to be started")
    store.before_donation()
    store.publish(STEP + 1, overwritten(leaves))
    blob = store.state(1, deadline_s=soon())[1]
    content(blob)
    assert [raw(leaf) for leaf in leaves_of(blob)] == before


def test_the_training_thread_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the thread that starts the copies is late: it starts them, and continues."""
    read: list[object] = []
    pieces_of, asarray = _snapshot._pieces_of, np.asarray

    def noted(copy: HostCopy) -> list[_snapshot._Piece]:
        read.append(copy)
        return pieces_of(copy)

    def waits(*given: Any, **named: Any) -> np.ndarray:
        read.append(given)
        return asarray(*given, **named)

    monkeypatch.setattr(_snapshot, "_pieces_of", noted)
    monkeypatch.setattr(_store.threading.Thread, "start", lambda _: None)
    store, leaves = StateStore(), [jnp.asarray(values((9,)))]
    store.publish(STEP, leaves)
    store.pin(1, STEP)
    assert not copied(store._snapshots[STEP, WHOLE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "asarray", waits)
        patch.setattr(jax, "block_until_ready", waits)
        store.before_donation()
    assert copied(store._snapshots[STEP, WHOLE])
    assert not read
    (made,) = overwritten(leaves)
    store.publish(STEP + 1, [made])
    assert not same_bits([made], [values((9,))])
    assert same_bits(leaves_of(store.state(1, deadline_s=soon())[1]), [values((9,))])
    assert len(read) == 1


def test_a_thread_that_cannot_start_leaves_the_copies_to_the_training_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_store.threading.Thread, "start", refused)
    store, leaves = StateStore(), [jnp.asarray(values((9,)))]
    store.pin(1, STEP)
    store.publish(STEP, leaves)
    assert "State 7 is copied by the training thread, since there is no other: can't start" in caplog.text
    store.before_donation()
    store.publish(STEP + 1, overwritten(leaves))
    assert same_bits(leaves_of(store.state(1, deadline_s=soon())[1]), [values((9,))])


@pytest.mark.parametrize("limit_gb", ["0", "many"])
def test_a_state_that_is_too_large_for_pinned_memory_is_copied_to_other(
    limit_gb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", limit_gb)
    store, leaves = StateStore(), state()
    before = [raw(leaf) for leaf in leaves]
    store.publish(STEP, leaves)
    store.pin(1, STEP)
    snapshot = store._snapshots[STEP, WHOLE]
    patience.until(lambda: copied(snapshot), "the copies to be made")
    copies = [source._copy for source in snapshot._leaf_sources() if source._copy is not None]
    kinds = {type(piece) for copy in copies for _, piece in copy.pieces}
    assert kinds == ({np.ndarray} if limit_gb == "0" else {type(leaves[0])})
    store.before_donation()
    store.publish(STEP + 1, overwritten(leaves))
    assert [raw(leaf) for leaf in leaves_of(store.state(1, deadline_s=soon())[1])] == before


def test_a_copy_that_has_no_room_ends_its_heals_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leaves = [jnp.asarray(values((1000,)))]
    for free_bytes, kept in ((8000, True), (7999, False), (None, True)):
        monkeypatch.setattr(_store, "available_bytes", lambda free_bytes=free_bytes: free_bytes)
        caplog.clear()
        store = StateStore()
        store.publish(STEP, leaves)
        with caplog.at_level(logging.ERROR):
            store.pin(1, STEP)
        assert ("take 0.0 GB more with its, and may take 50% of the 0.0 GB" in caplog.text) == (not kept)
        if kept:
            store.state(1, deadline_s=soon())
        else:
            with pytest.raises(Gone, match="heal 1 is over"):
                store.state(1, deadline_s=soon())
        store.before_donation()


def test_memory_that_earlier_copies_took_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA keeps it for the next."""
    store = StateStore()
    for number, free_bytes in ((1, 8000), (2, 0)):
        monkeypatch.setattr(_store, "available_bytes", lambda free_bytes=free_bytes: free_bytes)
        store.publish(STEP + number, [jnp.asarray(values((1000,)))])
        store.pin(number, STEP + number)
        patience.until(lambda: all(store._copied.values()), "the copy to be made")
        store.state(number, deadline_s=soon())
        store.release(number)


def test_memory_of_copies_that_were_not_made_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "available_bytes", lambda: 8000)
    store = StateStore()
    with monkeypatch.context() as patch:
        patch.setattr(_store.threading.Thread, "start", lambda _: None)
        store.publish(STEP, [jnp.asarray(values((1000,)))])
        store.pin(1, STEP)
        store.release(1)
    monkeypatch.setattr(_store, "available_bytes", lambda: 10)
    store.pin(2, STEP)
    assert not store._pins


@pytest.mark.parametrize("limit_gb", ["0", "64"])
def test_what_is_taken_already_is_not_counted_again(limit_gb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded leaf takes as much again when its pieces are joined."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", limit_gb)
    (spread, *_) = state()
    size = spread.nbytes
    snapshot = Snapshot([spread, spread])
    copies = 2 * size if limit_gb == "64" else 0
    assert (snapshot.pinned_bytes, snapshot.missing_bytes) == (copies, 4 * size - copies)
    wanted = iter([True, False])
    snapshot.capture(lambda: next(wanted))
    assert snapshot.missing_bytes == (2 * size if copies else 3 * size)
    snapshot.capture()
    assert (snapshot.pinned_bytes, snapshot.missing_bytes) == (copies, 2 * size)
    content(snapshot.blob())
    assert (snapshot.copied_bytes, snapshot.missing_bytes) == (4 * size, 0)


def test_the_memory_of_two_copies_at_once_is_that_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore()
    for number, free_bytes in ((1, 8000), (2, 7999)):
        monkeypatch.setattr(_store, "available_bytes", lambda free_bytes=free_bytes: free_bytes)
        store.publish(STEP + number, [jnp.asarray(values((1000,)))])
        store.pin(number, STEP + number)
    store.state(1, deadline_s=soon())
    with pytest.raises(Gone, match="heal 2 is over"):
        store.state(2, deadline_s=soon())


STRIPES = (Stripe(0, 2), Stripe(1, 2))


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states are divided too."""
    monkeypatch.setattr(_blob, "UNDIVIDED_BYTES", 0)


@pytest.mark.usefixtures("small_stripes")
@pytest.mark.parametrize("limit_gb", ["0", "64"])
@pytest.mark.parametrize("together", [True, False])
def test_copies_of_two_stripes_need_room_for_both(
    limit_gb: str, monkeypatch: pytest.MonkeyPatch, *, together: bool
) -> None:
    """Joiners that come together may ask one donor for different stripes."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", limit_gb)
    monkeypatch.setattr(_store.threading.Thread, "start", lambda _: None)  # the copies stay under way
    for free_bytes, kept in ((16000, 2), (15999, 1), (7999, 0)):
        monkeypatch.setattr(_store, "available_bytes", lambda free_bytes=free_bytes: free_bytes)
        store, leaves = StateStore(), [jnp.asarray(values((1000,))), jnp.asarray(values((1000,)))]
        if not together:
            store.publish(STEP, leaves)
        for number, stripe in enumerate(STRIPES):
            store.pin(number, STEP, stripe=stripe)
        if together:
            store.publish(STEP, leaves)
        assert len(store._pins) == kept
        store.before_donation()
        for number in store._pins:
            stripe, live = store.keeps(number, deadline_s=soon())
            assert (stripe, live) == (STRIPES[number], False)


@pytest.mark.usefixtures("small_stripes")
def test_a_copy_that_is_made_is_no_longer_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is missing in the available memory."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    monkeypatch.setattr(_store, "available_bytes", lambda: 8000)
    store = StateStore()
    store.publish(STEP, [jnp.asarray(values((1000,))), jnp.asarray(values((1000,)))])
    store.pin(0, STEP, stripe=STRIPES[0])
    patience.until(lambda: all(store._copied.values()), "the copy to be made")
    store.pin(1, STEP, stripe=STRIPES[1])
    assert len(store._pins) == 2


@pytest.mark.usefixtures("small_stripes")
def test_a_heal_that_ends_makes_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store.threading.Thread, "start", lambda _: None)
    monkeypatch.setattr(_store, "available_bytes", lambda: 8000)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    store = StateStore()
    store.publish(STEP, [jnp.asarray(values((1000,))), jnp.asarray(values((1000,)))])
    for number, stripe in enumerate(STRIPES):
        store.pin(number, STEP, stripe=stripe)
        assert number in store._pins
        store.release(number)


@pytest.mark.usefixtures("small_stripes")
def test_two_stripes_share_what_states_may_take_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_snapshot, "pinned_limit_bytes", lambda: 4 * 4000 - 1)
    store = StateStore()
    store.publish(STEP, [jnp.asarray(values((1000,))), jnp.asarray(values((1000,)))])
    for number, stripe in enumerate(STRIPES):
        store.pin(number, STEP, stripe=stripe)
    assert sorted(each.pinned_bytes for each in store._snapshots.values()) == [0, 4000]
    assert [each.copied_bytes for each in store._snapshots.values()] == [4000, 4000]


def test_memory_that_was_not_pinned_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    store = StateStore()
    for number, free_bytes, kept in ((1, 8000, True), (2, 7999, False)):
        monkeypatch.setattr(_store, "available_bytes", lambda free_bytes=free_bytes: free_bytes)
        store.publish(STEP + number, [jnp.asarray(values((1000,)))])
        store.pin(number, STEP + number)
        assert (number in store._pins) is kept
        store.release(number)


def test_a_copy_that_fails_ends_its_heals_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: object, **__: bool) -> list[HostCopy]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(_snapshot, "host_copies", failing)
    store = StateStore()
    store.publish(STEP, [jnp.asarray(values((9,)))])
    with caplog.at_level(logging.ERROR):
        store.pin(1, STEP)
        patience.until(lambda: not store._pins, "the heal to be abandoned")
    assert "state 7 is lost, because it could not be captured: Spoiled('RESOURCE_EXHAUSTED" in caplog.text
    store.before_donation()


def test_the_end_of_an_old_copy_does_not_end_a_newer_heal(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore()
    store.publish(STEP, [jnp.asarray(values((9,)))])
    store.pin(1, STEP)
    old = store._snapshots[STEP, WHOLE]
    store.release(1)
    store.pin(2, STEP)
    monkeypatch.setattr(old, "capture", lambda _: 1 // 0)
    store._capture((STEP, WHOLE), old)
    store.state(2, deadline_s=soon())


def test_what_is_copied() -> None:
    """A leaf in pieces has to be joined for a joiner, and a leaf in host memory is overwritten there."""
    assert Snapshot(state()).copied_bytes == 2 * 64 * 3 * 4 + 5 * 2 + 6 + 3 * 4
    assert Snapshot([np.zeros(3), 2.0, jax.random.key(0)]).copied_bytes == 0


def test_what_takes_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves offloaded to the host are copied there by numpy."""
    assert Snapshot(state()).pinned_bytes == 64 * 3 * 4 + 5 * 2 + 6
    monkeypatch.setattr(_host_copies, "_has_pinned", lambda _: False)
    snapshot = Snapshot(state())
    assert (snapshot.pinned_bytes, snapshot.missing_bytes) == (0, snapshot.copied_bytes)


def test_a_copy_for_which_there_is_no_pinned_memory_does_not_count_as_such(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> object:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")

    store = StateStore()
    store.publish(STEP, [jnp.asarray(values((1000,)))])
    monkeypatch.setattr(jax, "device_put", refused)
    store.pin(1, STEP)
    patience.until(lambda: all(store._copied.values()), "the copy to be made")
    assert "There is no pinned host memory for copies" in caplog.text
    assert store._pool_bytes == 0


def test_of_equal_copies_one_is_copied() -> None:
    spread, copied = state()[:2]
    for leaf, pieces in ((spread, 4), (copied, 1)):
        (copy,) = host_copies([leaf])
        assert len(copy.pieces) == pieces
        assert {piece.sharding.memory_kind for _, piece in copy.pieces} == {"pinned_host"}
        assert copy.flat().tobytes() == raw(leaf)


def test_nothing_is_copied_on_cpu_before_it_is_overwritten() -> None:
    threads = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_host_copies, "_has_memory", lambda platform: platform != "cpu")
        store = StateStore()
        store.publish(STEP, state()[:2])
        store.pin(1, STEP)
        assert store._snapshots[STEP, WHOLE].copied_bytes == 0
    assert {each.name for each in set(threading.enumerate()) - threads} == set()
