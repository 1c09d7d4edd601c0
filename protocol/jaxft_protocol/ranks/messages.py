"""Messages between the ranks of a group about their program."""

from dataclasses import dataclass
from typing import TypeAlias

from jaxft_protocol.replica.state import Directive


class CameApart(Exception):
    """The ranks of this group are not at the same point of the same program.

    Attributes:
        theirs: the decision that comes from rank 0; "" if it is something else.
    """

    def __init__(self, text: str, theirs: str = "") -> None:
        super().__init__(text)
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an operation went: in one rank, as it reports it, or in all of them."""

    failure: str = ""  # why it failed; "" if it succeeded
    accused: tuple[str, ...] = ()  # groups that are to blame
    note: str = ""  # a rank's note about the result
    stopped: bool = False  # the group was directed to do something else

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank's part of an operation went."""

    what: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Directed:
    """What every rank does next; None: nothing, for the group has left its job."""

    directive: Directive | None


@dataclass(frozen=True, slots=True)
class Decided:
    """What rank 0 knows and the others do not."""

    what: str
    value: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """How an operation went in all ranks."""

    what: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class StopWork:
    """The operation cannot succeed any more. Overtakes all orders."""

    what: str


Order: TypeAlias = Directed | Decided | Judged
