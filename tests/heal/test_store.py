"""Which states a donor keeps, for whom, and for how long."""

import gc
import logging
import threading
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from jaxft_protocol.messages import WHOLE

from jaxft._heal import _store
from jaxft._heal._snapshot import Snapshot
from jaxft._heal._store import Gone, NotYet, StateStore
from tests import patience

from .donors import MB, content, in_thread, leaves_of, own, read, same_bits, soon, values

NOW = 0.0  # a deadline that has passed: only look


def state_at(step: int) -> list[Any]:
    return [values((30, 7), seed=step), np.int32(step)]


def means_at(step: int, size: int = 10) -> list[np.ndarray]:
    return [np.full((size,), step, np.float32)]


def train(store: StateStore, first: int, stop: int, *, size: int = 10) -> None:
    """Steps, as the training thread makes them."""
    for step in range(first, stop):
        store.log(step, means_at(step, size))
        store.before_donation()
        store.publish(step + 1, state_at(step + 1))


def standing_at(step: int) -> StateStore:
    store = StateStore()
    store.publish(step, state_at(step))
    return store


def has_state(store: StateStore, heal_id: int, step: int) -> bool:
    found, blob = store.state(heal_id, deadline_s=NOW)
    return found == step and same_bits(leaves_of(blob), state_at(step))


def has_means(store: StateStore, heal_id: int, step: int) -> bool:
    return same_bits(leaves_of(store.means(heal_id, step, deadline_s=NOW)), means_at(step))


def test_a_pin_of_the_present_state() -> None:
    store = standing_at(4)
    store.pin(1, 4)
    assert has_state(store, 1, 4)
    train(store, 4, 7)
    assert has_state(store, 1, 4)
    assert all(has_means(store, 1, step) for step in (4, 5, 6))


def test_a_pin_that_nobody_asked_for_is_captured_before_the_donation() -> None:
    store = standing_at(4)
    store.pin(1, 4)
    train(store, 4, 6)
    assert has_state(store, 1, 4)


def test_a_pin_of_a_state_that_is_yet_to_come() -> None:
    store = standing_at(3)
    store.pin(1, 4)
    with pytest.raises(NotYet, match="state 4 is not reached yet"):
        store.state(1, deadline_s=NOW)
    train(store, 3, 6)
    assert has_state(store, 1, 4)
    assert has_means(store, 1, 4)
    with pytest.raises(Gone, match="step 3 are not kept"):
        store.means(1, 3, deadline_s=NOW)


def test_a_pin_before_anything_was_published() -> None:
    store = StateStore()
    store.pin(1, 0)
    with pytest.raises(NotYet):
        store.state(1, deadline_s=NOW)
    store.publish(0, state_at(0))
    assert has_state(store, 1, 0)


def test_a_pin_that_comes_too_late_is_gone_at_once() -> None:
    store = standing_at(4)
    store.before_donation()
    store.pin(1, 4)
    with pytest.raises(Gone, match="state 4 of heal 1 is not kept"):
        store.state(1, deadline_s=soon())
    store.publish(5, state_at(5))
    store.pin(2, 4)
    with pytest.raises(Gone):
        store.state(2, deadline_s=soon())
    with pytest.raises(Gone, match="the means of step 4"):
        store.means(2, 4, deadline_s=soon())


def test_what_was_never_pinned_is_not_there_yet_and_what_was_released_is_gone() -> None:
    store = standing_at(4)
    with pytest.raises(NotYet, match="heal 9 is not pinned yet"):
        store.state(9, deadline_s=NOW)
    with pytest.raises(Gone):
        store.means(9, 4, deadline_s=soon())
    store.pin(9, 4)
    store.release(9)
    store.release(9)  # twice is harmless
    with pytest.raises(Gone, match="heal 9 is over"):
        store.state(9, deadline_s=soon())
    with pytest.raises(Gone):
        store.means(9, 4, deadline_s=soon())


def test_means_that_are_not_committed_yet() -> None:
    store = standing_at(4)
    store.pin(1, 4)
    for step in (4, 5, 900):
        with pytest.raises(NotYet, match=f"step {step} is not committed yet"):
            store.means(1, step, deadline_s=NOW)
    train(store, 4, 5)
    assert has_means(store, 1, 4)
    with pytest.raises(NotYet):
        store.means(1, 5, deadline_s=NOW)


@pytest.mark.parametrize("event", ["pin", "publish", "log", "release"])
def test_whoever_waits_is_woken_by_what_it_waits_for(event: str) -> None:
    store = standing_at(3)
    if event != "pin":
        store.pin(1, 4)
    began_s = patience.machine_s()
    if event == "log":
        waiting = in_thread(lambda: store.means(1, 4, deadline_s=soon()))
    else:
        waiting = in_thread(lambda: store.state(1, deadline_s=soon())[0])
    train(store, 3, 5)
    if event == "pin":
        store.pin(1, 5)
        assert waiting() == 5
    elif event == "publish":
        assert waiting() == 4
    elif event == "log":
        assert content(waiting())
    else:
        store.release(1)
        waiting_for_more = in_thread(lambda: store.means(1, 5, deadline_s=soon()))
        with pytest.raises(Gone):
            waiting_for_more()
    assert patience.machine_s() - began_s < 10


@pytest.mark.parametrize("step", [0, 2])
def test_for_one_that_holds_the_state_only_the_log_is_kept(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Snapshot, "capture", None)
    store = standing_at(step)
    store.pin(1, step, log_only=True)
    train(store, step, step + 3)
    assert not store._snapshots
    assert all(has_means(store, 1, logged) for logged in range(step, step + 3))
    with pytest.raises(Gone, match=f"state {step} of heal 1 is not kept"):
        store.state(1, deadline_s=soon())
    store.holds(1, step + 2)
    assert sorted(store._log) == [step + 2]
    store.release(1)
    assert not store._log


def test_a_log_that_begins_at_a_state_that_is_yet_to_come() -> None:
    # Pinned with the commit that makes this state, while the donor has not applied it yet.
    store = standing_at(3)
    store.pin(1, 4, log_only=True)
    train(store, 3, 6)
    assert sorted(store._log) == [4, 5]
    assert not store._snapshots


def test_one_follows_the_log_while_another_fetches_the_state_of_the_same_step() -> None:
    store = standing_at(2)
    store.pin(1, 2, log_only=True)
    store.pin(2, 2)
    train(store, 2, 4)
    assert has_state(store, 2, 2)
    with pytest.raises(Gone):
        store.state(1, deadline_s=soon())
    store.holds(1, 4)
    assert sorted(store._log) == [2, 3]
    store.release(2)
    assert not store._snapshots
    assert not store._log


def test_a_spare_that_stands_still_is_given_up_like_any_joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "LOG_LIMIT_MIN_BYTES", 1000)
    store = standing_at(0)
    store.pin(1, 0, log_only=True)
    for step in range(20):
        train(store, step, step + 1, size=1000)
        store.holds(1, step)
    assert store._pins
    train(store, 20, 40, size=1000)
    with pytest.raises(Gone):
        store.means(1, 39, deadline_s=soon())


def test_two_heals_at_different_steps() -> None:
    store = standing_at(2)
    store.pin(1, 2)
    train(store, 2, 5)
    store.pin(2, 5)
    train(store, 5, 8)
    assert has_state(store, 1, 2)
    assert has_state(store, 2, 5)
    assert all(has_means(store, 1, step) for step in range(2, 8))
    assert has_means(store, 2, 5)
    store.release(1)
    assert has_state(store, 2, 5)
    assert sorted(store._log) == [5, 6, 7]
    assert sorted(step for step, _ in store._snapshots) == [5]


def test_two_heals_at_one_step_share_a_snapshot() -> None:
    store = standing_at(2)
    store.pin(1, 2)
    store.pin(2, 2)
    assert store.state(1, deadline_s=NOW)[1] is store.state(2, deadline_s=NOW)[1]
    train(store, 2, 3)
    store.release(1)
    assert has_state(store, 2, 2)


def test_the_log_is_kept_only_while_somebody_needs_it() -> None:
    store = standing_at(0)
    train(store, 0, 3)
    assert not store._log
    store.pin(1, 4)
    train(store, 3, 6)
    assert sorted(store._log) == [4, 5]
    store.release(1)
    assert not store._log
    train(store, 6, 8)
    assert not store._log


def test_a_joiner_that_says_what_it_holds_frees_what_came_before() -> None:
    store = standing_at(2)
    store.pin(1, 2)
    train(store, 2, 6)
    store.holds(1, 2)
    assert not store._snapshots
    assert sorted(store._log) == [2, 3, 4, 5]
    store.holds(1, 4)
    assert sorted(store._log) == [4, 5]
    store.holds(1, 3)  # late
    assert sorted(store._log) == [4, 5]
    with pytest.raises(Gone):
        store.state(1, deadline_s=soon())
    with pytest.raises(Gone):
        store.means(1, 3, deadline_s=soon())
    assert has_means(store, 1, 5)
    store.holds(7, 5)  # of a heal that is unknown here
    store.holds(1, 6)
    train(store, 6, 7)
    assert sorted(store._log) == [6]


def test_what_one_joiner_holds_another_may_still_need() -> None:
    store = standing_at(2)
    store.pin(1, 2)
    store.pin(2, 2)
    train(store, 2, 5)
    store.holds(1, 4)
    assert has_state(store, 2, 2)
    assert sorted(store._log) == [2, 3, 4]
    store.holds(2, 3)
    assert not store._snapshots
    assert sorted(store._log) == [3, 4]


def test_a_state_that_is_held_before_the_donation_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    store = standing_at(2)
    store.pin(1, 2)
    store.holds(1, 2)
    monkeypatch.setattr(Snapshot, "capture", None)
    train(store, 2, 4)
    assert sorted(store._log) == [2, 3]


def grown(size: int, monkeypatch: pytest.MonkeyPatch, steps: int) -> tuple[StateStore, list[int]]:
    """A store with two heals, pinned at 0 and at 5, after some steps; and which heals live after each."""
    monkeypatch.setattr(_store, "LOG_LIMIT_MIN_BYTES", 1000)
    store = standing_at(0)
    store.pin(1, 0)
    alive: list[int] = []
    for step in range(steps):
        train(store, step, step + 1, size=size)
        if step == 4:
            store.pin(2, 5)
        alive.append(len(store._pins))
    return store, alive


def test_a_log_that_outgrows_its_bound_gives_up_the_oldest_heal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jaxft"):
        store, alive = grown(1000, monkeypatch, 20)
    # The ninth step in the log is one too many, for each of them.
    assert alive == [1] * 4 + [2] * 4 + [1] * 5 + [0] * 7
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Abandoned heal 1",
        "Abandoned heal 2",
    ]
    assert not store._log
    assert not store._snapshots
    with pytest.raises(Gone, match="heal 1 is over"):
        store.state(1, deadline_s=soon())


def test_a_log_within_its_bound_gives_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    state_bytes = sum(leaf.nbytes for leaf in state_at(0))
    steps = 20
    fits = _store.LOG_LIMIT_STATES * state_bytes // (4 * steps)
    assert grown(fits, monkeypatch, steps)[1][-1] == 2
    monkeypatch.setattr(_store, "LOG_LIMIT_STATES", 1)
    assert grown(fits, monkeypatch, steps)[1][-1] < 2


def test_a_small_model_may_log_many_steps() -> None:
    store = standing_at(0)
    store.pin(1, 0)
    train(store, 0, 500)
    assert len(store._log) == 500


def test_release_frees_the_memory() -> None:
    store = StateStore()
    leaves = [own(values((200, 100))), own(values((5,)))]
    refs = [weakref.ref(leaf) for leaf in leaves]
    store.publish(0, leaves)
    store.pin(1, 0)
    mean = np.zeros(1000, np.float32)
    logged = weakref.ref(mean)
    store.log(0, [mean])
    store.before_donation()
    blob = store.state(1, deadline_s=NOW)[1]
    snapshot = weakref.ref(blob.sources[0])
    content(blob)
    content(store.means(1, 0, deadline_s=NOW))
    store.publish(1, state_at(1))
    del leaves, mean, blob
    gc.collect()
    assert logged() is not None
    assert snapshot() is not None
    store.release(1)
    gc.collect()
    assert [ref() for ref in (*refs, logged, snapshot)] == [None] * 4


def test_without_a_pin_the_store_keeps_only_the_present_state() -> None:
    store = StateStore()
    first = [own(values((10,)))]
    ref = weakref.ref(first[0])
    store.publish(0, first)
    del first
    train(store, 0, 1)
    gc.collect()
    assert ref() is None
    assert not store._log


def test_a_capture_that_fails_ends_the_heal_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError("no host memory left")

    store = standing_at(2)
    store.pin(1, 2)
    monkeypatch.setattr(Snapshot, "capture", no_memory)
    with caplog.at_level(logging.ERROR, "jaxft"):
        train(store, 2, 4)
    assert "Abandoned heal 1: state 2 is lost, because it could not be captured" in caplog.text
    with pytest.raises(Gone):
        store.state(1, deadline_s=soon())
    store.pin(2, 4)
    assert has_state(store, 2, 4)


def test_a_heal_that_is_released_during_the_capture_costs_no_more_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = standing_at(2)
    store.pin(1, 2)
    captured: list[int] = []
    leaf_class = type(store._snapshots[2, WHOLE].blob().sources[0])
    monkeypatch.setattr(leaf_class, "capture", lambda _: (captured.append(1), store.release(1)))
    train(store, 2, 3)
    assert len(captured) == 1


def test_a_thread_that_reads_slowly_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server thread is in the middle of joining a leaf, training and session go on."""
    inside, go_on = threading.Event(), threading.Event()
    store = StateStore()
    devices = jax.devices()[:2]
    over = jax.make_mesh((2,), ("x",), devices=devices)
    sharding = jax.sharding.NamedSharding(over, jax.sharding.PartitionSpec("x"))
    store.publish(0, [jax.device_put(values((64, 4)), sharding)])
    store.pin(1, 0)
    source = store.state(1, deadline_s=NOW)[1].sources[0]
    join = type(source)._join  # pyright: ignore[reportAttributeAccessIssue]

    def slow(self: Any) -> memoryview:
        inside.set()
        assert go_on.wait(patience.FAR_S)
        return join(self)

    store.before_donation()
    monkeypatch.setattr(type(source), "_join", slow)
    reading = in_thread(lambda: content(store.state(1, deadline_s=NOW)[1]))
    assert inside.wait(patience.FAR_S)
    began_s = patience.machine_s()
    train(store, 0, 5)
    store.pin(2, 5)
    store.release(2)
    assert patience.machine_s() - began_s < 5
    go_on.set()
    assert reading() == values((64, 4)).tobytes()


def test_many_threads_at_once() -> None:
    """Joiners come, read and go while the training runs; each reads its own state and means, or is refused."""
    store = standing_at(0)
    healed: list[int] = []
    done: list[int] = []

    def heal(number: int) -> None:
        try:
            for heal_id in range(number * 100, number * 100 + 15):
                # Of two that pin the current state, one comes too late where threads are slow; the third never does.
                step = store._step + (50 if heal_id % 3 == 0 else 0)
                store.pin(heal_id, step)
                try:
                    found, blob = store.state(heal_id, deadline_s=soon())
                    assert found == step
                    assert same_bits(leaves_of(blob), state_at(step))
                    store.holds(heal_id, step)
                    for replayed in range(step, step + 3):
                        assert has_means_soon(store, heal_id, replayed)
                    healed.append(heal_id)
                except Gone:
                    continue  # the pin came just too late
                finally:
                    store.release(heal_id)
        finally:
            done.append(number)

    joiners = [in_thread(lambda number=number: heal(number)) for number in (1, 2, 3)]
    step = 0
    while len(done) < len(joiners):
        train(store, step, step + 1)
        step += 1
    for joiner in joiners:
        joiner()
    assert healed
    assert not store._pins
    assert not store._log
    assert not store._snapshots


def has_means_soon(store: StateStore, heal_id: int, step: int) -> bool:
    return same_bits(leaves_of(store.means(heal_id, step, deadline_s=soon())), means_at(step))


def test_a_state_of_the_size_of_a_chunk_is_not_copied() -> None:
    store = StateStore()
    leaf = own(values((MB,), "uint8"))
    store.publish(0, [leaf])
    store.pin(1, 0)
    pieces = read(store.state(1, deadline_s=NOW)[1], 0)
    assert np.frombuffer(pieces[0], np.uint8).ctypes.data == leaf.unsafe_buffer_pointer()
