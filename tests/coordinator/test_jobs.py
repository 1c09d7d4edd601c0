"""All jobs of a coordinator, on a store that the test can hold up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jaxft_coordinator._jobs import Jobs
from jaxft_coordinator.core.job import Close, Effect, GroupSaid, Options, Send, SessionId
from jaxft_coordinator.core.messages import (
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
)

from .test_journal import HeldStore, turns


class Desk:
    """Speaks for groups, each in a session of its own number, and notes what is told."""

    def __init__(self, store: HeldStore) -> None:
        self.told: list[Effect] = []
        self.leads = asyncio.Event()
        self.jobs = Jobs(
            Options(min_replicas=1),
            store,
            tick_s=3600.0,
            do=self._do,
            on_lead=self.leads.set,
            on_stand_down=lambda reason: None,
        )

    def say(self, session: int, message: GroupMessage) -> None:
        self.jobs.step("job", GroupSaid(SessionId(session), message))

    def come(self, session: int, name: str, **settings: str) -> None:
        self.say(session, Hello("job", GroupName(name), Incarnation(session), f"{name}:1"))
        self.say(session, Join(Step(0), "same", settings))

    def to(self, session: int) -> list[object]:
        return [each.message for each in self.told if isinstance(each, Send) and each.session == session]

    def _do(self, effects: Sequence[Effect]) -> None:
        self.told += effects


def run(scenario: Callable[[HeldStore, Desk], Awaitable[None]]) -> None:
    async def bounded() -> None:
        store = HeldStore()
        desk = Desk(store)
        leading = asyncio.create_task(desk.jobs.run("here:1"))
        try:
            async with asyncio.timeout(30.0):
                await desk.leads.wait()
                await scenario(store, desk)
        finally:
            leading.cancel()

    asyncio.run(bounded())


def test_what_a_group_says_before_it_hears_that_it_is_out_means_nothing():
    async def scenario(store: HeldStore, desk: Desk) -> None:
        desk.come(1, "a")
        desk.come(2, "b", shards="wrong")  # its refusal waits behind the record of the founding
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
