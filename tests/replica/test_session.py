"""When any part of the session ends, the training thread gets an error from the call that it is in."""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jaxft_coordinator.shell import limits
from jaxft_protocol import messages as m
from jaxft_protocol import values
from jaxft_protocol.replica.state import Applied, Failure, FailureKind, Identity, LeaveNow, Prepared

import jaxft
from jaxft._errors import SessionFailed
from jaxft._session import _mailbox
from jaxft._session._credentials import Credentials
from jaxft._session._session import Session, error_of
from jaxft._transport._sockets import Abort
from tests import patience
from tests.replica.scripted import Coordinator, coordinating


class Broken(Exception):
    """An error that no code of jaxft expects."""


class Pins:
    """Stores nothing; `on_release` is called in the session's thread."""

    def __init__(self, on_release: Callable[[], None] = lambda: None) -> None:
        self._on_release = on_release

    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: m.Stripe) -> None:
        pass

    def release(self, _heal_id: int) -> None:
        self._on_release()


def breaks() -> None:
    raise Broken("the store is broken")


@contextlib.contextmanager
def session_with(
    coordinator: Coordinator,
    on_release: Callable[[], None] = lambda: None,
    *,
    started: bool = True,
    credentials: Any = None,
    failure_timeout_s: float = 600.0,
) -> Iterator[Session]:
    address = f"localhost:{coordinator.port}"
    identity = Identity("job", m.GroupName("g"), m.Incarnation(7), "g:1", address)
    session = Session(
        identity,
        Pins(on_release),
        failure_timeout_s=failure_timeout_s,
        credentials=credentials or Credentials(),
    )
    try:
        if started:
            patience.call(session.start)
        yield session
    finally:
        patience.call(session.close)


RELEASE = m.Release(m.HealId(1))

# The calls in which the training thread may wait when the session ends.
WAITS: dict[str, Callable[[Session], object]] = {
    "wait": lambda session: session.mailbox.wait(-1),
    "wait_until_left": lambda session: session.mailbox.wait_until_left(time.monotonic() + 3600.0, None),
}


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with coordinating() as made:
        yield made


def stop_loop(session: Session) -> None:
    session.mailbox.loop.stop()


def computed_nonsense(session: Session) -> None:
    session.mailbox.computed = None  # pyright: ignore[reportAttributeAccessIssue]


def says_what_cannot_be_written(session: Session) -> None:
    session.mailbox.post(Prepared(m.Step(0), 0xD1, {"shards": 3}))  # pyright: ignore[reportArgumentType]


def posts_nonsense(session: Session) -> None:
    session.mailbox.post("nonsense")  # pyright: ignore[reportArgumentType]


# Faults that break the session, each with its error.
FAULTS: dict[str, tuple[Callable[[Session], None], str]] = {
    "the loop is stopped": (stop_loop, "its loop was stopped"),
    "a tick fails": (computed_nonsense, "the event Tick failed with TypeError"),
    "a message cannot be written": (says_what_cannot_be_written, "its task 'writer' failed with TypeError"),
    "an event fails": (posts_nonsense, "the event str failed with IllegalEvent: str is not an event"),
}


@pytest.mark.parametrize("way", WAITS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_ends_a_part_of_the_session_ends_each_wait(
    coordinator: Coordinator, way: str, fault: str
) -> None:
    break_it, text = FAULTS[fault]
    with session_with(coordinator) as session:
        waiting = threading.Timer(0.05, break_it, (session,))
        waiting.start()
        with pytest.raises(SessionFailed, match=f"session of group 'g' of job 'job' .*{text}"):
            patience.call(lambda: WAITS[way](session), limit_s=15.0)


@pytest.mark.parametrize("way", WAITS)
@pytest.mark.parametrize("error", [Broken("the store is broken"), SystemExit(3), MemoryError()])
def test_an_error_behind_a_message_of_the_coordinator_is_the_cause(
    coordinator: Coordinator, way: str, error: BaseException
) -> None:
    def on_release() -> None:
        raise error

    with session_with(coordinator, on_release) as session:
        coordinator.say(RELEASE)
        with pytest.raises(SessionFailed) as caught:
            patience.call(lambda: WAITS[way](session), limit_s=15.0)
        assert caught.value.__cause__ is error
        assert "Restart the group: it heals from the others" in str(caught.value)


def test_each_later_call_says_it_again(coordinator: Coordinator) -> None:
    with session_with(coordinator, breaks) as session:
        coordinator.say(RELEASE)
        for call in (
            lambda: session.mailbox.wait(-1),
            lambda: session.mailbox.wait(5),
            lambda: session.mailbox.wait_until_left(time.monotonic() + 1.0, None),
            lambda: session.mailbox.post(LeaveNow(finished=True)),
        ):
            with pytest.raises(SessionFailed, match="Broken: the store is broken"):
                patience.call(call, limit_s=15.0)


def test_a_stream_that_cannot_be_opened_ends_the_start(coordinator: Coordinator) -> None:
    class NoChannels(Credentials):
        def channel(self, _address: str, _options: object) -> Any:
            raise Broken("no channel")

    with session_with(coordinator, started=False, credentials=NoChannels()) as session:
        with pytest.raises(SessionFailed, match="its task 'stream' failed with Broken: no channel"):
            patience.call(session.start, limit_s=15.0)


def test_what_is_no_message_ends_the_stream_and_another_is_dialled(coordinator: Coordinator) -> None:
    with session_with(coordinator):
        for opened, data in enumerate((b"\xff\xff\xff", b"\x0a\x80", b"\x00"), start=1):
            assert coordinator.opened == opened
            coordinator.say(data)
            patience.until(lambda opened=opened: coordinator.opened > opened, "another stream")


def test_what_the_coordinator_may_not_say_ends_the_stream_and_another_is_dialled(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with session_with(coordinator) as session:
        coordinator.say(m.Commit(m.QuorumId(1), m.Step(0)))
        patience.until(lambda: coordinator.opened > 1, "another stream")
        assert not session.mailbox.is_over
    (record,) = [each for each in caplog.records if "ends the stream" in each.message]
    assert record.levelno == logging.WARNING
    assert "that is not allowed now: Commit is illegal while the group is present" in record.message


def test_what_the_training_thread_may_not_do_ends_the_session(coordinator: Coordinator) -> None:
    with session_with(coordinator) as session:
        session.mailbox.post(Applied(m.Step(1)))
        with pytest.raises(SessionFailed, match="Applied failed with IllegalEvent: Applied is illegal while"):
            patience.call(lambda: session.mailbox.wait(-1))


def test_the_largest_quorum_arrives(coordinator: Coordinator) -> None:
    """Of as many groups as a coordinator serves, with the longest addresses."""
    members = tuple(
        m.Member(m.GroupName(f"g-{number}"), m.Incarnation(7), "a" * limits.MAX_ADDRESS_LENGTH, (number,))
        for number in range(limits.MAX_GROUPS_PER_JOB)
    )
    coordinator.heartbeat_interval_ms = 60_000  # a busy machine may take long to encode and to parse it
    with session_with(coordinator) as session:
        session.mailbox.post(Prepared(m.Step(0), 0xD1))
        coordinator.say(m.NewQuorum(m.QuorumId(1), m.Step(0), len(members), members))
        patience.until(lambda: session.mailbox.quorum is not None or coordinator.opened > 1, "the quorum")
        assert session.mailbox.quorum is not None
        assert session.mailbox.quorum.members == members


@pytest.mark.parametrize("kind", FailureKind)
def test_each_failure_has_an_error_of_its_own(kind: FailureKind) -> None:
    error = error_of(Failure(kind, "why"))
    assert type(error).__name__.lower() == kind.value.replace(" ", "")
    assert str(error) == "why"


def test_the_coordinator_hears_at_once_that_the_session_is_over(coordinator: Coordinator) -> None:
    with session_with(coordinator, breaks) as session:
        coordinator.say(RELEASE)
        patience.until(lambda: coordinator.ended == 1, "the end of the stream", limit_s=15.0)
        with pytest.raises(SessionFailed):
            patience.call(lambda: session.mailbox.wait(-1))


def test_work_under_way_is_told_to_stop_and_none_begins(coordinator: Coordinator) -> None:
    with session_with(coordinator, breaks) as session:
        directive = session.mailbox._directive  # the directive after the welcome: still current
        with session.mailbox.activity(directive, Abort()) as abort:
            assert not abort.is_set
            coordinator.say(RELEASE)
            patience.until(lambda: abort.is_set, "the abort", limit_s=15.0)
            assert "the store is broken" in abort.reason
        with session.mailbox.activity(directive, Abort()) as abort:
            assert "the store is broken" in abort.reason


def test_a_loop_that_is_stuck_is_found(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mailbox, "LOOK_S", 0.05)
    let_go = threading.Event()

    def never_returns() -> None:
        # Not before: it is also the time that the session has to connect.
        session.mailbox._replica = dataclasses.replace(session.mailbox._replica, failure_timeout_s=1.0)
        let_go.wait()

    with session_with(coordinator, never_returns) as session:
        coordinator.say(RELEASE)
        try:
            with pytest.raises(
                SessionFailed, match=r"made no progress for .* stands at .*threading.py:\d+ in wait"
            ):
                patience.call(lambda: session.mailbox.wait(-1), limit_s=15.0)
        finally:
            let_go.set()


def until_it_says(
    text: str, wait: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> threading.Thread:
    """Return the thread in which `wait` has logged the text; it ends with the session."""

    def run() -> None:
        with contextlib.suppress(jaxft.JaxftError):
            wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    patience.until(lambda: text in caplog.text, f"{text!r} in the log", context=lambda: caplog.text)
    return thread


def test_a_long_wait_says_for_whom(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(values, "SLOW_WAIT_S", 0.05)
    monkeypatch.setattr(_mailbox, "LOOK_S", 0.02)
    caplog.set_level(logging.INFO, "jaxft")
    coordinator.silent = True
    with session_with(coordinator, started=False) as session:
        text = f"s for the coordinator localhost:{coordinator.port} (connecting)"
        waiting = until_it_says(text, session.start, caplog)
    patience.join(waiting)
    # Python shows a warning even if the program configures no logging.
    assert {record.levelname for record in caplog.records if text in record.getMessage()} == {"WARNING"}
    coordinator.silent = False
    for wait in WAITS.values():
        with session_with(coordinator) as session:
            coordinator.say(m.Waiting("more groups"))
            caplog.clear()
            waiting = until_it_says("s for more groups", lambda: wait(session), caplog)  # noqa: B023
        patience.join(waiting)


def test_a_group_is_stranded_once_it_has_waited_for_a_while_and_while_no_donor_is_there(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.frontier_step = m.Step(9)
    with session_with(coordinator) as session:
        session.mailbox.post(Prepared(m.Step(0), 0xD1))
        monkeypatch.setattr(values, "SLOW_WAIT_S", 0.05)
        patience.until(lambda: session.mailbox.stranded, "nothing that holds the state")
        monkeypatch.setattr(values, "SLOW_WAIT_S", 3600.0)
        assert not session.mailbox.stranded
        monkeypatch.setattr(values, "SLOW_WAIT_S", 0.0)
        assert session.mailbox.stranded
        coordinator.say(m.Waiting("a donor", held=True))
        patience.until(lambda: not session.mailbox.stranded, "the donor")


def test_each_task_of_the_loop_may_be_cancelled_and_none_of_them_in_silence(coordinator: Coordinator) -> None:
    """If any task in the loop ends, including gRPC's, the stream is reconnected or the session ends."""
    coordinator.mute = True  # so that a stream on which gRPC reports nothing any more is noticed
    killed: set[str] = set()
    while True:
        opened = coordinator.opened
        with session_with(coordinator) as session:
            victims = [task for task in tasks_of(session) if task.get_coro().__qualname__ not in killed]
            if not victims:
                break
            killed.add(victims[0].get_coro().__qualname__)
            session.mailbox.loop.call(victims[0].cancel)
            patience.until(
                lambda opened=opened: session.mailbox.is_over or coordinator.opened > opened + 1,
                f"word of the end of {victims[0]}",
                limit_s=15.0,
            )
    assert {
        "Session._tick_forever",
        "Session._connect",
        "Stream._write",
        "LoopThread._count_turns",
    } <= killed


def tasks_of(session: Session) -> list[asyncio.Task[Any]]:
    return sorted(
        asyncio.all_tasks(session.mailbox.loop._loop), key=lambda task: task.get_coro().__qualname__
    )


# ---- the user's side ----


def manager(coordinator: Coordinator) -> jaxft.Manager:
    network = jaxft.Network(host="localhost")
    return jaxft.Manager(f"localhost:{coordinator.port}", group="g", job="job", network=network)


def test_the_manager_raises_it_where_the_block_ends(coordinator: Coordinator) -> None:
    def train() -> None:
        with manager(coordinator) as entered:
            assert entered._member.dials is not None
            stop_loop(entered._member.dials)

    with pytest.raises(SessionFailed, match="its loop was stopped"):
        patience.call(train, limit_s=15.0)


def test_an_error_that_ends_the_block_is_not_replaced(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with manager(coordinator) as entered:
            assert entered._member.dials is not None
            stop_loop(entered._member.dials)
            raise Broken("the user's own")

    with pytest.raises(Broken, match="the user's own"):
        patience.call(train, limit_s=15.0)
    assert "could not take its leave" in caplog.text


def test_a_step_after_the_block_is_an_error_and_does_not_wait(coordinator: Coordinator) -> None:
    with manager(coordinator) as entered:
        session = entered._member.dials
        raising = pytest.raises(jaxft.ConfigurationError, match="`with` block has ended")
    assert session is not None
    with raising:
        patience.call(lambda: session.mailbox.wait(-1), limit_s=15.0)
    with pytest.raises(jaxft.ConfigurationError, match="`with` block has ended"):
        session.mailbox.post(LeaveNow(finished=True))


# ---- several sessions in one process ----


def test_what_grpc_passes_to_a_loop_that_is_closed_is_ignored(coordinator: Coordinator) -> None:
    """As the loop of another session does, which would print "Event loop is closed"."""
    with session_with(coordinator) as session:
        pass
    called: list[int] = []
    loop = session.mailbox.loop._loop
    assert loop.is_closed()
    assert loop.call_soon_threadsafe(called.append, 1).cancelled()
    with pytest.raises(RuntimeError, match="the loop is closed"):
        session.mailbox.loop.call(called.append, 2)
    assert called == []
