"""Rank 0 and another rank over a real connection, in one process: decisions, verdicts, and their ends."""

import contextlib
import dataclasses
import logging
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol import values
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft_protocol.replica import state as r
from jaxft_protocol.wire import WireError

from jaxft._base import _ending
from jaxft._errors import SessionFailed
from jaxft._ranks import _leader, _link, _outside
from jaxft._ranks._directives import decode, encode
from jaxft._ranks._follower import Follower, Place
from jaxft._ranks._leader import Leader
from jaxft._ranks._link import Life, Link, Silence, Traffic, leader_message, rank_message
from jaxft._ranks._ranks import OneRank, Operation, Settled
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort
from tests import patience
from tests.exchange.lanes import built
from tests.shortages import no_thread_at_first

MEMBER = m.Member(m.GroupName("a"), m.Incarnation(7), "h:1,h:2", (0, 1))
QUORUM = m.NewQuorum(m.QuorumId(3), m.Step(5), 2, (MEMBER,))
HEAL = m.Heal(m.HealId(9), m.Step(5), (MEMBER,))
KEYS = {"outgoing": bytes(range(32)), "incoming": bytes(range(32, 64))}


@dataclass
class Kept:
    """The calls of a follower's store, and the follower's address."""

    address: str = "h:2"
    calls: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])

    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: m.Stripe) -> None:
        self.calls.append(("pin", heal_id, step, log_only, stripe))

    def release(self, heal_id: int) -> None:
        self.calls.append(("release", heal_id))


@dataclass
class Pair:
    leader: Leader
    follower: Follower
    kept: Kept


def follower_on(connection: Connection, pins: Kept) -> Follower:
    return Follower(connection, Place(1, 2, pins.address), pins, Silence(patience.FAR_S), name="a")


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    one, two = socket.socketpair()
    if request.param:
        ends = (
            Connection.sealed(one, **KEYS),
            Connection.sealed(two, outgoing=KEYS["incoming"], incoming=KEYS["outgoing"]),
        )
    else:
        ends = Connection.plain(one), Connection.plain(two)
    leader = Leader([ends[0]], silence_s=patience.FAR_S, stuck_s=patience.FAR_S, name="a")
    leader.start()
    kept = Kept()
    follower = follower_on(ends[1], kept)
    made = Pair(leader, follower, kept)
    yield made
    closing = threading.Thread(target=leader.close)
    closing.start()
    follower.close()
    closing.join()


@pytest.mark.parametrize(
    "directive",
    [
        r.Attempt(QUORUM, m.Step(5)),
        r.Apply(m.QuorumId(3), m.Step(5)),
        r.HealFrom(HEAL),
        r.Replay(HEAL, m.Step(6), m.Step(8)),
        r.TakeDigest(m.Step(4)),
        r.TakeDigest(m.Step(0)),
        r.ReadCheckpoint(),
        r.Over(m.Step(0)),
        r.Fail(r.Failure(r.FailureKind.DIVERGED, "the states differ")),
    ],
)
def test_a_directive_arrives_as_it_was_sent(directive: r.Directive) -> None:
    assert decode(encode(directive)) == directive


def test_a_wait_is_not_sent() -> None:
    with pytest.raises(AssertionError, match="not for the training thread"):
        encode(r.Wait("nothing"))


def test_an_unknown_directive_is_refused() -> None:
    message = encode(r.Fail(r.Failure(r.FailureKind.DIVERGED, "")))
    message.fail.kind = "MOON"
    with pytest.raises(WireError, match="unknown kind 'MOON'"):
        decode(message)


def test_an_order_that_cannot_be_decoded_is_the_error_of_the_training_thread(pair: Pair) -> None:
    pair.leader.direct(r.TakeDigest(m.Step(1)))
    message = pb.LeaderMessage(directive=encode(r.Fail(r.Failure(r.FailureKind.DIVERGED, ""))))
    message.directive.fail.kind = "MOON"
    pair.leader._send(message)
    assert pair.follower.wait(0) == (1, r.TakeDigest(m.Step(1)))
    with pytest.raises(WireError, match="unknown kind 'MOON'"):
        pair.follower.wait(1)


def test_what_another_rank_moves_counts_while_rank_0_computes_with_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_link, "BEAT_S", 0.01)
    moved = threading.Semaphore(0)
    pair.leader.on_progress = moved.release
    pair.leader.awaits_others(now=True)
    pair.follower.got_on()
    assert moved.acquire(timeout=patience.FAR_S)
    pair.leader.awaits_others(now=False)
    pair.follower.got_on()
    patience.until(lambda: pair.leader._core.ranks[0].progress == 2, "its progress")
    assert not moved.acquire(blocking=False)


def test_the_leader_learns_the_addresses_of_the_others(pair: Pair) -> None:
    assert pair.leader.addresses(patience.LIMIT_S) == ["h:2"]


def test_a_rank_that_tells_no_address_is_named() -> None:
    one, two = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(two):
        leader = Leader([Connection.plain(one)], silence_s=1.0, stuck_s=1.0, name="a")
        with pytest.raises(TimeoutError, match="rank 1 has not sent its address"):
            leader.addresses(0.0)


def test_directives_and_decisions_come_in_order(pair: Pair) -> None:
    pair.leader.direct(r.TakeDigest(m.Step(1)))
    assert pair.leader.decide("go on", value=True)
    assert not pair.leader.decide("go on", value=False)
    assert pair.follower.wait(0) == (1, r.TakeDigest(m.Step(1)))
    assert [pair.follower.decide("go on", value=True) for _ in range(2)] == [True, False]


def test_ranks_at_different_decisions_have_come_apart(pair: Pair) -> None:
    pair.leader.decide("go on", value=True)
    with pytest.raises(SessionFailed, match=r"come apart: the decision about 'go on'.*at 'exchange'"):
        pair.follower.decide("exchange", value=True)


def test_rank_0_chooses_for_all(pair: Pair) -> None:
    assert pair.leader.choose("the checkpoint", 1 << 62) == 1 << 62
    assert pair.follower.choose("the checkpoint", 5) == 1 << 62
    pair.leader.choose("the checkpoint", 3)
    with pytest.raises(SessionFailed, match=r"come apart: the decision about 'the checkpoint'.*at 'go on'"):
        pair.follower.decide("go on", value=True)


def test_a_save_begins_and_ends_in_all_ranks(pair: Pair) -> None:
    for number, failure in enumerate(["", "OSError: full"], 1):
        assert pair.leader.save_begins(number, f".unfinished-{number}") == f".unfinished-{number}"
        assert pair.follower.save_begins(number, "") == f".unfinished-{number}"
        assert pair.follower.save_ends(number, failure) == ()
        failures = [f"rank 1: {failure}"] if failure else []
        assert pair.leader.save_ends(number, "") == failures
    pair.follower.save_ends(3, "its own")
    assert pair.leader.save_ends(3, "mine") == ["mine", "rank 1: its own"]


def test_a_wait_for_a_rank_that_writes_is_logged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(values, "SLOW_WAIT_S", 0.0)
    with caplog.at_level(logging.INFO, "jaxft"), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.leader.save_ends, 1, "")
        patience.until(lambda: "s for rank 1 to write" in caplog.text, "the wait to be logged")
        pair.follower.save_ends(1, "")
        assert waiting.result() == []


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long waits are logged soon. For the pair, ask for this fixture before it."""
    monkeypatch.setattr(_link, "BEAT_S", 0.01)
    monkeypatch.setattr(_outside, "SLOW_WAIT_S", 0.05)


@pytest.mark.usefixtures("soon")
def test_a_rank_that_is_outside_of_the_step_while_rank_0_waits_is_named_with_where_it_stands(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.leader.decide("go on", value=True)
    patience.until(lambda: "[jaxft a] rank 1 has been outside" in caplog.text, "rank 1 to be named")
    patience.until(lambda: len(logged(caplog)) >= 2, "both ranks to say so")
    for text in logged(caplog)[:2]:
        assert re.search(
            r"rank 1 has been outside of the step for \d+ s, and rank 0 has waited for it in the step for \d+ s. "
            r"Its program stands at .+:\d+ in .+, called from .+:\d+ in .+. If that is a computation of all ranks",
            text,
        )
    with pair.follower.in_step(now=True):
        seen = len(logged(caplog))
        assert pair.follower.decide("go on", value=True)
        pair.leader.decide("go on", value=True)  # is not taken, but this rank is in the step
        beats_pass(pair)
        assert len(logged(caplog)) <= seen + 1  # one may have been under way
        assert pair.follower.decide("go on", value=True)


@pytest.mark.usefixtures("soon")
def test_rank_0_says_where_it_stands_while_another_rank_waits_for_it_in_the_step(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.follower.wait, 0)
        patience.until(lambda: logged(caplog), "rank 0 to say so")
        text = logged(caplog)[0]
        assert text.startswith("[jaxft a] rank 0 has been outside of the step for ")
        assert ", and rank 1 has waited for it in the step for 0 s. Its program stands at " in text
        pair.leader.direct(r.TakeDigest(m.Step(4)))
        assert waiting.result()[1] == r.TakeDigest(m.Step(4))


@pytest.mark.usefixtures("soon")
def test_a_rank_says_nothing_while_both_are_in_the_step_or_rank_0_has_left(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as pool, pair.leader.in_step(now=True):
        waiting = pool.submit(pair.follower.wait, 0)
        beats_pass(pair)
        pair.leader.direct(r.TakeDigest(m.Step(4)))
        waiting.result()
        beats_pass(pair)  # the last beats of the wait are still under way
    pair.leader.left()
    patience.until(lambda: pair.follower._core.orders, "the order")
    beats_pass(pair)
    assert not logged(caplog)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "outside of the step" in each.getMessage()]


def beats_pass(pair: Pair) -> None:
    """Twenty of the follower's, which are many times the shortest wait that is logged."""
    seen: list[object] = []
    hear = pair.leader._look_outside
    pair.leader._look_outside = lambda *beat: (seen.append(beat), hear(*beat))[1]
    patience.until(lambda: len(seen) >= 20, "beats")


def test_a_rank_that_ends_before_it_has_written_ends_the_save(pair: Pair) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(pair.leader.save_ends, 1, "")
        closing = pool.submit(pair.follower.close)
        with pytest.raises(
            SessionFailed, match="Rank 1 of this group has ended before its part of a checkpoint was written"
        ):
            waiting.result()
        pair.leader.close()
        closing.result()


@pytest.mark.parametrize(
    "settled", [Settled(done=True), Settled(r.Failure(r.FailureKind.DIVERGED, "halted")), Settled()]
)
def test_a_rank_that_has_raised_learns_what_became_of_the_step(pair: Pair, settled: Settled) -> None:
    heard: list[tuple[object, ...]] = []

    def on_raised(*report: object) -> Settled:
        heard.append(report)
        return settled

    pair.leader.on_raised = on_raised
    assert pair.follower.report_raised(m.Step(5), "OSError: gone", 2, timeout_s=patience.FAR_S) == settled
    assert pair.follower.report_raised(m.Step(6), "KeyError", None, timeout_s=patience.FAR_S) == settled
    assert heard == [(5, "OSError: gone (in rank 1)", 2), (6, "KeyError (in rank 1)", None)]


def test_a_rank_that_has_raised_gets_an_answer_although_the_report_fails(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def on_raised(*_report: object) -> Settled:
        raise RuntimeError("a bug")

    pair.leader.on_raised = on_raised
    assert pair.follower.report_raised(m.Step(5), "OSError: gone", 2, timeout_s=patience.FAR_S) == Settled()
    assert "could not report the error of rank 1" in caplog.text


def test_a_moment_without_room_for_a_thread_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = no_thread_at_first(monkeypatch)
    ends = socket.socketpair()
    leader = Leader([Connection.plain(ends[0])], silence_s=patience.FAR_S, stuck_s=patience.FAR_S, name="a")
    leader.start()
    leader.on_raised = lambda *_: Settled(done=True)
    follower = follower_on(Connection.plain(ends[1]), Kept())
    assert follower.report_raised(m.Step(5), "OSError: gone", 2, timeout_s=patience.FAR_S) == Settled(
        done=True
    )
    assert refused == {"jaxft-rank-0", "jaxft-rank-1", "jaxft-raised-1"}
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(leader.close)
        follower.close()
        closing.result()


def settle_both(pair: Pair, ours: tuple[str, tuple[str, ...], str], theirs: tuple[str, tuple[str, ...], str]):
    def follow():
        with pair.follower.operation("exchange", Abort()) as operation:
            return operation.settle(*theirs)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(follow)
        with pair.leader.operation("exchange", Abort()) as operation:
            verdict = operation.settle(*ours)
        assert other.result() == verdict
    return verdict


def test_an_operation_succeeds_only_in_all_ranks(pair: Pair) -> None:
    assert settle_both(pair, ("", (), ""), ("", (), "")).ok
    verdict = settle_both(pair, ("", (), ""), ("its link broke", ("b",), ""))
    assert (verdict.failure, verdict.accused, verdict.stopped) == ("its link broke", ("b",), False)
    verdict = settle_both(pair, ("mine broke", ("c",), ""), ("its link broke", ("b",), ""))
    assert verdict.accused == ("b", "c")
    assert settle_both(pair, ("", (), "w is nan"), ("", (), "b is inf")).note == "w is nan"
    assert settle_both(pair, ("", (), ""), ("", (), "b is inf")).note == "b is inf"


def test_a_rank_that_fails_stops_the_leader(pair: Pair) -> None:
    abort = Abort()

    def fail():
        with pair.follower.operation("exchange", Abort()) as operation:
            return operation.settle("its link broke", ("b",))

    with ThreadPoolExecutor(1) as pool, pair.leader.operation("exchange", abort) as operation:
        pool.submit(fail)
        patience.until(lambda: abort.is_set, "the leader to be stopped")
        verdict = operation.settle("aborted")
    assert (verdict.failure, verdict.accused, verdict.stopped) == ("its link broke", ("b",), False)


def test_a_failure_before_the_leader_has_begun_is_not_missed(pair: Pair) -> None:
    def fail():
        with pair.follower.operation("exchange", Abort()) as operation:
            return operation.settle("its link broke")

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        patience.until(lambda: pair.leader._core.ranks[0].outcomes, "the failure to arrive")
        abort = Abort()
        with pair.leader.operation("exchange", abort) as operation:
            assert abort.is_set
            operation.settle("aborted")
        assert not failing.result().ok


def test_the_leader_stops_the_others(pair: Pair) -> None:
    abort = Abort()
    with ThreadPoolExecutor(1) as pool, pair.follower.operation("heal", abort) as operation:

        def lead():
            directed = Abort()
            directed.set("a newer directive")
            with pair.leader.operation("heal", directed) as led:
                return led.settle("aborted")

        leading = pool.submit(lead)
        patience.until(lambda: abort.is_set, "the follower to be stopped")
        verdict = operation.settle("aborted too")
        assert verdict.stopped
        assert leading.result() == verdict


def test_the_leader_stops_the_others_also_when_it_has_its_own_part(pair: Pair) -> None:
    abort, directed = Abort(), Abort()

    def lead():
        with pair.leader.operation("exchange", directed) as led:
            return led.settle()

    with ThreadPoolExecutor(1) as pool, pair.follower.operation("exchange", abort) as operation:
        leading = pool.submit(lead)
        directed.set("a newer directive")
        patience.until(lambda: abort.is_set, "the follower to be stopped")
        verdict = operation.settle("aborted")
        assert (verdict.ok, verdict.stopped) == (False, True)
        assert leading.result() == verdict


def test_pins_overtake_what_the_training_thread_does(pair: Pair) -> None:
    pair.leader.pin(4, 7, log_only=True, stripe=m.Stripe(1, 3))
    pair.leader.release(4)
    pair.leader.all_computed(3, 5)
    patience.until(lambda: pair.follower.all_computed == (3, 5), "the message")
    assert pair.kept.calls == [("pin", 4, 7, True, m.Stripe(1, 3)), ("release", 4)]


def test_a_rank_whose_loop_ends_early_is_named(pair: Pair) -> None:
    ending = threading.Thread(target=pair.follower.close)
    ending.start()
    with (
        pytest.raises(SessionFailed, match="Rank 1 of this group has ended, while rank 0 is at 'exchange#1'"),
        pair.leader.operation("exchange", Abort()) as operation,
    ):
        operation.settle()
    pair.leader.close()
    ending.join()


def test_a_leader_that_ends_early_is_named(pair: Pair) -> None:
    ending = threading.Thread(target=pair.leader.close)
    ending.start()
    with pytest.raises(SessionFailed, match="Rank 0 of group 'a' has ended, while rank 1 waits for"):
        pair.follower.wait(0)
    pair.follower.close()
    ending.join()


def test_the_last_digests_are_taken_by_all_until_the_group_has_left(pair: Pair) -> None:
    pair.leader.direct(r.TakeDigest(m.Step(3)))
    pair.leader.left()
    assert pair.follower.wait_until_left(0.0, None) == 3
    assert pair.follower.wait_until_left(0.0, None) is None


def test_another_directive_after_the_end_of_the_loop_is_an_error(pair: Pair) -> None:
    pair.leader.direct(r.Attempt(QUORUM, m.Step(5)))
    with pytest.raises(SessionFailed, match="loop has ended, but rank 0 continues with Attempt"):
        pair.follower.wait_until_left(0.0, None)


class Exits:
    """Takes the place of the end of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statuses: list[int] = []
        self.happened = threading.Event()
        monkeypatch.setattr(_ending.os, "_exit", self._exit)
        monkeypatch.setattr(_ending.logging, "shutdown", lambda: None)

    def _exit(self, status: int) -> None:
        self.statuses.append(status)
        self.happened.set()


def lonely(silence_s: float, first_s: float = 0.0) -> tuple[Link, Connection]:
    one, two = socket.socketpair()
    link = Link(
        Connection.plain(one),
        Traffic(leader_message, lambda _: None, bytes),
        Silence(silence_s, first_s),
        other=0,
        name="a",
    )
    link.start()
    return link, Connection.plain(two)


def test_a_lost_rank_ends_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exits = Exits(monkeypatch)
    _, other = lonely(patience.FAR_S)
    other.close()
    assert exits.happened.wait(patience.FAR_S)
    assert exits.statuses[0] == 75
    assert "a group shares fate: rank 0 is lost" in caplog.text


def test_a_collective_that_fails_after_another_ranks_error_ends_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not end with its own error, and status 1, if the other process is gone before the grace is over."""
    exits = Exits(monkeypatch)
    # The timer that ends this process in any case does not do it here.
    monkeypatch.setattr(
        _link.threading, "Timer", lambda _delay_s, _run, _values: threading.Thread(target=int)
    )
    link, other = lonely(patience.FAR_S)
    link.expect_end("ConfigurationError")
    link.await_loss(patience.FAR_S)
    assert exits.statuses == [75]
    assert "it ended with ConfigurationError" in caplog.text
    link.close()
    other.close()


def test_a_silent_rank_ends_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exits = Exits(monkeypatch)
    _, other = lonely(0.2)
    assert exits.happened.wait(patience.FAR_S)
    assert "rank 0 is lost (silent for 0.2 s)" in caplog.text
    other.close()


# PyDLL keeps the lock during the call, as `json.loads` of a long text does.
HOLDS_THE_LOCK = """
import ctypes, socket, sys, threading
from pathlib import Path
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft._exchange._compiled import Library
from jaxft._ranks._link import Life, Link, Silence, Traffic, leader_message
from jaxft._transport._seals import Connection

beats, lives = (Connection.plain(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
Link(
    beats,
    Traffic(leader_message, lambda message: None, pb.RankMessage(beat=pb.Beat()).SerializeToString),
    Silence(1.0, 60.0),
    life=Life(lives, Library.load(Path(sys.argv[3])).live),
    other=0,
    name="a",
).start()
sys.stdin.readline()
ctypes.PyDLL(None).sleep(4)
print("held the lock", flush=True)
threading.Event().wait()
"""


@pytest.mark.processes
def test_a_rank_that_holds_pythons_lock_is_kept_and_a_stopped_one_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits = Exits(monkeypatch)
    pairs = [socket.socketpair() for _ in range(2)]
    (beats, _), (lives, _) = pairs
    fds = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-c", HOLDS_THE_LOCK, *map(str, fds), built()]
    beaten = threading.Event()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, pass_fds=fds, **pipes) as other:
        try:
            link = Link(
                Connection.plain(beats),
                Traffic(
                    rank_message,
                    lambda _: beaten.set(),
                    pb.LeaderMessage(beat=pb.Beat()).SerializeToString,
                ),
                Silence(1.5, patience.FAR_S),
                life=Life(Connection.plain(lives), None),
                other=1,
                name="a",
            )
            link.start()
            assert beaten.wait(patience.FAR_S)
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(b"\n")
            assert other.stdout.readline() == b"held the lock\n"
            assert not exits.happened.is_set()
            other.send_signal(signal.SIGSTOP)
            assert exits.happened.wait(patience.FAR_S)
            assert exits.statuses[0] == 75
        finally:
            other.kill()
    for each in (*pairs[0], *pairs[1]):
        each.close()


def test_a_rank_may_take_longer_to_its_first_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 sends none before all ranks have come: the slowest of them holds up the others."""
    exits = Exits(monkeypatch)
    _, other = lonely(silence_s=0.1, first_s=0.3)
    assert exits.happened.wait(patience.FAR_S)
    assert "rank 0 is lost (silent for 0.3 s)" in caplog.text
    other.close()
    exits.happened.clear()
    _, other = lonely(silence_s=0.2, first_s=patience.FAR_S)
    message = pb.LeaderMessage(beat=pb.Beat()).SerializeToString()
    header = struct.pack("<I", len(message))
    other.sock.sendall(header + message + other.outgoing.tag(header, message))
    assert exits.happened.wait(patience.FAR_S)
    assert "rank 0 is lost (silent for 0.2 s)" in caplog.text
    other.close()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\xff\xff\xff\xff", "announced a message of 4294967295 bytes"),
        (b"\x01\x00\x00\x00x" + bytes(8), "a message with a wrong tag"),
    ],
)
def test_garbage_ends_this_process_before_memory_is_taken(
    sent: bytes, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exits = Exits(monkeypatch)
    _, other = lonely(patience.FAR_S)
    other.sock.sendall(sent)
    assert exits.happened.wait(patience.FAR_S)
    assert why in caplog.text
    other.close()


def test_a_group_of_one_process_decides_for_itself() -> None:
    one, abort = OneRank(), Abort()
    assert one.decide("go on", value=True)
    assert one.choose("the checkpoint", 5) == 5
    assert one.save_begins(1, "folder") == "folder"
    assert one.save_ends(1, "full") == ["full"]
    assert one.save_ends(2, "") == []
    with one.operation("exchange", abort) as operation:
        assert operation.settle(note="w is nan").note == "w is nan"
        assert not operation.settle("broken", ("b",)).stopped
        abort.set("a newer directive")
        assert operation.settle("broken").stopped


class SetClock:
    """In place of a module's `time`: it stands until the test sets it, and counts how often it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reads = 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now_s

    def until_read(self) -> None:
        """Wait until it has been read, and its time has been used."""
        before = self.reads
        patience.until(lambda: self.reads > before + 1, "two looks at the clock")


def test_a_rank_that_is_stuck_ends_the_group_and_one_that_gets_on_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exits, clock = Exits(monkeypatch), SetClock()
    monkeypatch.setattr(_leader, "time", clock)
    monkeypatch.setattr(_leader, "_LOOK_S", 0.01)
    monkeypatch.setattr(_link, "BEAT_S", 0.01)
    one, two = socket.socketpair()
    leader = Leader([Connection.plain(one)], silence_s=patience.FAR_S, stuck_s=3.0, name="a")
    leader.start()
    follower = follower_on(Connection.plain(two), Kept())
    moved: list[int] = []
    leader.on_progress = lambda: moved.append(1)
    with follower.operation("exchange", Abort()), leader.operation("exchange", Abort()) as operation:
        waits = threading.Thread(target=_settled, args=(operation,))
        waits.start()
        for count in range(1, 4):
            follower.got_on()
            patience.until(lambda count=count: leader._core.ranks[0].progress == count, "its progress")
            clock.until_read()
            clock.now_s += 2.9  # in all, much longer than it may be stuck
            clock.until_read()
        assert not exits.statuses
        assert len(moved) >= 2  # so the job waits for the group
        clock.now_s += 0.2
        assert exits.happened.wait(patience.FAR_S)
    assert exits.statuses == [75]
    assert "no progress in 'exchange#1'" in caplog.text
    waits.join()
    ending = threading.Thread(target=leader.close)
    ending.start()
    follower.close()
    ending.join()


def _settled(operation: Operation) -> None:
    with contextlib.suppress(AssertionError):  # here the process does not end
        operation.settle()


def test_a_rank_that_is_told_to_leave_has_rank_0_leave_for_the_group(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_link, "BEAT_S", 0.01)
    asked, beaten = threading.Event(), threading.Semaphore(0)
    hear = pair.leader._hear

    def counted(rank: int, message: pb.RankMessage) -> None:
        hear(rank, message)
        beaten.release()

    link = pair.leader._links[0]
    monkeypatch.setattr(link, "_traffic", dataclasses.replace(link._traffic, handle=partial(counted, 1)))
    pair.leader.on_drain = asked.set
    for _ in range(3):
        assert beaten.acquire(timeout=patience.FAR_S)
    assert not asked.is_set()
    pair.follower.drain()
    assert asked.wait(patience.FAR_S)
