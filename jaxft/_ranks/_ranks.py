"""The questions of every rank's training thread to its group's other ranks.

Every rank runs the same loop (`_replica._runner`) over the same directives, and each directive leads to the same
operations: compute a shard, exchange, apply, fetch. Two things keep them together:

* `decide`: whatever only rank 0 can know is decided by it, and all ranks get its answer.
* `operation`: what may fail in one rank alone (an exchange, a fetch) ends with one verdict for all. A rank that fails
  stops the others, and a failure of any rank is a failure of the group.

So no rank starts a collective that another rank does not start: collectives that do not match hang, or give wrong
numbers without an error. The protocol is in `jaxft_protocol.ranks`.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxft_protocol.messages import HistoryId, NewQuorum, QuorumId, Step, Stripe
from jaxft_protocol.ranks.messages import Verdict
from jaxft_protocol.replica.state import Directive, Event, Failure

from jaxft._errors import ConfigurationError, SessionFailed
from jaxft._report import StepReport
from jaxft._transport._sockets import Abort


class CameApart(SessionFailed):
    """The ranks of this group are not at the same point of the same program.

    Attributes:
        theirs: the decision that comes from rank 0; "" if it is something else.
    """

    def __init__(self, text: str, theirs: str = "") -> None:
        super().__init__(text)
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a step in which the user's code has raised an exception."""

    failure: Failure | None = None  # the job has halted
    done: bool = False  # the other groups have committed it


class Operation(Protocol):
    def settle(self, failure: str = "", accused: tuple[str, ...] = (), note: str = "") -> Verdict:
        """Report this rank's part, and wait for the verdict about all ranks. Every rank calls it once."""
        ...


class Ranks(Protocol):
    rank: int
    size: int

    def decide(self, what: str, /, *, value: bool) -> bool:
        """Return rank 0's value, in every rank. `what` names the decision: it is the same in every rank.

        Raises:
            CameApart: rank 0 decides something else.
            SessionFailed: rank 0 has ended.
        """
        ...

    def choose(self, what: str, number: int, /) -> int:
        """As `decide`, of a number that is not negative."""
        ...

    def awaits_others(self, *, now: bool) -> None:
        """Tell whether the training thread is in a computation of all ranks, for which another may still read data.

        Until it has left that, what another rank moves is the group's progress.
        """
        ...

    def save_begins(self, number: int, folder: str, /) -> str:
        """For the thread that writes a checkpoint: return rank 0's folder, in every rank.

        Raises:
            SessionFailed: rank 0 has ended.
        """
        ...

    def save_ends(self, number: int, failure: str, /) -> Sequence[str]:
        """For that thread: tell rank 0 how this rank's part of a save went; "": it is on the disk.

        In rank 0: wait for all ranks, and return their failures.

        Raises:
            SessionFailed: a rank has ended.
        """
        ...

    def await_loss(self) -> None:
        """A collective has failed, most likely because another rank is gone: give its link the time to notice.

        If it does, this process ends here, with its own status.
        """
        ...

    def operation(self, what: str, abort: Abort, /) -> contextlib.AbstractContextManager[Operation]:
        """Within the context, `abort` is set as soon as the operation has failed in another rank."""
        ...


class Leading(Ranks, Protocol):
    """The reports of rank 0's session to the other ranks."""

    def direct(self, directive: Directive) -> None: ...
    def left(self) -> None: ...
    def in_step(self, *, now: bool) -> contextlib.AbstractContextManager[None]: ...
    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: Stripe) -> None: ...
    def release(self, heal_id: int) -> None: ...
    def all_computed(self, quorum_id: int, step: int) -> None: ...
    def close(self, error: str = "") -> None: ...


class Directing(Protocol):
    """The source of a training thread's directives: the session in rank 0, the link to rank 0 elsewhere."""

    computed: tuple[QuorumId, Step]
    in_parts: bool

    @property
    def address(self) -> str:
        """Where the others reach this process; in rank 0, its whole group."""
        ...

    @property
    def quorum(self) -> NewQuorum | None: ...
    @property
    def history(self) -> HistoryId: ...
    @property
    def frontier(self) -> tuple[Step | None, bool]: ...
    @property
    def all_computed(self) -> tuple[QuorumId, Step]: ...
    @property
    def cut_off(self) -> bool:
        """Whether this group has no coordinator for now; rank 0 knows."""
        ...

    def post(self, event: Event) -> None: ...
    def wait(self, seen: int) -> tuple[int, Directive]: ...
    def activity(self, directive: Directive, abort: Abort, /) -> contextlib.AbstractContextManager[Abort]: ...
    def in_step(self, *, now: bool) -> contextlib.AbstractContextManager[Any]: ...
    def got_on(self) -> None: ...
    def wants_digest(self, step: Step, /) -> bool: ...
    def wait_until_left(self, deadline_s: float, taken: Step | None, /) -> Step | None: ...
    def show(self, values: Mapping[str, float]) -> None: ...
    def sample(self, report: StepReport) -> None: ...


class OneRank:
    """A group of one process."""

    rank = 0
    size = 1

    def direct(self, directive: Directive) -> None:
        """Rank 0's own training thread has it already."""

    def left(self) -> None:
        """As `direct`."""

    def in_step(self, *, now: bool) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 (no wait is logged)
        return contextlib.nullcontext()

    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: Stripe) -> None:
        """As `direct`."""

    def release(self, heal_id: int) -> None:
        """As `direct`."""

    def all_computed(self, quorum_id: int, step: int) -> None:
        """As `direct`."""

    def close(self, error: str = "") -> None:
        """There is no link."""

    def decide(self, _what: str, /, *, value: bool) -> bool:
        return value

    def choose(self, _what: str, number: int, /) -> int:
        return number

    def awaits_others(self, *, now: bool) -> None:
        """There is no other rank."""

    def save_begins(self, _number: int, folder: str, /) -> str:
        return folder

    def save_ends(self, _number: int, failure: str, /) -> Sequence[str]:
        return [failure] if failure else []

    def await_loss(self) -> None:
        """There is no other rank."""

    @contextlib.contextmanager
    def operation(self, _what: str, abort: Abort, /) -> Iterator[Operation]:
        yield _Alone(abort)


class _Alone:
    def __init__(self, abort: Abort) -> None:
        self._abort = abort

    def settle(self, failure: str = "", accused: tuple[str, ...] = (), note: str = "") -> Verdict:
        return Verdict(failure, accused, note, stopped=bool(failure) and self._abort.is_set)


# Between the name and the value of a setting.
_IS = " = "
# Sorts after all names.
_END = (chr(sys.maxunicode), "")


def compare(ranks: Ranks, group: str, settings: Mapping[str, str]) -> None:
    """Refuse a rank whose settings differ from its rank 0's. Every rank calls it at the same point.

    Raises:
        ConfigurationError: this rank does.
    """
    for name, value in (*sorted(settings.items()), _END):
        try:
            ranks.decide(f"{name}{_IS}{value}", value=True)
        except CameApart as error:
            raise ConfigurationError(
                f"Rank {ranks.rank} of group {group!r} differs from its rank 0 in code, settings or hardware: "
                f"{difference(name, value, error.theirs) or error}"
            ) from error


def difference(name: str, value: str, theirs: str) -> str:
    """Return in which setting this rank differs from rank 0; "" if rank 0 does not compare settings.

    Args:
        name: of this rank's setting at the place where they differ. Both go through their settings by name.
        value: of that setting.
        theirs: rank 0's setting there, with its name.
    """
    their_name, is_setting, their_value = theirs.partition(_IS)
    if not is_setting:
        return ""
    if their_name == name:
        return f"this rank has {name} {value!r}, and rank 0 has {their_value!r}."
    if their_name < name:
        return f"rank 0 has {their_name} {their_value!r}, which this rank does not have."
    return f"this rank has {name} {value!r}, which rank 0 does not have."
