"""The queue in front of each stream."""

import asyncio

import pytest
from jaxft_coordinator.shell._session import Outbox


def test_messages_leave_in_order_and_one_too_many_is_refused():
    async def scenario() -> None:
        outbox: Outbox[int] = Outbox(3)
        for number in range(3):
            outbox.put_nowait(number)
        with pytest.raises(asyncio.QueueFull):
            outbox.put_nowait(3)
        assert [await outbox.get(), outbox.get_nowait(), await outbox.get()] == [0, 1, 2]
        assert outbox.empty()

    asyncio.run(scenario())


def test_a_reader_that_waits_gets_what_comes():
    async def scenario() -> None:
        outbox: Outbox[int] = Outbox(10)
        reader = asyncio.create_task(outbox.get())
        await asyncio.sleep(0)
        outbox.put_nowait(1)
        outbox.put_nowait(2)  # before the reader had its turn
        assert await reader == 1
        assert await outbox.get() == 2

    asyncio.run(scenario())


def test_a_reader_that_gives_up_loses_nothing():
    async def scenario() -> None:
        outbox: Outbox[int] = Outbox(10)
        reader = asyncio.create_task(outbox.get())
        await asyncio.sleep(0)
        reader.cancel()
        outbox.put_nowait(1)
        await asyncio.wait([reader])
        assert await outbox.get() == 1

    asyncio.run(scenario())
