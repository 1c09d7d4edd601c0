"""A state on an accelerator that is kept for joiners: copied beside the step. CPU devices take its place."""

import logging
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxft._heal import _snapshot, _store
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
    """What a step makes of a state, in the memory of that."""
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    plain = [
        leaf
        for leaf, key in zip(leaves, keys, strict=True)
        if not key and leaf.sharding.memory_kind == "device"
    ]
    step = jax.jit(
        lambda given: [one + jnp.ones((), one.dtype) for one in given],
        donate_argnums=0,
        out_shardings=[leaf.sharding for leaf in plain],
    )
    return jax.block_until_ready(step(plain))


def copied(snapshot: Snapshot) -> bool:
    """Whether all copies have been started."""
    return all(source._leaf is None for source in snapshot._leaf_sources() if source.copied_bytes)


@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_pinned_state_is_copied_before_a_step_overwrites_it(pinned_first: bool) -> None:
    store, leaves = StateStore(), state()
    before = [raw(leaf) for leaf in leaves]
    if pinned_first:
        store.pin(1, STEP)
    store.publish(STEP, leaves)
    if not pinned_first:
        store.pin(1, STEP)
    # A thread does it, long before the training thread has to.
    patience.until(lambda: copied(store._snapshots[STEP]), "the copies to be started")
    store.before_donation()
    store.publish(STEP + 1, overwritten(leaves))
    blob = store.state(1, deadline_s=soon())[1]
    content(blob)
    assert [raw(leaf) for leaf in leaves_of(blob)] == before


def test_the_training_thread_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[jax.Array] = []
    pieces_of = _snapshot._pieces_of

    def noted(copy: jax.Array) -> list[_snapshot._Piece]:
        read.append(copy)
        return pieces_of(copy)

    monkeypatch.setattr(_snapshot, "_pieces_of", noted)
    monkeypatch.setattr(_store.threading.Thread, "start", lambda self: None)  # the thread is late
    store, leaves = StateStore(), [jnp.asarray(values((9,)))]
    before = [raw(leaf) for leaf in leaves]
    store.publish(STEP, leaves)
    store.pin(1, STEP)
    assert not copied(store._snapshots[STEP])
    store.before_donation()
    assert copied(store._snapshots[STEP])
    assert not read
    store.publish(STEP + 1, overwritten(leaves))
    assert same_bits(leaves_of(store.state(1, deadline_s=soon())[1]), [np.asarray(values((9,)))])
    assert len(read) == 1
    assert before == [raw(jnp.asarray(values((9,))))]


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
        assert ("would take 0.0 GB, and may take 50% of the 0.0 GB" in caplog.text) == (not kept)
        if kept:
            store.state(1, deadline_s=soon())
        else:
            with pytest.raises(Gone, match="heal 1 is over"):
                store.state(1, deadline_s=soon())
        store.before_donation()


def test_a_copy_that_fails_ends_its_heals_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(arrays: object) -> list[jax.Array]:
        raise ValueError("RESOURCE_EXHAUSTED: no pinned memory")

    monkeypatch.setattr(_snapshot, "host_copies", failing)
    store = StateStore()
    store.publish(STEP, [jnp.asarray(values((9,)))])
    with caplog.at_level(logging.ERROR):
        store.pin(1, STEP)
        patience.until(lambda: not store._pins, "the heal to be abandoned")
    assert "state 7 is lost, because it could not be captured: ValueError('RESOURCE_EXHAUSTED" in caplog.text
    store.before_donation()


def test_what_is_copied_is_what_is_not_on_the_host() -> None:
    assert Snapshot(state()).copied_bytes == 64 * 3 * 4 + 5 * 2 + 6
    assert Snapshot([np.zeros(3), 2.0, *state()[3:5]]).copied_bytes == 0


def test_nothing_is_copied_on_cpu_before_it_is_overwritten() -> None:
    threads = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxft._arrays._host_copies.is_accelerator", lambda platform: platform != "cpu")
        store = StateStore()
        store.publish(STEP, state()[:2])
        store.pin(1, STEP)
        assert store._snapshots[STEP].copied_bytes == 0
    assert {one.name for one in set(threading.enumerate()) - threads} == set()
