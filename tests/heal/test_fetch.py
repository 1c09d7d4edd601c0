"""A joiner and its donors over real connections."""

import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxft._arrays._layout import LeafSpec
from jaxft._errors import HealFailed
from jaxft._heal import _fetch, _server, _stripes
from jaxft._heal._blob import blob_of
from jaxft._heal._frames import Kind, Request
from jaxft._heal._store import StateStore
from jaxft._transport._listener import Abort, Connection, ConnectionRequest, dial
from tests import patience
from tests.interrupts import interrupt, interrupted

from .donors import (
    LONG_S,
    MB,
    Donor,
    descriptors,
    donor,
    fetch_state,
    heal_threads,
    in_thread,
    joiner,
    leaves_of,
    mesh,
    mixed_state,
    own,
    same_bits,
    sharded,
    soon,
    specs_of,
    until,
    values,
)

HEAL = 5


@pytest.fixture(scope="module")
def big() -> list[np.ndarray]:
    """State of 40 chunks: several spans for each of a few donors."""
    return [values((5 * MB,)), values((20 * MB,), "uint8", 1)]


def like(leaves: Sequence[Any]) -> list[jax.Array]:
    return [jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in leaves]


def test_a_mixed_state_from_one_donor() -> None:
    state = mixed_state(1)
    with donor(leaves=state, step=7) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 7)
        fetched = fetch_state(fetcher, 7, mixed_state(2))
        assert same_bits(fetched, state)
        assert [leaf.dtype for leaf in fetched] == [leaf.dtype for leaf in state]
        until(lambda: not one.store._snapshots, "the donor to let go of the state")


def test_stripes_from_two_donors(big: list[np.ndarray]) -> None:
    with donor("a", big) as a, donor("b", big) as b, joiner(a, b) as fetcher:
        for each in (a, b):
            each.store.pin(HEAL, 0)
        both_serve(a, b)
        assert same_bits(fetch_state(fetcher, 0, like(big)), big)
        until(lambda: a.served[Kind.STATE] + b.served[Kind.STATE] == 40, "both servers to have counted")
        # The second took its first span of the other's rest; all else is for the quicker one.
        left = 40 - 40 // 2 // _stripes._SPANS_OF_A_SHARE
        assert min(a.served[Kind.STATE], b.served[Kind.STATE]) >= left // 2 // _stripes._SPANS_OF_A_SHARE
        assert fetcher.transferred_bytes == 40 * MB


def test_each_chunk_that_arrives_is_progress(big: list[np.ndarray]) -> None:
    moved: list[int] = []
    with donor("a", big) as a, donor("b", big) as b:
        with joiner(a, b, moved=lambda: moved.append(1)) as fetcher:
            for each in (a, b):
                each.store.pin(HEAL, 0)
            fetch_state(fetcher, 0, like(big))
    assert len(moved) == 40


@pytest.mark.parametrize("leaves", [[], [np.zeros((0, 4), np.float32)], [np.float32(3)]], ids=str)
def test_states_of_hardly_any_bytes(leaves: list[Any]) -> None:
    with donor(leaves=leaves) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 0)
        assert same_bits(fetch_state(fetcher, 0, leaves), leaves)


def test_a_sharded_donor_and_a_joiner_on_another_mesh() -> None:
    array = values((16, 24))
    theirs = [sharded(array, mesh(4), None, "x"), sharded(array, mesh(2), "x"), own(np.int32(4))]
    ours = [sharded(np.zeros_like(array), mesh(2, 2), "y", "x"), own(np.zeros_like(array)), own(np.int32(0))]
    with donor(leaves=theirs) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 0)
        fetched = fetch_state(fetcher, 0, ours)
    assert same_bits(fetched, [array, array, np.int32(4)])
    assert [leaf.sharding for leaf in fetched] == [leaf.sharding for leaf in ours]


def test_a_pin_may_come_after_the_joiner() -> None:
    state = mixed_state()
    with donor(leaves=state) as one, joiner(one) as fetcher:
        asked = threading.Event()
        state_of = one.store.state

        def noted(*given: Any, deadline_s: float) -> Any:
            asked.set()
            return state_of(*given, deadline_s=deadline_s)

        one.store.state = noted  # pyright: ignore[reportAttributeAccessIssue]
        fetched = in_thread(lambda: fetch_state(fetcher, 0, state))
        assert asked.wait(LONG_S)
        one.store.pin(HEAL, 0)
        assert same_bits(fetched(), state)


def test_a_pin_after_more_than_one_long_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "LONG_POLL_S", 0.02)
    polls: list[int] = []
    with donor(leaves=[values((3,))]) as one, joiner(one) as fetcher:
        state_of = one.store.state

        def noted(heal_id: int, *span: Any, deadline_s: float) -> Any:
            polls.append(heal_id)
            return state_of(heal_id, *span, deadline_s=deadline_s)

        one.store.state = noted  # pyright: ignore[reportAttributeAccessIssue]
        fetched = in_thread(lambda: fetch_state(fetcher, 0, [values((3,), seed=1)]))
        until(lambda: len(polls) > 3, "a few polls")
        one.store.pin(HEAL, 0)
        assert same_bits(fetched(), [values((3,))])


@pytest.mark.parametrize("donors", [1, 2])
def test_a_pin_that_never_comes_is_not_waited_for_for_ever(
    donors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_server, "LONG_POLL_S", 0.02)
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b:
        with joiner(*(a, b)[:donors], timeout_s=1.5) as fetcher:
            reason = "a: it was not ready for 1.5 s: heal 5 is not pinned yet"
            with pytest.raises(HealFailed, match=reason):
                fetch_state(fetcher, 0, [values((3,))])


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (
            [values((3, 4)), values((5,))],
            r"leaf 0 is LeafType\(shape=\(3, 4\).* there, and LeafType\(shape=\(4, 3\).* here",
        ),
        ([values((4, 3)), values((5,), "bfloat16")], r"leaf 1 is .*bfloat16.* there, and .*float32.* here"),
        ([values((4, 3))], "it has 1 leaves, here are 2"),
        ([values((4, 3)), values((5,)), values((1,))], "it has 3 leaves, here are 2"),
    ],
    ids=["shape", "dtype", "fewer", "more"],
)
def test_other_leaves_are_named(theirs: list[np.ndarray], reason: str) -> None:
    with donor("a", theirs) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 0)
        with pytest.raises(HealFailed, match=f"a: the leaves of its state differ: {reason}"):
            fetch_state(fetcher, 0, [values((4, 3)), values((5,))])


def test_a_donor_with_other_leaves_is_no_harm_beside_a_good_one() -> None:
    state = [values((4, 3))]
    with donor("a", [values((3, 4))]) as a, donor("b", state) as b, joiner(a, b) as fetcher:
        for each in (a, b):
            each.store.pin(HEAL, 0)
        assert same_bits(fetch_state(fetcher, 0, like(state)), state)


def test_another_step_is_refused() -> None:
    with donor("a", [values((3,))], step=4) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 4)
        with pytest.raises(HealFailed, match="a: it keeps state 4, not state 6"):
            fetch_state(fetcher, 6, [values((3,))])


def test_a_donor_that_is_gone_is_dropped_and_the_other_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    state = mixed_state()
    with donor("a", state) as a, donor("b", state) as b, joiner(a, b) as fetcher:
        a.store.pin(HEAL, 0)
        a.store.release(HEAL)
        b.store.pin(HEAL, 0)
        with caplog.at_level(logging.WARNING, "jaxft"):
            assert same_bits(fetch_state(fetcher, 0, state), state)
            b.store.log(0, [values((9,))])
            assert same_bits(fetcher.means(0, specs_of([values((9,))]), cancel=Abort()), [values((9,))])
        assert sum("Dropped donor a" in record.message for record in caplog.records) <= 1
        assert not a.served


def test_all_donors_gone_are_all_named() -> None:
    with donor("a", mixed_state()) as a, donor("b", mixed_state()) as b:
        nowhere = ("c", "127.0.0.1:1")
        with joiner(a, b, nowhere) as fetcher:
            for each in (a, b):
                each.store.pin(HEAL, 0)
                each.store.release(HEAL)
            with pytest.raises(HealFailed) as failure:
                fetch_state(fetcher, 0, mixed_state())
        for reason in ("a: heal 5 is over", "b: heal 5 is over", "c: Cannot connect"):
            assert reason in str(failure.value)


def test_no_donors() -> None:
    with joiner() as fetcher, pytest.raises(HealFailed, match="the coordinator named none"):
        fetch_state(fetcher, 0, [values((3,))])


# ---- means ----


def test_means_are_waited_for_until_they_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "LONG_POLL_S", 0.02)
    means = [values((300, 7)), values((5,), "bfloat16"), values((), "float32")]
    polls: list[int] = []
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b, joiner(a, b) as fetcher:
        for each in (a, b):
            each.store.pin(HEAL, 0)
            each.store.means = watched(each.store, polls)  # pyright: ignore[reportAttributeAccessIssue]
        fetched = in_thread(lambda: fetcher.means(0, specs_of(means), cancel=Abort()))
        until(lambda: len(polls) > 5, "several polls")
        b.store.log(0, means)  # the other one is behind
        assert same_bits(fetched(), means)


def test_quantised_means_are_fetched_as_their_integers() -> None:
    """Half the bytes of float32, and 1 / 256 for the exponents."""
    size = 1 << 20
    specs = [
        LeafSpec("x exponents", (size // 256,), "int8", "max"),
        LeafSpec("x", (size,), "int8", "widened"),
    ]
    integers, floats = [values((size // 256,), "int8"), values((size,), "int16")], [values((size,))]
    with donor("a", [values((3,))]) as a, joiner(a) as fetcher:
        a.store.pin(HEAL, 0)
        a.store.log(0, integers)
        a.store.log(1, floats)
        assert same_bits(fetcher.means(0, specs, cancel=Abort()), integers)
        quantised_bytes = fetcher.transferred_bytes
        fetcher.means(1, specs_of(floats), cancel=Abort())
        assert quantised_bytes == size * 2 + size // 256
        assert fetcher.transferred_bytes - quantised_bytes == size * 4


def watched(store: StateStore, polls: list[int]) -> Any:
    means_of = store.means

    def noted(heal_id: int, step: int, *span: Any, deadline_s: float) -> Any:
        polls.append(step)
        return means_of(heal_id, step, *span, deadline_s=deadline_s)

    return noted


def test_waiting_longer_than_the_timeout_of_an_idle_donor_drops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one span, so one donor polls while the other is idle: that is no fault of either."""
    monkeypatch.setattr(_server, "LONG_POLL_S", 0.02)
    stall_s = patience.stretched(0.5)
    monkeypatch.setattr(_stripes, "_STALL_S", stall_s)
    polls: list[int] = []
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b:
        with joiner(a, b) as fetcher, caplog.at_level(logging.WARNING, "jaxft"):
            for each in (a, b):
                each.store.pin(HEAL, 0)
                each.store.means = watched(each.store, polls)  # pyright: ignore[reportAttributeAccessIssue]
            began_s = time.monotonic()
            fetched = in_thread(lambda: fetcher.means(0, specs_of([values((9,))]), cancel=Abort()))
            until(
                lambda: time.monotonic() > began_s + 3 * stall_s,
                "thrice the patience with a donor that stands still",
            )
            for each in (a, b):
                each.store.log(0, [values((9,))])
            fetched()
        assert not caplog.records


def test_each_donor_that_is_not_ready_for_long_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_server, "LONG_POLL_S", 0.02)
    monkeypatch.setattr(_fetch, "SLOW_WAIT_S", 0.1)
    polls: list[int] = []
    why = {0: "heal 5 is not pinned yet", 1: "step 0 is not committed yet"}
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b:
        with joiner(a, b) as fetcher, caplog.at_level(logging.INFO, "jaxft"):

            def waits(part: int) -> list[str]:
                texts = [each.getMessage() for each in caplog.records]
                return sorted(text[:31] for text in texts if text.endswith(why[part]))

            fetched = in_thread(lambda: fetch_state(fetcher, 0, [values((3,))]))
            until(lambda: len(waits(0)) == 2, "both to be named")
            for each in (a, b):
                each.store.pin(HEAL, 0)
                each.store.means = watched(each.store, polls)  # pyright: ignore[reportAttributeAccessIssue]
            fetched()
            fetched = in_thread(lambda: fetcher.means(0, specs_of([values((9,))]), cancel=Abort()))
            until(lambda: len(waits(1)) == 2, "both to be named again")
            seen = len(polls)
            until(lambda: len(polls) > seen + 20, "more polls")
            for each in (a, b):
                each.store.log(0, [values((9,))])
            fetched()
    for part in why:
        assert waits(part) == ["Still waiting for donor a to be", "Still waiting for donor b to be"]


def test_means_that_never_come_fail_the_heal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "LONG_POLL_S", 0.02)
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b:
        with joiner(a, b, timeout_s=1.5) as fetcher:
            for each in (a, b):
                each.store.pin(HEAL, 0)
            with pytest.raises(HealFailed) as failure:
                fetcher.means(0, specs_of([values((9,))]), cancel=Abort())
    for name in "ab":
        assert f"{name}: it was not ready for 1.5 s: step 0 is not committed yet" in str(failure.value)


def test_a_donor_that_is_behind_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has drained, is away or computes for long: the others have the rest, and the joiner must keep up."""
    monkeypatch.setattr(_stripes, "_STALL_S", LONG_S)
    monkeypatch.setattr(_server, "LONG_POLL_S", LONG_S)
    means = [values((8 * MB,), "uint8")]
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b, joiner(a, b) as fetcher:
        for each in (a, b):
            each.store.pin(HEAL, 0)
        for step in range(3):
            b.store.log(step, means)
            fetched = in_thread(lambda step=step: fetcher.means(step, specs_of(means), cancel=Abort()))
            assert same_bits(fetched(), means)
        a.store.log(2, means)  # it has caught up, and is asked again
        b.store.release(HEAL)
        assert same_bits(fetcher.means(2, specs_of(means), cancel=Abort()), means)
        a.store.release(HEAL)  # its threads wait no longer


def test_a_donor_that_has_left_the_job_is_dropped_at_once(caplog: pytest.LogCaptureFixture) -> None:
    means = [values((9,))]
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b, joiner(a, b) as fetcher:
        for each in (a, b):
            each.store.pin(HEAL, 0)
            each.store.log(0, means)
            each.store.publish(1, [values((3,))])
        a.store.end_log()
        assert same_bits(fetcher.means(0, specs_of(means), cancel=Abort()), means)
        assert not caplog.records
        fetched = in_thread(lambda: fetcher.means(1, specs_of(means), cancel=Abort()))
        until(lambda: fetcher._donors[0].failed, "it to be dropped")
        b.store.log(1, means)
        assert same_bits(fetched(), means)
    assert "Dropped donor a: it has left the job at step 1, before step 1" in caplog.text


def test_what_the_joiner_holds_is_let_go_by_all_donors() -> None:
    state = [values((12 * MB,), "uint8")]
    means = [values((12 * MB,), "uint8", 1)]
    with donor("a", state) as a, donor("b", state) as b, joiner(a, b) as fetcher:
        for each in (a, b):
            each.store.pin(HEAL, 0)
        both_serve(a, b)
        fetch_state(fetcher, 0, state)
        until(lambda: not a.store._snapshots and not b.store._snapshots, "both to let go of the state")
        for step in range(4):
            for each in (a, b):
                each.store.log(step, means)
                each.store.before_donation()
                each.store.publish(step + 1, [values((3,))])
        both_serve(a, b)
        fetcher.means(3, specs_of(means), cancel=Abort())
        until(lambda: sorted(a.store._log) == sorted(b.store._log) == [3], "both to let go of their logs")


def both_serve(*donors: Donor) -> None:
    """Each donor serves its first chunks only when the other is about to, too."""
    barrier = threading.Barrier(len(donors))
    for one in donors:
        one.before_chunks = lambda one=one: (setattr(one, "before_chunks", None), barrier.wait(LONG_S))


def test_several_chunks_of_means_from_two_donors() -> None:
    means = [values((MB, 5)), values((3,), "bfloat16")]
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b, joiner(a, b) as fetcher:
        for each in (a, b):
            each.store.pin(HEAL, 0)
            each.store.log(0, means)
        assert same_bits(fetcher.means(0, specs_of(means), cancel=Abort()), means)
        until(lambda: a.served[Kind.MEANS] + b.served[Kind.MEANS] == 21, "both servers to have counted")


# ---- ends ----


@pytest.mark.parametrize("phase", ["state", "means"])
def test_a_cancelled_fetch_ends_at_once(phase: str) -> None:
    with donor("a", [values((3,))]) as a, donor("b", [values((3,))]) as b, joiner(a, b) as fetcher:
        cancel = Abort()
        if phase == "state":
            waiting = in_thread(lambda: fetch_state(fetcher, 0, [values((3,))], cancel))
        else:
            for each in (a, b):
                each.store.pin(HEAL, 0)
            waiting = in_thread(lambda: fetcher.means(0, specs_of([values((9,))]), cancel=cancel))
        until(lambda: len(heal_threads()) >= 4, "both ends of both connections")
        ended_s: list[float] = []
        failing = in_thread(lambda: ended(waiting, ended_s))
        began_s = patience.machine_s()
        cancel.set("a new quorum")
        with pytest.raises(HealFailed, match="the heal was superseded: a new quorum"):
            failing()
        # 1 ms on an idle machine; tests share few cores with others.
        assert ended_s[0] - began_s < 1.0


def ended(waiting: Any, ended_s: list[float]) -> Any:
    try:
        return waiting()
    finally:
        ended_s.append(patience.machine_s())


def test_cancelling_takes_less_than_a_tenth_of_a_second() -> None:
    """The best of some, because of what else runs on the machine."""
    delays_s: list[float] = []
    with donor("a", [values((3,))]) as one:
        one.store.pin(HEAL, 0)
        for _ in range(5):
            with joiner(one) as fetcher:
                cancel = Abort()
                waiting = in_thread(lambda: fetcher.means(0, specs_of([values((9,))]), cancel=cancel))  # noqa: B023
                until(lambda: any("heal-a" in name for name in heal_threads()), "the thread of the donor")
                began_s = patience.machine_s()
                cancel.set("enough")
                with pytest.raises(HealFailed):
                    waiting()
                delays_s.append(patience.machine_s() - began_s)
    assert min(delays_s) < 0.1


def test_no_donors_thread_runs_on_after_ctrl_c() -> None:
    """The caller closes its connections, and the next sockets of the process would get their descriptors."""
    state = [values((3,))]
    with donor(leaves=state) as one, joiner(one) as fetcher:
        asked = threading.Event()
        state_of = one.store.state

        def noted(*given: Any, deadline_s: float) -> Any:
            asked.set()
            return state_of(*given, deadline_s=deadline_s)  # the state is never pinned

        one.store.state = noted  # pyright: ignore[reportAttributeAccessIssue]

        serve, serving = fetcher._serve, list[Any]()

        def noted_serve(*given: Any) -> None:
            serving.append(given)
            serve(*given)
            serving.remove(given)

        fetcher._serve = noted_serve  # pyright: ignore[reportAttributeAccessIssue]

        def interrupt_once_asked() -> None:
            assert asked.wait(LONG_S)
            interrupt()

        interrupter = threading.Thread(target=interrupt_once_asked)
        interrupter.start()
        with interrupted():
            fetch_state(fetcher, 0, state)
        assert serving == []
        patience.join(interrupter)


def test_a_cancel_before_the_start() -> None:
    cancel = Abort()
    cancel.set("too late")
    with donor(leaves=[values((3,))]) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 0)
        with pytest.raises(HealFailed, match="superseded: too late"):
            fetch_state(fetcher, 0, [values((3,))], cancel)
        # It is no fault of the donor's.
        assert same_bits(fetch_state(fetcher, 0, [values((3,))]), [values((3,))])


def test_a_connection_that_the_donor_closed_between_two_requests_is_dialled_again() -> None:
    means = [values((4,))]
    with donor(leaves=[values((3,))]) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 0)
        fetch_state(fetcher, 0, [values((3,))])
        one.store.log(0, means)
        kept = fetcher._donors[0].connection
        assert kept is not None
        sock = kept.sock
        sock.shutdown(socket.SHUT_RDWR)
        assert same_bits(fetcher.means(0, specs_of(means), cancel=Abort()), means)


def test_several_joiners_at_once(big: list[np.ndarray]) -> None:
    with donor("a", big) as a, donor("b", big) as b:
        heals = range(10, 14)
        for each in (a, b):
            for heal_id in heals:
                each.store.pin(heal_id, 0)

        def heal(heal_id: int) -> bool:
            with joiner(a, b, heal_id=heal_id, group=f"joiner-{heal_id}") as fetcher:
                return same_bits(fetch_state(fetcher, 0, like(big)), big)

        results = [in_thread(lambda heal_id=heal_id: heal(heal_id)) for heal_id in heals]
        assert all(result() for result in results)


def test_nothing_is_left_behind() -> None:
    def once(*, spoil: bool) -> None:
        state = mixed_state()
        with donor("a", state) as a, donor("b", state) as b, joiner(a, b, ("c", "127.0.0.1:1")) as fetcher:
            for each in (a, b):
                each.store.pin(HEAL, 0)
                if spoil:
                    each.store.release(HEAL)
            if spoil:
                with pytest.raises(HealFailed):
                    fetch_state(fetcher, 0, state)
            else:
                fetch_state(fetcher, 0, state)
        until(lambda: not heal_threads(), "the threads to end")

    once(spoil=False)
    gc.collect()
    before = descriptors()
    for spoil in (False, True, False, True):
        once(spoil=spoil)
    gc.collect()
    assert descriptors() <= before


def test_no_descriptor_is_too_high_for_the_server(tmp_path: Any) -> None:
    """select() would refuse descriptors over 1023."""
    files = []
    try:
        while not files or files[-1].fileno() < 1030:
            files.append((tmp_path / "file").open("w"))
        with donor(leaves=[values((3,))]) as one, joiner(one) as fetcher:
            one.store.pin(HEAL, 0)
            assert same_bits(fetch_state(fetcher, 0, [values((3,))]), [values((3,))])
    except OSError as error:
        pytest.skip(f"too few descriptors are allowed: {error}")
    finally:
        for file in files:
            file.close()


def test_what_a_donor_says_is_quoted_in_part() -> None:
    one = _fetch._Donor(
        _fetch.DonorAt("a", 1, ""), ConnectionRequest("heal", "job", "joiner", 3, "", 0, HEAL)
    )
    one.fail(ValueError("x" * 10_000))
    assert len(one.failed) == 500


# ---- the server's end, request by request ----


def connection(one: Donor) -> Connection:
    sent = ConnectionRequest("heal", "job", "joiner", 3, one.name, one.incarnation, HEAL)
    return dial(one.address, sent, deadline_s=soon(), abort=None)


def answer(sock: Connection, request: Request) -> tuple[str, int, bytes]:
    _stripes.ask(sock, request, soon(), None)
    reply = _stripes.header(sock, soon(), Abort())
    data = bytearray(reply.length)
    assert _stripes._received(sock, reply, memoryview(data), soon(), Abort(), "an answer")
    return reply.status.name, reply.index, bytes(data)


def test_answers() -> None:
    means = [values((MB,), "uint8"), values((100,), "uint8", 1)]
    with donor(leaves=[values((4, 4))], step=6) as one, connection(one) as sock:
        one.store.pin(HEAL, 6)
        one.store.log(6, means)
        status, _, sent = answer(sock, Request(Kind.MANIFEST, HEAL, 6))
        wanted = {"step": 6, "leaves": [[[4, 4], "float32"]], "stripe": [0, 1], "live": True}
        assert (status, json.loads(sent)) == ("OK", wanted)
        assert answer(sock, Request(Kind.STATE, HEAL, 6, 0, 1)) == ("OK", 0, values((4, 4)).tobytes())
        assert answer(sock, Request(Kind.MEANS, HEAL, 6)) == ("OK", 0, b"")
        assert answer(sock, Request(Kind.EDITS, HEAL, 6)) == ("OK", 0, b"")
        assert answer(sock, Request(Kind.MEANS, HEAL, 6, 1, 1))[:2] == ("OK", 1)
        run = blob_of(means)
        wanted = b"".join(run.read(1))
        assert answer(sock, Request(Kind.MEANS, HEAL, 6, 1, 1))[2] == wanted
        assert same_bits(leaves_of(run), means)


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (
            Request(Kind.STATE, HEAL, 6, 0, 2),
            "BAD",
            b"the request is for 2 chunks from chunk 0 on, and there are 1",
        ),
        (Request(Kind.STATE, HEAL, 6, 1, 1), "BAD", b"1 chunks from chunk 1 on"),
        (Request(Kind.STATE, HEAL, 6, 0, 0), "BAD", b"0 chunks"),
        (Request(Kind.STATE, HEAL, 6, 2**32 - 1, 2**32 - 1), "BAD", b"chunks from chunk 4294967295 on"),
        (Request(Kind.STATE, HEAL, 7, 0, 1), "GONE", b"state 6 is kept for heal 5, not state 7"),
        (Request(Kind.MEANS, HEAL, 5, 0, 1), "GONE", b"the means of step 5 are not kept for heal 5"),
        (Request(Kind.MEANS, HEAL, 6, 0, 1), "NOT_YET", b"step 6 is not committed yet"),
        (Request(Kind.MEANS, HEAL, 6), "NOT_YET", b"step 6 is not committed yet"),
        (Request(Kind.EDITS, HEAL, 5), "GONE", b"the means of step 5 are not kept for heal 5"),
        (Request(Kind.MEANS, 8, 6, 0, 1), "GONE", b"not kept for heal 8"),
        (Request(Kind.MANIFEST, 8, 6), "NOT_YET", b"heal 8 is not pinned yet"),
        (Request(Kind.MANIFEST, 2**64 - 1, 2**64 - 1), "NOT_YET", b"not pinned yet"),
    ],
)
def test_answers_to_what_is_not_there(
    request_: Request, status: str, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_server, "LONG_POLL_S", 0.01)
    with donor(leaves=[values((4, 4))], step=6) as one, connection(one) as sock:
        one.store.pin(HEAL, 6)
        got, _, sent = answer(sock, request_)
        assert got == status
        assert text in sent
        assert answer(sock, Request(Kind.STATE, HEAL, 6, 0, 1))[0] == "OK", "the connection stays"
