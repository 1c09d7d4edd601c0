"""The services beside the coordinator's own, held so that no stranger can sit in them for ever."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

# Calls at once, which `grpcurl` and its like make for a moment.
_MAX_REFLECTIONS = 16


# Typed as missing because grpc_health imports it only where asyncio exists.
class Health(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """Answers checks. Watching is left out: a watcher that reads nothing would keep the coordinator from stopping."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask with Check, every so often")


class _Reflection(reflection_pb2_grpc.ServerReflectionServicer):
    """Tells which services there are, to a few at a time."""

    def __init__(self, services: tuple[str, ...]) -> None:
        # Typed as missing, as above; and it is a generator, whatever its annotation says.
        self._servicer: Any = reflection.aio.ReflectionServicer(services)  # pyright: ignore[reportAttributeAccessIssue]
        self._running = 0

    async def ServerReflectionInfo(
        self,
        request_iterator: AsyncIterator[reflection_pb2.ServerReflectionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        if self._running >= _MAX_REFLECTIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask what there is; try again")
        self._running += 1
        try:
            async for answer in self._servicer.ServerReflectionInfo(request_iterator, context):
                yield answer
        finally:
            self._running -= 1


def add_reflection(service: str, server: grpc.aio.Server) -> None:
    servicer = _Reflection((service, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
