"""The side of every rank but 0: `step(follower, event) -> (follower, effects)`, and `take` for its next order."""

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from jaxft_protocol.ranks.messages import (
    CameApart,
    Decided,
    Directed,
    Judged,
    Order,
    Outcome,
    StopWork,
    Verdict,
)
from jaxft_protocol.values import changed

_O = TypeVar("_O", Directed, Decided, Judged)


@dataclass(frozen=True)
class Follower:
    rank: int
    operations: int = 0  # begun so far
    what: str = ""  # the operation that it is in; "" between two of them
    stopped: str = ""  # the operation that rank 0 has stopped last
    orders: tuple[Order, ...] = ()  # that the training thread has not taken yet


@dataclass(frozen=True, slots=True)
class Begins:
    """The training thread begins an operation."""

    what: str


@dataclass(frozen=True, slots=True)
class Done:
    """This rank's part of the operation has ended."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Leaves:
    """The training thread has left the operation."""


@dataclass(frozen=True, slots=True)
class Heard:
    message: Order | StopWork


Event: TypeAlias = Begins | Done | Leaves | Heard


@dataclass(frozen=True, slots=True)
class Interrupt:
    """This rank stops its part of the current operation, on rank 0's order."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send to rank 0."""

    outcome: Outcome


Effect: TypeAlias = Interrupt | Report


def step(follower: Follower, event: Event) -> tuple[Follower, tuple[Effect, ...]]:
    """Return the follower after `event`, and what must be done."""
    match event:
        case Begins(what):
            number = follower.operations + 1
            begun = changed(follower, operations=number, what=f"{what}#{number}")
            return begun, ((Interrupt(),) if begun.stopped == begun.what else ())
        case Done(verdict):
            return follower, (Report(Outcome(follower.what, verdict)),)
        case Leaves():
            return changed(follower, what=""), ()
        case Heard(StopWork(what)):
            stops = what == follower.what
            return changed(follower, stopped=what), ((Interrupt(),) if stops else ())
        case Heard(order):
            return changed(follower, orders=(*follower.orders, order)), ()


def take(follower: Follower, kind: type[_O], what: str) -> tuple[Follower, _O | None]:
    """Return the next order for the training thread, or None if it has not come yet.

    Raises:
        CameApart: rank 0 is at another point of the program.
    """
    if not follower.orders:
        return follower, None
    order, *rest = follower.orders
    if not isinstance(order, kind) or _about(order) != what:
        here = f"at {what!r}" if what else "waiting for what comes next"
        raise CameApart(
            f"The ranks of this group have come apart: {_words(order)} comes from rank 0, but rank {follower.rank} "
            f"is {here}. Every rank must run the same program, with the same calls of the step.",
            theirs=order.what if isinstance(order, Decided) else "",
        )
    return changed(follower, orders=tuple(rest)), order


def _about(order: Order) -> str:
    return "" if isinstance(order, Directed) else order.what


def _words(order: Order) -> str:
    match order:
        case Directed(None):
            return "the end of the job"
        case Directed(directive):
            return f"the directive {type(directive).__name__}"
        case Decided(what):
            return f"the decision about {what!r}"
        case Judged(what):
            return f"the verdict about {what!r}"
