"""A man in the middle between a group and its coordinator, who relays their greeting and then speaks itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import grpc.aio
import pytest
from jaxft_coordinator.shell._server import Server
from jaxft_coordinator.shell._services import SERVICE
from jaxft_protocol import wire
from jaxft_protocol.messages import Evicted, Heartbeat, Leave

import jaxft
from tests import patience
from tests.security.groups import KEY, SECRET, run, serving


class Relay:
    """Carries a stream between a group and the coordinator, and may insert messages both ways."""

    def __init__(self, port: int) -> None:
        self._coordinator = f"localhost:{port}"
        self.to_group: list[bytes] = []
        self.to_coordinator: list[bytes] = []
        self.streams = 0
        self.port = 0

    async def start(self) -> None:
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self.carry)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0.0)

    async def carry(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        async with grpc.aio.insecure_channel(
            self._coordinator, [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Session")()

            async def upwards() -> None:
                async for request in requests:
                    await call.write(request)

            task = asyncio.create_task(upwards())
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                heard = 0
                while (answer := await call.read()) is not grpc.aio.EOF:
                    await context.write(answer)
                    heard += 1
                    if heard == 2 and self.to_group:  # the challenge and the welcome
                        await context.write(self.to_group.pop())
                    if heard == 2 and self.to_coordinator:
                        await call.write(self.to_coordinator.pop())
            task.cancel()


@contextlib.contextmanager
def relayed() -> Iterator[tuple[Relay, Server]]:
    """A coordinator, and a man in the middle at the address that groups know."""
    context = serving(secret=SECRET)
    server = run(context.__aenter__)
    relay = Relay(server.port)
    run(relay.start)
    try:
        yield relay, server
    finally:
        run(relay.stop)
        run(lambda: context.__aexit__(None, None, None))


def until(condition: Callable[[], bool], what: str) -> None:
    patience.until(condition, what)


def entered(relay: Relay) -> jaxft.Manager:
    return jaxft.Manager(
        f"localhost:{relay.port}", group="g", job="job", network=jaxft.Network(token=KEY.hex())
    )


def test_a_group_does_not_follow_what_a_man_in_the_middle_adds() -> None:
    forged = wire.coordinator_to_proto(Evicted("go away", may_return=False)).SerializeToString()
    with relayed() as (relay, _):
        relay.to_group.append(forged)
        with entered(relay) as manager:
            session = manager._member.session
            assert session is not None
            until(
                lambda: session._replica.failure is not None or relay.streams > 1,
                "the group to hear the forged word",
            )
            assert session._replica.failure is None, session._replica.failure


@pytest.mark.parametrize("forged", [Leave(finished=True), Heartbeat()])
def test_the_coordinator_does_not_count_what_a_man_in_the_middle_adds(forged: Leave | Heartbeat) -> None:
    """It ends that stream as a broken one; the group dials again, and is still in the job."""
    with relayed() as (relay, server):
        relay.to_coordinator.append(wire.group_to_proto(forged).SerializeToString())
        with entered(relay) as manager:
            session = manager._member.session
            assert session is not None
            until(lambda: relay.streams > 1 and "g" in groups_of(server), "the group to come back")
            assert session._replica.failure is None, session._replica.failure


def groups_of(server: Server) -> set[str]:
    job = server._jobs.get("job")
    return set() if job is None else set(job.groups)
