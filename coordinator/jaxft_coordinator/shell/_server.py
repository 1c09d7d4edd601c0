"""The coordinator's shell: gRPC streams in, the pure state machine, gRPC streams out.

A stream's reader passes each message to `_handle`, which steps the job (`_jobs.py`); messages from the machine come
back through `do`, into the outboxes of their sessions.
"""

import asyncio
import functools
import itertools
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from jaxft_protocol import wire
from jaxft_protocol.coordinator import machine
from jaxft_protocol.coordinator.job import (
    Close,
    Effect,
    Log,
    Options,
    Persist,
    Received,
    Send,
    SessionClosed,
    SessionId,
)
from jaxft_protocol.host.admission import RateLimitFilter
from jaxft_protocol.host.tls import Pem
from jaxft_protocol.messages import (
    Evicted,
    GroupMessage,
    Heartbeat,
    Hello,
    Refused,
    Sample,
)
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.proto import coordinator_pb2_grpc as pb_grpc
from jaxft_protocol.seals import Body, Broken

from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._admission import Admission, names_problem, no_room
from jaxft_coordinator.shell._connections import Connections, peer_of
from jaxft_coordinator.shell._jobs import Jobs
from jaxft_coordinator.shell._leading import Leading
from jaxft_coordinator.shell._services import SERVICE, Health, add_port, make_server
from jaxft_coordinator.shell._session import ALIVE, GroupSession, body
from jaxft_coordinator.shell.limits import JobLog
from jaxft_coordinator.stores import Store, TimedStore

_log = logging.getLogger("jaxft_coordinator")
# What unauthenticated peers cause is logged at a limited rate, so that they cannot fill the disk. The second logger
# is gRPC's, which writes a page for each call whose client disappears in the middle.
_unauthenticated_log = logging.getLogger("jaxft_coordinator.unauthenticated")
for _logger in (_unauthenticated_log, logging.getLogger("grpc._cython.cygrpc")):
    _logger.addFilter(RateLimitFilter())

FIRST_MESSAGE_TIMEOUT_S = 10.0
# The size of a vote or heartbeat without optional fields.
_SMALL_BYTES = 40
# How often to look for unauthenticated connections.
_SWEEP_S = 1.0


class Server(pb_grpc.CoordinatorServicer):
    """Serves any number of jobs, by name, on one port.

    Args:
        bind: `host:port`; port 0 takes a free one, which `port` then holds.
        options: the options of all jobs.
        secret: the secret from which the keys of jobs are derived; groups must prove that they know theirs. None: no
            proof is needed.
        tls: certificate and key to serve with; with a CA, clients need a certificate from it.
        store: where to keep what must survive a restart; None keeps nothing.
        observer: keeps what people see of the jobs; None: nothing is kept, and groups send no samples.
    """

    def __init__(
        self,
        bind: str,
        options: Options,
        *,
        secret: bytes | None = None,
        tls: Pem | None = None,
        store: Store | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.port = 0
        self._bind = bind
        self._observer = observer
        if observer is not None:
            options = replace(options, samples=True)
            store = None if store is None else TimedStore(store, observer.appends)
        self._jobs = Jobs(options, self, observer=observer)
        self._leading = Leading(self._jobs, store, self)
        self._sessions: dict[SessionId, GroupSession] = {}
        self._admission = Admission(secret)
        self._job_log = JobLog()
        self._tls = tls
        self._ids = itertools.count(1)
        self._server: grpc.aio.Server | None = None
        self.running: asyncio.Task[None] | None = None
        self._health = Health()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address cannot be bound.
        """
        server = make_server(self.Session, self._health, self._jobs.heartbeat_timeout_s)
        self.port = add_port(server, self._bind, self._tls)
        await server.start()
        self._server = server
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        _log.info("coordinator listens on %s (port %d)", self._bind, self.port)
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Run the background tasks until cancelled.

        Raises:
            Exception: a task ended.
        """
        parts = [
            asyncio.create_task(self._leading.run(self._address()), name="the task that runs all jobs"),
            asyncio.create_task(self._sweep_forever(), name="the task that checks connections"),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                raise part.exception() or RuntimeError(f"{part.get_name()} ended unexpectedly")
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _address(self) -> str:
        host = self._bind.rpartition(":")[0]
        anywhere = host in ("", "0.0.0.0", "[::]")
        return f"{socket.gethostname() if anywhere else host}:{self.port}"

    @property
    def certificate_until_s(self) -> float:
        """When the certificate that it serves with expires, in Unix time; infinite without one, or if not known."""
        return math.inf if self._tls is None else self._tls.until_s

    def leads(self) -> None:
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def stands_down(self, reason: str) -> None:
        if self._observer is not None:
            self._observer.stands_down(reason)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        for session in self._sessions.values():
            session.put(None)

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set the health of the service, which only the leader offers. The process (the empty name) stays healthy."""
        task = asyncio.get_running_loop().create_task(self._health.set(SERVICE, status))
        self._tasks.add(task)
        task.add_done_callback(self._health_was_set)

    def _health_was_set(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the coordinator could not update its health status", exc_info=error)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, end the streams, and return. Groups then wait for a coordinator to come back."""
        assert self._server is not None
        assert self.running is not None
        await self._health.enter_graceful_shutdown()
        self._jobs.stand_down()
        await self._leading.flush(grace_s)
        self.running.cancel()
        await asyncio.wait([self.running])
        await self._leading.close()
        for session in self._sessions.values():
            session.put(None)
        await self._server.stop(grace_s)

    async def Session(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        if not self._jobs.leading:
            leader = f"{self.leader} leads" if self.leader else "it knows of none that leads"
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this coordinator stands by; {leader}")
        session = GroupSession(SessionId(next(self._ids)), peer_of(context.peer()))
        self._sessions[session.id] = session
        challenge, evicted = self._admission.challenge(session.id, context.peer())
        session.put(challenge)
        if evicted is not None:
            self._sessions[evicted].put(None)
        reader = asyncio.create_task(self._read(session, request_iterator))
        reader.add_done_callback(functools.partial(_reader_ended, session))
        try:
            while (message := await session.outbox.get()) is not None:
                await context.write(session.encoded(message))
        except Exception as error:
            # The group disconnected in the middle of a message. gRPC would log any other error at length and try to
            # send a status.
            raise asyncio.CancelledError(f"session {session.id} was disconnected") from error
        finally:
            reader.cancel()
            self._closed(session, "its connection closed")

    async def _sweep_forever(self) -> None:
        connections = Connections(self.port)
        while True:
            await asyncio.sleep(_SWEEP_S)
            known = (
                session.peer for session in self._sessions.values() if session.job and not session.closed
            )
            groups = {peer for peer in known if peer is not None}
            try:
                ended = await asyncio.to_thread(connections.sweep, groups, time.monotonic())
            except OSError as error:  # such as out of descriptors
                _unauthenticated_log.warning("the coordinator cannot check its connections now: %s", error)
                continue
            except Exception:  # the peers that it checks must not be able to end this task
                _log.exception("the coordinator failed to check its connections")
                continue
            if ended:
                _log.info("ended %d unauthenticated connections", ended)
            if not connections.accepts:
                raise OSError(
                    f"gRPC accepts no connections any more on port {self.port}, and some wait; its line in this log "
                    "that has 'Failed accept' may say why. The coordinator ends, since only another process can "
                    "accept them: have a supervisor start it again"
                )

    async def _read(self, session: GroupSession, requests: AsyncIterator[bytes]) -> None:
        reason = "its connection closed"
        try:
            async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
                first = await anext(aiter(requests), None)
            if first is not None:
                self._greet(session, wire.group_message(first))
                async for request in requests:
                    data = session.opened(request)
                    small = len(data) <= _SMALL_BYTES
                    self._handle(session, _decoded_small(data) if small else _decoded(data))
        except TimeoutError:
            reason = f"it sent nothing for {FIRST_MESSAGE_TIMEOUT_S:.0f} s"
        except Broken as error:
            # Not the group's fault: treat it as a broken connection, and the group dials again.
            reason = f"its stream cannot be trusted: {error}"
            _unauthenticated_log.warning("session %d of job %r: %s", session.id, session.job, reason)
        except (wire.WireError, machine.IllegalEvent) as error:
            reason = f"it broke the protocol: {error}"
            _unauthenticated_log.warning("session %d: %s", session.id, error)
            session.put(body(Evicted(reason, may_return=False)))
        except Exception:
            reason = "the coordinator failed to handle its message"
            (_log if session.job else _unauthenticated_log).exception("session %d: %s", session.id, reason)
        self._closed(session, reason)

    def _greet(self, session: GroupSession, first: pb.GroupMessage) -> None:
        hello = wire.group_from_proto(first)
        if session.closed:
            return
        if not isinstance(hello, Hello):
            raise machine.IllegalEvent("the first message of a session must be Hello")
        served = (each.job for each in self._sessions.values() if each.job)
        refusal = (
            names_problem(hello)
            or self._admission.refusal(session.id, hello, first.hello)
            or self._jobs.refusal(hello.job)
            or no_room(hello, self._jobs.get(hello.job), served)
        )
        if refusal:
            _unauthenticated_log.warning("session %d from %s: %s", session.id, session.peer, refusal)
            session.put(body(Refused(refusal)))
            session.put(None)
            return
        session.job, session.group = hello.job, hello.group
        session.seals = self._admission.seals(session.id, hello, first.hello)
        self._admission.leave(session.id)
        self._jobs.step(session.job, Received(session.id, hello))

    @property
    def jobs(self) -> Jobs:
        """All jobs, while this coordinator leads."""
        return self._jobs

    @property
    def leader(self) -> str:
        """The address of the coordinator that leads, as far as is known; "" if none does."""
        return self._leading.leader

    @property
    def streams(self) -> tuple[int, int]:
        """How many streams belong to groups, and how many have not been admitted yet."""
        unauthenticated = len(self._admission)
        return len(self._sessions) - unauthenticated, unauthenticated

    def _handle(self, session: GroupSession, message: GroupMessage | Sample) -> None:
        if session.closed:
            return
        if isinstance(message, Sample):
            if self._observer is not None:
                self._observer.sampled(session.job, session.group, message)
            return
        self._jobs.step(session.job, Received(session.id, message))
        if isinstance(message, Heartbeat):
            session.put(ALIVE)

    def _closed(self, session: GroupSession, reason: str) -> None:
        self._admission.leave(session.id)
        if self._sessions.pop(session.id, None) is None or not session.job:
            return
        if silent_s := self._jobs.overdue_s(session.id):
            reason = f"no heartbeat for {silent_s:.1f} s"  # and no answer to a ping
        self._jobs.step(session.job, SessionClosed(session.id, reason))

    def sessions_of(self, job: str) -> Sequence[SessionId]:
        return [
            session.id for session in self._sessions.values() if session.job == job and not session.closed
        ]

    def do(self, effects: Sequence[Effect]) -> None:
        # A message to a thousand groups is encoded once: a thousand copies of a quorum would take seconds.
        made: dict[tuple[int, int], Body] = {}
        for effect in effects:
            match effect:
                case Send(session_id, message):
                    if session := self._sessions.get(session_id):
                        quorum = wire.quorum_of(message)
                        base = None if quorum is None else session.carried
                        key = (id(message), id(base))
                        if key not in made:
                            made[key] = body(message, base)
                        session.put(made[key])
                        session.carried = quorum or session.carried
                case Close(session_id):
                    if session := self._sessions.get(session_id):
                        session.put(None)
                case Log(text):
                    self._job_log.say(text)
                case Persist():
                    pass  # the journal has done it


def _reader_ended(session: GroupSession, reader: asyncio.Task[None]) -> None:
    """End the stream when its reader has ended."""
    session.put(None)
    if not reader.cancelled() and (error := reader.exception()) is not None:
        logger = _log if session.job else _unauthenticated_log
        logger.error("session %d: the coordinator failed to close it", session.id, exc_info=error)


def _decoded(data: bytes) -> GroupMessage | Sample:
    return wire.group_from_proto(wire.group_message(data))


# Cached because all groups of a job send the same vote in a step, and the same heartbeat.
_decoded_small = functools.lru_cache(maxsize=256)(_decoded)
