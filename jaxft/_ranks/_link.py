"""One connection between two ranks of a group: messages in both directions, and the end of one is the end of both.

Beats are messages, sent by a Python thread: code that holds Python's lock, such as `json.loads` of a long text, stops
them. So a second connection carries signs of life, a byte at each interval, which the compiled lane writes without
the lock. They break the silence, and say nothing else. Without that lane, a rank that holds the lock for as long as a
silence may last loses its group.

A group shares fate. If the connection breaks, or the other rank is silent for too long, this process ends at once
with status `EXIT_AGAIN`: its training thread may be inside a collective that never returns, so no exception would
reach it. The supervisor starts the whole group again, and it heals from the other groups.
"""

import contextlib
import logging
import math
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft_protocol.values import SLOW_WAIT_S

from jaxft._base._ending import end_at_once
from jaxft._base._room import start_thread
from jaxft._ranks._ranks import Ranks
from jaxft._transport._seals import Connection, is_tag
from jaxft._transport._sockets import Abort, Aborted, pause, recv_exactly, send_all, wait

_log = logging.getLogger("jaxft")

# Exit status: the group must be started again (EX_TEMPFAIL of sysexits.h).
EXIT_AGAIN = 75
# Each rank sends at least this often.
BEAT_S = 0.5
# A message is a directive at most: a quorum of thousands of groups with their addresses.
_MAX_BYTES = 64 << 20
_HEADER = struct.Struct("<I")
# After another rank's error, this rank may raise its own before it is ended.
_GRACE_S = 5.0
# The rank with that error waits for others that do not end: less long, so that its status is there before theirs.
_HEAD_START_S = 2.5


@dataclass(frozen=True, slots=True)
class Life:
    """The signs of life between two ranks.

    Attributes:
        connection: from the handshake; owned.
        write: `write(fd, stop_fd, interval_s)` writes a byte at each interval, without Python's lock, until
            `stop_fd` is readable. None: no lane was built.
    """

    connection: Connection
    write: Callable[[int, int, float], None] | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of one side of a link."""

    receive: Callable[[bytes], Any]
    """Decodes a message."""
    handle: Callable[[Any], None]
    """Called with each message, in the receiving thread. Must not block."""
    beat: Callable[[], bytes]
    """Encodes the message that this side sends all the time."""


@dataclass(frozen=True, slots=True)
class Silence:
    """How long the other rank may be silent: ever, and until its first message, if that is longer."""

    seconds: float
    first_s: float = 0.0


class Link:
    """A connection to another rank, with a thread that receives and a thread that sends beats."""

    def __init__(
        self,
        connection: Connection,
        traffic: Traffic,
        silence: Silence,
        *,
        life: Life | None = None,
        other: int,
        name: str,
    ) -> None:
        self.other = other
        self._connection = connection
        self._life = life
        self._traffic = traffic
        self._silence_s = silence.seconds
        self._first_s = max(silence.first_s, silence.seconds)
        self._name = name
        self._sending = threading.Lock()
        self._closing = Abort()
        self._leaving = False  # this side has sent its last message
        self._other_ends = threading.Event()
        self._other_error = ""  # with which it ends
        self._unsent = ""  # why a message could not be sent
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for run in (self._receive, self._beats):
            self._threads.append(start_thread(self._guarded, run, name=f"jaxft-rank-{self.other}"))
        if self._life is not None and self._life.write is not None:
            fds = self._life.connection.sock.fileno(), self._closing.fileno()
            name = f"jaxft-rank-{self.other}-lives"
            self._threads.append(start_thread(self._life.write, *fds, BEAT_S, name=name))

    def send(self, message: Any) -> None:
        """Send a message. A failure ends the connection: without the message, the ranks would come apart."""
        with self._sent_or_lost():
            self._send(message.SerializeToString())

    def close(self, error: str = "") -> None:
        """End the connection with a last message, as soon as the other rank has sent its last message too.

        `error`: with which this rank ends.
        """
        self._leaving = True
        patience_s = _GRACE_S - _HEAD_START_S if error else _GRACE_S
        if not self._other_ends.wait(patience_s):
            _log.warning("[jaxft %s] rank %d has not ended within %g s", self._name, self.other, patience_s)
        self._closing.set("this rank ends")
        for thread in self._threads:
            thread.join()
        self._connection.close()
        if self._life is not None:
            self._life.connection.close()

    def await_loss(self, timeout_s: float) -> None:
        """Return after `timeout_s`, or as soon as the other rank has ended in an orderly way.

        If it has ended with an error, this process ends here: that is why the collective has failed.
        """
        self._other_ends.wait(timeout_s)
        if self._other_error and not self._leaving:
            self._end(f"it ended with {self._other_error}")

    def lost(self, why: str) -> NoReturn:
        """End this process: the other rank does not move any more."""
        self._end(why)
        raise AssertionError("this process has ended")

    def expect_end(self, error: str) -> None:
        """The other rank ends. With an error, this process ends too, unless it ends by itself soon."""
        self._other_error = error
        self._other_ends.set()
        if error and not self._leaving:
            text = f"it ended with {error}"
            timer = threading.Timer(_GRACE_S, self._end, [text])
            timer.daemon = True
            timer.start()

    def _send(self, data: bytes) -> None:
        header = _HEADER.pack(len(data))
        deadline_s = time.monotonic() + self._silence_s
        with self._sending:
            tag = self._connection.outgoing.tag(header, data)
            send_all(
                self._connection.sock,
                [header, data, tag],
                deadline_s=deadline_s,
                abort=self._closing,
                what=f"rank {self.other} to take a message",
            )

    @contextlib.contextmanager
    def _sent_or_lost(self) -> Iterator[None]:
        """Within the context, an error of a message that is sent has the receiving thread end, on both sides.

        Not at once: the other rank may have sent its reason before.
        """
        try:
            yield
        except Aborted:
            pass
        except OSError as error:
            self._unsent = self._unsent or f"a message could not be sent to it: {error}"
            with contextlib.suppress(OSError):  # it is closed already
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        patience_s = self._first_s
        while not self._other_ends.is_set():
            self._await_message(patience_s)
            data = self._read(time.monotonic() + patience_s)
            self._traffic.handle(self._traffic.receive(data))
            patience_s = self._silence_s

    def _await_message(self, patience_s: float) -> None:
        """Wait until the other rank sends something.

        Time in which this process did not run does not count: its machine may have been suspended, and the other rank
        with it.

        Raises:
            TimeoutError: it has sent nothing in that time.
        """
        silent_s, slow_s = 0.0, SLOW_WAIT_S
        self._shows_life()  # what came before does not count
        while silent_s < patience_s:
            began_s = time.monotonic()
            until_s = began_s + min(BEAT_S, patience_s - silent_s)
            with contextlib.suppress(TimeoutError):
                wait(self._connection.sock, select.POLLIN, deadline_s=until_s, what="", abort=self._closing)
                return
            silent_s = 0.0 if self._shows_life() else silent_s + min(time.monotonic() - began_s, BEAT_S)
            if silent_s >= slow_s:
                slow_s = math.inf
                _log.warning(
                    "[jaxft %s] rank %d has been silent for %.0f s", self._name, self.other, silent_s
                )
        raise TimeoutError(f"silent for {patience_s:g} s")

    def _shows_life(self) -> bool:
        """Whether signs of life have come since the last call."""
        shown = False
        if self._life is not None:
            with contextlib.suppress(
                OSError
            ):  # none has, or its process has ended, which the other connection shows
                while self._life.connection.sock.recv(4096, socket.MSG_DONTWAIT):
                    shown = True
        return shown

    def _read(self, deadline_s: float) -> bytes:
        header = self._exactly(_HEADER.size, deadline_s)
        (length,) = _HEADER.unpack(header)
        if length > _MAX_BYTES:
            raise ConnectionError(f"it announced a message of {length} bytes, more than {_MAX_BYTES}")
        data = self._exactly(length, deadline_s)
        incoming = self._connection.incoming
        tag = self._exactly(incoming.size_bytes, deadline_s)
        if not is_tag(tag, incoming.tag(header, data)):
            raise ConnectionError("it sent a message with a wrong tag")
        return bytes(data)

    def _exactly(self, size: int, deadline_s: float) -> bytearray:
        data = bytearray(size)
        recv_exactly(
            self._connection.sock,
            memoryview(data),
            deadline_s=deadline_s,
            abort=self._closing,
            what=f"the rest of a message from rank {self.other} of group {self._name!r}",
        )
        return data

    def _beats(self) -> None:
        with self._sent_or_lost():
            while not self._leaving:
                self._send(self._traffic.beat())
                pause(BEAT_S, abort=self._closing)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Aborted:
            return
        except Exception as error:  # top level of the thread
            if self._leaving:
                self._other_ends.set()  # it was lost at the very end: nothing is left to do together
            else:
                self._end(self._unsent or str(error) or repr(error))

    def _end(self, why: str) -> None:
        end_with(self._name, f"rank {self.other}", why)


def end_with(name: str, other: str, why: str) -> NoReturn:
    """End this process of group `name` at once, because it has lost the rank that `other` names."""
    _log.critical(
        "[jaxft %s] This rank ends with status %d, because a group shares fate: %s is lost (%s).",
        *(name, EXIT_AGAIN, other, why),
    )
    end_at_once(EXIT_AGAIN)


def leader_message(data: bytes) -> pb.LeaderMessage:
    return pb.LeaderMessage.FromString(data)


def rank_message(data: bytes) -> pb.RankMessage:
    return pb.RankMessage.FromString(data)


# XLA's statuses begin with their code (absl::StatusCode). Which Python type carries one depends on where JAX was when
# it saw it: a program's call raises `JaxRuntimeError`, a transfer of its result to the host `ValueError`.
_STATUS = re.compile(
    r"(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|UNAUTHENTICATED|"
    r"RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|"
    r"INVALID_ARGUMENT): "
)
_NO_MEMORY = "RESOURCE_EXHAUSTED: "
# What XLA writes where Gloo, NCCL or RCCL, which move the bytes of a collective, have failed.
_MOVING = re.compile(r"Gloo .+ failed: |NCCL operation .+ failed: ")


def end_if_lost(ranks: Ranks, group: str, error: BaseException | None) -> None:
    """If `error` shows that another rank is gone, or not reached by a collective, end this process with that status.

    The links get their time to notice first, for they know which rank it is, and why. If they notice nothing, the
    ranks all live, and only the connections of their collectives are broken: the program is not to blame.
    """
    if not came_from_xla(error):
        return
    ranks.await_loss()
    if failed := next((str(each) for each in _chain(error) if _MOVING.search(str(each))), ""):
        end_with(group, "another rank", f"it is not reached in a computation of all ranks: {failed}")


def came_from_xla(error: BaseException | None) -> bool:
    """Return whether `error`, or one of its causes, is a failure of a running program.

    One for lack of memory is not: it is this rank's own, and no other rank is gone.
    """
    for each in _chain(error):
        if str(each).startswith(_NO_MEMORY):
            return False
        if isinstance(each, jax.errors.JaxRuntimeError) or _STATUS.match(str(each)):
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and its causes."""
    seen: set[int] = set()  # a cause may be the error itself
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
