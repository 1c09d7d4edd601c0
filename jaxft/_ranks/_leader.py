"""Rank 0 of a group of several processes."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from jaxft_protocol.messages import Step
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft_protocol.replica.state import Directive

from jaxft._errors import SessionFailed
from jaxft._ranks._directives import encode, encode_failure
from jaxft._ranks._link import Link, rank_message
from jaxft._ranks._ranks import Operation, Settled, Verdict
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort

_log = logging.getLogger("jaxft")

# Log waits longer than this, and again each time the wait has doubled.
_FIRST_MENTION_S = 5.0
# How often a wait for another rank checks whether that one has ended, or has to be stopped.
_LOOK_S = 0.1


class Leader:
    """The links of rank 0 to all other ranks. `decide`, `operation` and `direct` are for the training thread.

    Args:
        connections: one for each other rank, in their order; owned.
        silence_s: how long a rank may be silent.
        stuck_s: how long a rank may make no progress while rank 0 waits for its part of an operation.
        name: this group's name, for logs.
    """

    rank = 0

    def __init__(
        self, connections: Sequence[Connection], *, silence_s: float, stuck_s: float, name: str
    ) -> None:
        self.size = 1 + len(connections)
        self._name = name
        self._stuck_s = stuck_s
        self._silence_s = silence_s
        self._progress = [0] * (1 + len(connections))
        self._lock = threading.Lock()
        self._outcomes: list[queue.SimpleQueue[pb.Outcome]] = [queue.SimpleQueue() for _ in connections]
        self._saved: list[queue.SimpleQueue[pb.Saved]] = [queue.SimpleQueue() for _ in connections]
        self._abort: Abort | None = None  # of the current operation
        self._operation = 0
        self._stopped = ""  # the operation in which the others got the last order to stop
        self._failed_rank = False  # another rank has failed in the current operation
        self._failed_early = ""  # an operation in which another rank has failed before this one began it
        self._ended: dict[int, str] = {}
        self._closed = False
        # Asks the job to let this group leave, for another rank got SIGTERM; set before the first step.
        self.on_drain: Callable[[], None] | None = None
        # Reports to the job that the user's code has raised in another rank; set before the first step.
        self.on_raised: Callable[[Step, str, int | None], Settled] | None = None
        self._addresses: list[queue.SimpleQueue[str]] = [queue.SimpleQueue() for _ in connections]
        self._links = [
            Link(
                connection,
                other=rank,
                receive=rank_message,
                handle=lambda message, rank=rank: self._hear(rank, message),
                beat=pb.LeaderMessage(beat=pb.Beat()).SerializeToString,
                silence_s=silence_s,
                name=name,
            )
            for rank, connection in enumerate(connections, 1)
        ]

    def start(self) -> None:
        for link in self._links:
            link.start()

    def addresses(self, timeout_s: float) -> list[str]:
        """Where the other groups reach the other ranks, in their order.

        Raises:
            TimeoutError: a rank has not told its address in time.
        """
        found: list[str] = []
        for rank, told in enumerate(self._addresses, 1):
            try:
                found.append(told.get(timeout=timeout_s))
            except queue.Empty:
                raise TimeoutError(f"rank {rank} has not told its address for {timeout_s:g} s") from None
        return found

    def direct(self, directive: Directive) -> None:
        """Tell all ranks what comes next."""
        self._send(pb.LeaderMessage(directive=encode(directive)))

    def left(self) -> None:
        """Tell all ranks that the group has left its job."""
        self._send(pb.LeaderMessage(directive=pb.Directive(left=True)))

    def decide(self, what: str, value: bool) -> bool:
        self._send(pb.LeaderMessage(decision=pb.Decision(what=what, value=value)))
        return value

    def choose(self, what: str, number: int) -> int:
        self._send(pb.LeaderMessage(decision=pb.Decision(what=what, number=number)))
        return number

    def save_begins(self, number: int, folder: str) -> str:
        self._send(pb.LeaderMessage(save_begins=pb.SaveBegins(number=number, folder=folder)))
        return folder

    def save_ends(self, number: int, failure: str) -> Sequence[str]:
        failures = [
            f"rank {rank}: {text}" for rank in range(1, self.size) if (text := self._saved_by(rank, number))
        ]
        return [*filter(None, [failure]), *failures]

    def await_loss(self) -> None:
        deadline_s = time.monotonic() + self._silence_s
        for link in self._links:
            link.await_loss(max(0.0, deadline_s - time.monotonic()))

    @contextlib.contextmanager
    def operation(self, what: str, abort: Abort) -> Iterator[Operation]:
        with self._lock:
            self._operation += 1
            numbered = f"{what}#{self._operation}"
            self._abort, self._failed_rank = abort, False
            early = self._failed_early == numbered
        if early:
            self._stop("another rank failed")
        try:
            yield _Led(self, numbered, abort)
        finally:
            with self._lock:
                self._abort = None

    def settle(self, what: str, own: Verdict, abort: Abort) -> Verdict:
        """Collect all outcomes, and tell all ranks the verdict."""
        if own.failure:
            self._stop_others(what)
        outcomes = [self._outcome(rank, what, abort) for rank in range(1, self.size)]
        with self._lock:
            stopped = abort.is_set and not self._failed_rank
        # Rank 0's own failure is often only that another rank had failed and stopped it.
        failures = [one.failure for one in outcomes if one.failure]
        failure = own.failure if own.failure and (stopped or not failures) else next(iter(failures), "")
        accused = {name for one in outcomes for name in one.accused} | set(own.accused)
        notes = [own.note, *(one.note for one in outcomes)]
        verdict = Verdict(failure, tuple(sorted(accused)), next(filter(None, notes), ""), stopped)
        outcome = pb.Outcome(what=what, failure=failure, accused=verdict.accused, note=verdict.note)
        self._send(pb.LeaderMessage(verdict=pb.Verdict(outcome=outcome, stopped=stopped)))
        return verdict

    # ---- the session's thread ----

    def pin(self, heal_id: int, step: int, *, log_only: bool) -> None:
        self._send(pb.LeaderMessage(pin_state=pb.PinState(heal_id=heal_id, step=step, log_only=log_only)))

    def release(self, heal_id: int) -> None:
        message = pb.LeaderMessage()
        message.release_pin.heal_id = heal_id
        self._send(message)

    def all_computed(self, quorum_id: int, step: int) -> None:
        message = pb.LeaderMessage()
        message.all_computed.quorum_id, message.all_computed.step = quorum_id, step
        self._send(message)

    def close(self, error: str = "") -> None:
        """Tell the other ranks that this one ends, and wait for their ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._send(pb.LeaderMessage(group_ends=pb.GroupEnds(error=error)))
        for link in self._links:
            link.close()

    def _send(self, message: pb.LeaderMessage) -> None:
        for link in self._links:
            link.send(message)

    def _stop_others(self, what: str) -> None:
        if self._stopped != what:
            self._stopped = what
            self._send(pb.LeaderMessage(stop_work=pb.StopWork(reason=what)))

    def _outcome(self, rank: int, what: str, abort: Abort) -> pb.Outcome:
        began_s = moved_s = time.monotonic()
        mention_s, progress = _FIRST_MENTION_S, self._progress[rank]
        while True:
            with contextlib.suppress(queue.Empty):
                found = self._outcomes[rank - 1].get(timeout=_LOOK_S)
                if found.what == what:
                    return found
                raise SessionFailed(
                    f"The ranks of this group have come apart: rank {rank} reports {found.what!r}, and rank 0 is at "
                    f"{what!r}. Every rank must run the same program, with the same calls of the step."
                )
            if abort.is_set:
                # Rank 0 has its part, and the group is directed elsewhere, or one of the others has failed.
                self._stop_others(what)
            now_s = time.monotonic()
            if progress != self._progress[rank]:
                progress, moved_s = self._progress[rank], now_s
            if now_s - moved_s > self._stuck_s:
                self._links[rank - 1].lost(f"no progress in {what!r} for {now_s - moved_s:.0f} s")
            if now_s - began_s >= mention_s:
                mention_s = 2 * (now_s - began_s)
                _log.info(
                    "[jaxft %s] waiting %.0f s for rank %d in %r",
                    *(self._name, now_s - began_s, rank, what),
                )
            if (error := self._ended.get(rank)) is not None:
                raise SessionFailed(
                    f"Rank {rank} of this group has ended{f' with {error}' if error else ''}, while rank 0 is at "
                    f"{what!r}. Every rank must run the same number of steps."
                )

    def _saved_by(self, rank: int, number: int) -> str:
        """Wait as long as that rank's disk takes; if the rank is gone, this process ends. Return why it failed."""
        began_s, mention_s = time.monotonic(), _FIRST_MENTION_S
        while True:
            with contextlib.suppress(queue.Empty):
                if (found := self._saved[rank - 1].get(timeout=_LOOK_S)).number == number:
                    return found.failure
            waited_s = time.monotonic() - began_s
            if waited_s >= mention_s:
                mention_s = 2 * waited_s
                _log.info("[jaxft %s] waiting %.0f s for rank %d to write", self._name, waited_s, rank)
            if rank in self._ended and self._saved[rank - 1].empty():
                raise SessionFailed(
                    f"Rank {rank} of this group has ended before its part of a checkpoint was written."
                )

    def _hear(self, rank: int, message: pb.RankMessage) -> None:
        match message.WhichOneof("kind"):
            case "beat":
                self._progress[rank] = message.beat.progress
                if message.beat.drains and self.on_drain is not None:
                    self.on_drain()
            case "hello":
                self._addresses[rank - 1].put(message.hello.address)
            case "outcome":
                if message.outcome.failure:
                    with self._lock:
                        self._failed_early = message.outcome.what
                    self._stop(f"rank {rank} failed: {message.outcome.failure}")
                self._outcomes[rank - 1].put(message.outcome)
            case "saved":
                self._saved[rank - 1].put(message.saved)
            case "raised":
                # The training thread may be in a collective that never returns.
                told = message.raised
                threading.Thread(
                    target=self._settle_raised, args=(rank, told), name=f"jaxft-raised-{rank}", daemon=True
                ).start()
            case "group_ends":
                self._ended[rank] = message.group_ends.error
                self._links[rank - 1].expect_end(message.group_ends.error)
            case other:
                raise ConnectionError(f"it sent a message of kind {other!r}, which rank 0 does not expect")

    def _settle_raised(self, rank: int, told: pb.Raised) -> None:
        """Report another rank's exception to the job, and tell that rank what became of the step."""
        settled = Settled()
        if self.on_raised is not None:
            shard = told.shard if told.HasField("shard") else None
            try:
                settled = self.on_raised(Step(told.step), f"{told.text} (in rank {rank})", shard)
            except Exception:  # top level of the thread; the other rank waits for an answer
                _log.exception("[jaxft %s] could not report the error of rank %d", self._name, rank)
        failure = None if settled.failure is None else encode_failure(settled.failure)
        message = pb.Settled(failure=failure, done=settled.done)
        self._links[rank - 1].send(pb.LeaderMessage(settled=message))

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._abort is not None and not self._abort.is_set:
                self._failed_rank = True
                self._abort.set(reason)


class _Led:
    def __init__(self, leader: Leader, what: str, abort: Abort) -> None:
        self._leader = leader
        self._what = what
        self._abort = abort

    def settle(self, failure: str = "", accused: tuple[str, ...] = (), note: str = "") -> Verdict:
        return self._leader.settle(self._what, Verdict(failure, accused, note), self._abort)
