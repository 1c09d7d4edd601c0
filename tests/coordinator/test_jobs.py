"""All jobs of a coordinator, on a store that the test can hold up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxft_coordinator.shell._jobs import Jobs
from jaxft_coordinator.shell._leading import Leading
from jaxft_protocol.coordinator.job import Close, Effect, Options, Received, Send, SessionClosed, SessionId
from jaxft_protocol.messages import (
    Evicted,
    GroupMessage,
    GroupName,
    Heartbeat,
    Hello,
    Incarnation,
    Join,
    NewQuorum,
    Refused,
    Step,
    Welcome,
)

from tests import patience

from .test_journal import HeldStore, turns


class Desk:
    """Speaks for groups, each in a session with its own number, and notes what comes back."""

    def __init__(self, store: HeldStore, tick_s: float = 3600.0, **options: float) -> None:
        self.told: list[Effect] = []
        self.led = asyncio.Event()
        self._more = asyncio.Event()
        known: Any = {"min_replicas": 1, "founding_wait_s": 0.0, **options}
        self.jobs = Jobs(Options(**known), self)
        self.leading = Leading(self.jobs, store, self, tick_s=tick_s)

    def leads(self) -> None:
        self.led.set()

    def stands_down(self, reason: str) -> None:
        pass

    def sessions_of(self, job: str) -> list[SessionId]:
        return []

    def say(self, session: int, message: GroupMessage) -> None:
        self.jobs.step("job", Received(SessionId(session), message))

    def come(self, session: int, name: str, shards: int = 6) -> None:
        self.say(session, Hello("job", GroupName(name), Incarnation(session), f"{name}:1"))
        self.say(session, Join(Step(0), 0xD1, total_shards=shards))

    def to(self, session: int) -> list[object]:
        return [each.message for each in self.told if isinstance(each, Send) and each.session == session]

    async def is_told(self, session: int, kind: type) -> None:
        while not any(isinstance(message, kind) for message in self.to(session)):
            self._more.clear()
            await self._more.wait()

    def do(self, effects: Sequence[Effect]) -> None:
        self.told += effects
        self._more.set()


def run(scenario: Callable[[HeldStore, Desk], Awaitable[None]], **options: float) -> None:
    async def bounded() -> None:
        store = HeldStore()
        desk = Desk(store, **options)
        leading = asyncio.create_task(desk.leading.run("here:1"))
        try:
            async with asyncio.timeout(patience.FAR_S):
                await desk.led.wait()
                await scenario(store, desk)
        finally:
            leading.cancel()

    asyncio.run(bounded())


def test_what_a_group_says_before_it_hears_that_it_is_out_means_nothing():
    async def scenario(store: HeldStore, desk: Desk) -> None:
        desk.come(1, "a")
        desk.come(2, "b", shards=0)  # its refusal waits behind the record of the founding
        desk.say(2, Heartbeat())
        await turns()
        assert not any(isinstance(each, Close) for each in desk.told)
        store.gate.set()
        await turns()
        assert any(isinstance(message, NewQuorum) for message in desk.to(1))
        assert isinstance(desk.to(2)[-1], Refused)
        assert not any(isinstance(message, Evicted) for message in desk.to(2))
        assert [each.session for each in desk.told if isinstance(each, Close)] == [2]

    run(scenario)


def test_nobody_is_judged_by_a_silence_in_which_nobody_could_be_told_anything():
    """Groups beat once they are welcome, and a welcome waits behind the record that is being written."""

    async def scenario(store: HeldStore, desk: Desk) -> None:
        desk.come(1, "a")
        await asyncio.sleep(0.6)  # three times the timeout
        assert [type(message) for message in desk.to(1)] == [Welcome]
        assert list(desk.jobs.get("job").groups) == ["a"]  # pyright: ignore[reportOptionalMemberAccess]
        store.gate.set()
        await desk.is_told(1, NewQuorum)
        await desk.is_told(1, Evicted)  # now it is silent by itself

    run(scenario, tick_s=0.02, heartbeat_timeout_s=0.2)


def test_of_sessions_that_are_over_nothing_is_kept():
    async def scenario(store: HeldStore, desk: Desk) -> None:
        store.gate.set()
        desk.come(1, "a")
        desk.come(2, "b", shards=0)  # is refused
        await turns()
        desk.say(1, Heartbeat())
        desk.jobs.evict("job", GroupName("a"), "an operator says so")
        await turns()
        for session in (1, 2):
            desk.jobs.step("job", SessionClosed(SessionId(session), "its connection closed"))
        desk.jobs.stand_down()
        desk.come(3, "a")  # comes too late, and is not served
        assert not desk.jobs._heard_s

    run(scenario)
