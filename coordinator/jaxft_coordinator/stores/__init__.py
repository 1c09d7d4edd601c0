"""Where a coordinator keeps what it must not forget, and how it comes to lead.

A `Store` is written to by one coordinator at a time: opening it makes this one the leader, under a term that is
higher than any before, and from then on nobody of a lower term can append. So a coordinator that was frozen, cut off
or replaced finds out at its next decision, before anybody hears of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxft_coordinator.core.job import Record, Saved


class StoreLost(Exception):
    """This coordinator does not lead any more: another one has opened the store, or the store cannot be reached.

    Nothing of what was to be appended is known to be durable. The text says why, and who leads now if that is known.
    """


@dataclass(frozen=True, slots=True)
class Opened:
    """What the store knew when this coordinator became its leader, and the term under which it leads."""

    term: int
    jobs: Mapping[str, Saved] = field(default_factory=dict[str, Saved])


class Store(Protocol):
    """A place for records. All calls come from one asyncio loop, `append` never twice at a time."""

    async def open(self, address: str) -> Opened:
        """Become the leader, however long that takes, and return what is remembered.

        Args:
            address: host:port at which groups reach this coordinator; told to them by those that stand by.
        """
        ...

    @property
    def leader(self) -> str:
        """The address of who leads now, as far as is known; "" if nobody does."""
        ...

    async def append(self, records: Sequence[Record]) -> None:
        """Make `records` durable, all or none, before returning.

        Raises:
            StoreLost: another coordinator leads now. Appending again is of no use.
            OSError: the disk is full or failing; nothing was written, and appending again may succeed.
        """
        ...

    async def lost(self) -> str:
        """Return, as soon as this coordinator leads no more, why. Never returns while it leads."""
        ...

    async def close(self) -> None:
        """Lead no more. Whoever stands by takes over at once."""
        ...
