"""One stream to a group: its messages wait in an outbox until they are sent, sealed if the job has a key."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jaxft_protocol import wire
from jaxft_protocol.coordinator.job import SessionId
from jaxft_protocol.messages import Alive, CoordinatorMessage, GroupName, NewQuorum
from jaxft_protocol.seals import Body, Seal

from jaxft_coordinator.shell._connections import Peer

T = TypeVar("T")

# A quorum of a thousand groups is 60 KB; a group with this many unread messages has stopped reading.
MAX_OUTBOX_MESSAGES = 1000


class Outbox(Generic[T]):
    """A bounded queue with one reader. `asyncio.Queue` does more, but takes three times as long."""

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


def body(message: CoordinatorMessage, base: NewQuorum | None = None) -> Body:
    return Body(wire.coordinator_to_proto(message, base))


ALIVE = body(Alive())


@dataclass(eq=False)
class GroupSession:
    id: SessionId
    peer: Peer | None = None
    job: str = ""
    group: GroupName = GroupName("")
    # For messages to the group and from it, set once it is admitted, if the job has a key.
    seals: tuple[Seal, Seal] | None = None
    # The last quorum on this stream: the next one is sent as the difference from it.
    carried: NewQuorum | None = None
    outbox: Outbox[Body | None] = field(default_factory=lambda: Outbox(MAX_OUTBOX_MESSAGES))
    closed: bool = False

    def put(self, message: Body | None) -> None:
        """Queue `message`; None ends the stream after the messages queued so far."""
        if self.closed:
            return
        if message is None:
            self.closed = True
        try:
            self.outbox.put_nowait(message)
        except asyncio.QueueFull:
            # The group has stopped reading: drop the backlog and end the stream. It comes back as a joiner.
            self.closed = True
            while not self.outbox.empty():
                self.outbox.get_nowait()
            self.outbox.put_nowait(None)

    def encoded(self, message: Body) -> bytes:
        """The bytes to send for a message. Call it in the order of sending."""
        return message.data if self.seals is None else self.seals[0].close(message)

    def opened(self, received: bytes) -> bytes:
        """The group's next message. Raises Broken."""
        return received if self.seals is None else self.seals[1].open(received)
