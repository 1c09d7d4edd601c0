"""A real group and successive coordinators without a store, whose clocks differ."""

import asyncio
import time

import pytest
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.messages import GroupName, Hello, Incarnation, Step, Stripe, Welcome
from jaxft_protocol.replica import machine as core
from jaxft_protocol.replica import state as r

from jaxft._session._session import Session
from tests import patience


class NoPins:
    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: Stripe) -> None: ...

    def release(self, heal_id: int) -> None: ...


IDENTITY = r.Identity("job", GroupName("a"), Incarnation(7), "a:1", "c:1")


def test_a_group_says_which_term_is_the_highest_that_it_has_met():
    replica = r.Replica(IDENTITY, 10.0)
    heard: list[int] = []
    for event in (
        r.Connected(),
        r.Received(Welcome(1000, term=9)),
        r.Disconnected("gone"),
        r.Connected(),
        r.Received(Welcome(1000, term=4)),
        r.Disconnected("of a lower term"),
        r.Connected(),
    ):
        replica, effects = core.step(replica, event, 1.0)
        heard += [e.message.term for e in effects if isinstance(e, r.Send) and isinstance(e.message, Hello)]
    assert heard == [0, 9, 9]


def test_a_clock_that_is_years_behind_keeps_nobody_away(monkeypatch: pytest.MonkeyPatch):
    terms: list[int] = []

    async def life(port: int, unix_s: float, session: Session | None) -> tuple[int, Session]:
        monkeypatch.setattr("jaxft_coordinator.shell._leading.time", _Clock(unix_s))
        server = Server(f"localhost:{port}", Options(join_timeout_s=60.0, founding_wait_s=0.0))
        await server.start()
        if session is None:
            identity = r.Identity("job", GroupName("a"), Incarnation(7), "a:1", f"localhost:{server.port}")
            session = Session(identity, NoPins(), failure_timeout_s=60.0)
            await asyncio.to_thread(session.start)
            session.mailbox.post(r.Prepared(Step(0), 0xD, total_shards=1))
        async with asyncio.timeout(patience.FAR_S):
            while (job := server._jobs.get("job")) is None or not job.groups:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        terms.append(job.term)
        await server.stop(0.1)
        return server.port, session

    async def scenario() -> None:
        port, session = await life(0, 2_000_000_000, None)
        try:
            for unix_s in (1_000_000, 2_000_000_001, 0, 2_100_000_000):
                await life(port, unix_s, session)
            assert session.mailbox.replica.failure is None
        finally:
            await asyncio.to_thread(session.close)

    asyncio.run(scenario())
    # Learned at once, even if the clock has not moved; and accepted if the clock is ahead.
    assert terms == [2_000_000_000, 2_000_000_001, 2_000_000_002, 2_000_000_003, 2_100_000_000]


class _Clock:
    """A wrong time of day; the rest of the module `time` is unchanged."""

    def __init__(self, unix_s: float) -> None:
        self._unix_s = unix_s

    def time(self) -> float:
        return self._unix_s

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)
