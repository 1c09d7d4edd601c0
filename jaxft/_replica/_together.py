"""The ranks of this group, as checkpoints need them (`_checkpoints._group`)."""

from collections.abc import Sequence

from jaxft._ranks._ranks import Directing, Ranks
from jaxft._transport._sockets import Abort


class Together:
    """Passes on to the ranks, and to the session what tells rank 0 that this rank makes progress."""

    def __init__(self, ranks: Ranks, session: Directing) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self._ranks = ranks
        self._session = session

    def choose(self, what: str, number: int) -> int:
        return self._ranks.choose(what, number)

    def agree(self, what: str, failure: str) -> str:
        with self._ranks.operation(what, Abort()) as operation:
            return operation.settle(failure).failure

    def got_on(self) -> None:
        self._session.got_on()

    def save_begins(self, number: int, folder: str) -> str:
        return self._ranks.save_begins(number, folder)

    def save_ends(self, number: int, failure: str) -> Sequence[str]:
        return self._ranks.save_ends(number, failure)
