"""The other gRPC services, limited so that an unauthenticated peer cannot occupy them."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

# Concurrent calls. Tools such as `grpcurl` make short ones.
_MAX_REFLECTIONS = 16


# Typed as missing because grpc_health imports it only where asyncio exists.
class Health(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """Answers health checks. Watch is left out: a watcher that does not read would block the shutdown."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "the coordinator does not support Watch: call Check periodically"
        )


class _Reflection(reflection_pb2_grpc.ServerReflectionServicer):
    """Lists the server's services, for a few clients at a time."""

    def __init__(self, services: tuple[str, ...]) -> None:
        # Typed as missing, as above; and it is a generator, despite its annotation.
        self._servicer: Any = reflection.aio.ReflectionServicer(services)  # pyright: ignore[reportAttributeAccessIssue]
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


def add_reflection(service: str, server: grpc.aio.Server) -> None:
    servicer = _Reflection((service, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
