"""The other processes of a group, as checkpoints need them."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from jaxft._arrays._device_digest import PendingDigest
from jaxft._checkpoints._manifest import Damaged, Unreadable

_T = TypeVar("_T")


class Group(Protocol):
    """The processes that restore a checkpoint and save one together.

    `choose` and `agree` are for the thread that calls the step: every process calls them in the same order.
    `save_begins` and `save_ends` are for the thread that writes: each process calls both once in each save.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def choose(self, what: str, number: int, /) -> int:
        """Return rank 0's number, in every process."""
        ...

    def agree(self, what: str, failure: str, /) -> str:
        """Return why it failed in some process, in every process; "" if it failed in none."""
        ...

    def got_on(self) -> None:
        """Tell rank 0 that this process makes progress."""
        ...

    def digest(self) -> PendingDigest:
        """Start the digest of the state that is saved, on the devices. Called only if there are several processes."""
        ...

    def save_begins(self, number: int, folder: str, /) -> str:
        """Return rank 0's folder, in every process. `number` counts the saves."""
        ...

    def save_ends(self, number: int, failure: str, /) -> Sequence[str]:
        """Tell rank 0 how this process's part of a save went. In rank 0: wait for all, and return their failures."""
        ...


class OneProcess:
    """A group of one process."""

    rank = 0
    size = 1

    def choose(self, _what: str, number: int) -> int:
        return number

    def agree(self, _what: str, failure: str) -> str:
        return failure

    def got_on(self) -> None:
        """No other process waits."""

    def digest(self) -> PendingDigest:
        raise AssertionError("a process alone computes it on its host")

    def save_begins(self, _number: int, folder: str) -> str:
        return folder

    def save_ends(self, _number: int, failure: str) -> Sequence[str]:
        return [failure] if failure else []


def agreed(group: Group, what: str, do: Callable[[], _T]) -> _T:
    """What `do` returns, if it returns in every process of the group. Raises Damaged if it does so in any."""
    found: list[_T] = []
    failure, error = "", None
    try:
        found.append(do())
    except Damaged as caught:
        failure, error = str(caught), caught
    if failure := group.agree(what, failure):
        raise (Unreadable if isinstance(error, Unreadable) else Damaged)(failure) from error
    return found[0]
