"""The messages waiting to be written to one stream."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """A bounded queue with one reader. `asyncio.Queue` does more, but takes three times as long.

    Args:
        most: how many messages may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def empty(self) -> bool:
        return not self._items

    def put_nowait(self, item: T) -> None:
        """Add `item`. Raises asyncio.QueueFull."""
        if len(self._items) >= self._most:
            raise asyncio.QueueFull
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def get_nowait(self) -> T:
        """Remove and return the oldest. Raises IndexError if there is none."""
        return self._items.popleft()

    async def get(self) -> T:
        """Remove and return the oldest, waiting for one if necessary."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()
