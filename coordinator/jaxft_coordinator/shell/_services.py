"""The gRPC server of the coordinator: its options, its port, and the services of gRPC itself.

Health checks and reflection are limited, so that an unauthenticated peer cannot occupy them.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from jaxft_protocol.host.tls import Pem
from jaxft_protocol.proto import coordinator_pb2 as pb

from jaxft_coordinator.shell import limits

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
# Concurrent calls. Tools such as `grpcurl` make short ones.
_MAX_REFLECTIONS = 16
_OPTIONS = [
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", limits.MAX_STREAMS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", 1000 * limits.HANDSHAKE_TIMEOUT_S),
    # How often a client's keepalive may ping.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two coordinators on one port would each see half of a job.
    ("grpc.so_reuseport", 0),
]


# Typed as missing because grpc_health imports it only where asyncio exists.
class Health(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """Answers health checks. Watch is left out: a watcher that does not read would block the shutdown."""

    async def Watch(self, _: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "the coordinator does not support Watch: call Check periodically"
        )


def make_server(session: Callable[..., Any], health: Health, heartbeat_timeout_s: float) -> grpc.aio.Server:
    """Return a server whose streams `session` serves, as bytes: a message for many groups is encoded once."""
    connections = ("grpc.max_allowed_incoming_connections", limits.max_connections())
    server = grpc.aio.server(options=[*_OPTIONS, *_pings(heartbeat_timeout_s), connections])
    handlers = {"Session": grpc.stream_stream_rpc_method_handler(session)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(), server)
    return server


def _pings(heartbeat_timeout_s: float) -> list[tuple[str, int]]:
    """End a stream whose peer answers no ping, as soon as its heartbeats have been missing for the timeout.

    gRPC answers pings in C, without Python's lock. So code that holds it (`json.loads` of a long text, garbage
    collection) delays heartbeats, but ends no stream; a process that is stopped, or has no network, answers none.
    """
    # A heartbeat comes every third of the timeout, and puts off the ping. Two may be lost.
    idle_ms, answer_ms = round(400 * heartbeat_timeout_s), round(600 * heartbeat_timeout_s)
    return [
        ("grpc.keepalive_time_ms", max(1, idle_ms)),
        ("grpc.keepalive_timeout_ms", max(1, answer_ms)),
        ("grpc.http2.ping_timeout_ms", max(1, answer_ms)),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def add_port(server: grpc.aio.Server, bind: str, tls: Pem | None) -> int:
    """Bind `server` to an address; return its port.

    Raises:
        OSError: the address cannot be bound.
    """
    try:
        if tls is None:
            return server.add_insecure_port(bind)
        assert tls.key is not None
        assert tls.cert is not None
        pairs = [(tls.key, tls.cert)]
        return server.add_secure_port(
            bind,
            grpc.ssl_server_credentials(
                pairs, root_certificates=tls.ca, require_client_auth=tls.ca is not None
            ),
        )
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {bind!r}: {str(error).rstrip('.')}. For --bind, name an address of this machine, such "
            "as localhost:29510, or [::]:29510 for all of them, and a port that no other program has (ss -ltnp)"
        ) from error


class _Reflection(reflection_pb2_grpc.ServerReflectionServicer):
    """Lists the server's services, for a few clients at a time."""

    def __init__(self) -> None:
        # Typed as missing, as above; and it is a generator, despite its annotation.
        made = reflection.aio.ReflectionServicer  # pyright: ignore[reportAttributeAccessIssue]
        self._servicer: Any = made((SERVICE, reflection.SERVICE_NAME))
        self._running = 0

    async def ServerReflectionInfo(
        self,
        request_iterator: AsyncIterator[reflection_pb2.ServerReflectionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        if self._running >= _MAX_REFLECTIONS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many reflection calls at once: try again later"
            )
        self._running += 1
        try:
            async for answer in self._servicer.ServerReflectionInfo(request_iterator, context):
                yield answer
        finally:
            self._running -= 1
