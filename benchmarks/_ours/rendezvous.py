"""Many groups in one process: each has a separate stream to a coordinator, votes, and waits for the decision.

The messages and the library are the same as in real groups. Only the bytes are encoded once for all, because one
process stands in for as many machines as there are groups.
"""

import asyncio
import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import grpc.aio
import uvloop
from jaxft_protocol import messages as m
from jaxft_protocol import wire
from jaxft_protocol.host.admission import allow_all_descriptors
from jaxft_protocol.proto import coordinator_pb2 as pb

from benchmarks._worker import serve

_METHOD = f"/{pb.DESCRIPTOR.services_by_name['Coordinator'].full_name}/Session"
# A connection for each group, as if each were a separate process.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_JOB = "rendezvous"
_JOIN_TIMEOUT_S = 90.0
_ROUND_TIMEOUT_S = 30.0
# The coordinator limits the number of connections that are not yet identified.
_GREETED_AT_ONCE = 100
# How often due heartbeats are sent.
_LOOK_S = 0.05

_ALIVE = wire.coordinator_to_proto(m.Alive()).SerializeToString()


class _Group:
    """One group's stream, with handmade messages."""

    def __init__(self, address: str, number: int) -> None:
        self.number = number
        self.heartbeat_s = 0.0  # when the next heartbeat is due
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._call = self._channel.stream_stream(_METHOD)()  # bytes in, bytes out

    async def say(self, data: bytes) -> None:
        await self._call.write(data)

    async def read(self) -> bytes:
        data = await self._call.read()
        if not isinstance(data, bytes):
            raise ConnectionError(f"the coordinator has ended the stream of group {self.number}")
        return data

    async def close(self) -> None:
        await self._channel.close()


class _Groups:
    """All groups of a job. Votes and heartbeats are written in turn, as gRPC requires."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._quorum_id, self._step = m.QuorumId(0), m.Step(0)
        self._heartbeat_s = 1.0
        self._samples = False  # the coordinator wants them
        self._expected = b""
        self._missing = 0
        self._decided: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, address: str, groups: int) -> float:
        """Open the streams and found the job; return how many seconds that took."""
        began_s = time.perf_counter()
        self._tasks.add(asyncio.create_task(self._stay_alive()))
        for first in range(0, groups, _GREETED_AT_ONCE):
            coming = [_Group(address, n) for n in range(first, min(groups, first + _GREETED_AT_ONCE))]
            await asyncio.gather(*(self._greet(group) for group in coming))
            self._groups += coming
        # All groups hold the same first state; as many shards as groups.
        join = m.Join(m.Step(0), 0xD1, min_replicas=groups, total_shards=groups)
        async with self._turn:
            await asyncio.gather(*(group.say(_encoded(join)) for group in self._groups))
        quorums = set(await asyncio.gather(*(self._first_quorum(group) for group in self._groups)))
        quorum = _decoded(quorums.pop())
        if quorums or not isinstance(quorum, m.NewQuorum) or len(quorum.members) != groups:
            raise ValueError(
                f"{groups} groups got {1 + len(quorums)} different quorums instead of a common one"
            )
        self._quorum_id, self._step = quorum.quorum_id, quorum.step
        self._tasks |= {asyncio.create_task(self._read(group)) for group in self._groups}
        return time.perf_counter() - began_s

    async def rounds(self, count: int) -> list[float]:
        """Vote `rounds` times; return the seconds of each round until all groups had the decision."""
        seconds: list[float] = []
        for _ in range(count):
            async with self._turn:
                await self._send_heartbeats()
                seconds.append(await self._round())
        return seconds

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(group.close() for group in self._groups))

    async def _greet(self, group: _Group) -> None:
        name = m.GroupName(f"group-{group.number}")
        challenge = pb.CoordinatorMessage.FromString(await group.read())
        if not challenge.HasField("challenge"):
            raise ValueError(f"{name} was not challenged")
        incarnation, address = m.Incarnation(1 + group.number), f"10.0.0.1:{20000 + group.number}"
        await group.say(_encoded(m.Hello(_JOB, name, incarnation, address)))
        welcome = _decoded(await group.read())
        if not isinstance(welcome, m.Welcome):
            raise ValueError(f"{name} was not accepted: {welcome}")
        self._heartbeat_s, self._samples = welcome.heartbeat_interval_ms / 1000, welcome.samples
        group.heartbeat_s = time.monotonic() + self._heartbeat_s

    async def _first_quorum(self, group: _Group) -> bytes:
        while True:
            data = await group.read()
            # A thousand groups each get a quorum of a thousand members: only one is decoded, for all.
            if pb.CoordinatorMessage.FromString(data).HasField("new_quorum"):
                return data
            if not isinstance(message := _decoded(data), m.Waiting | m.Alive):
                raise ValueError(f"group {group.number} waited for a quorum and got {message}")

    async def _round(self) -> float:
        vote = _encoded(m.Vote(self._quorum_id, self._step, ok=True))
        commit = m.Commit(self._quorum_id, self._step)
        self._expected = wire.coordinator_to_proto(commit).SerializeToString()
        self._missing = len(self._groups)
        self._decided = asyncio.get_running_loop().create_future()
        began_s = time.perf_counter()
        votes = [asyncio.create_task(group.say(vote)) for group in self._groups]
        async with asyncio.timeout(_ROUND_TIMEOUT_S):
            await self._decided
        took_s = time.perf_counter() - began_s
        await asyncio.gather(*votes)
        self._step = m.Step(self._step + 1)
        return took_s

    async def _read(self, group: _Group) -> None:
        try:
            while True:
                data = await group.read()
                if data == self._expected:
                    self._missing -= 1
                    if not self._missing and self._decided is not None:
                        self._decided.set_result(None)
                elif data != _ALIVE and not isinstance(_decoded(data), m.AllComputed):
                    raise ValueError(f"group {group.number} got {_decoded(data)} in step {self._step}")
        except Exception as error:
            if self._decided is not None and not self._decided.done():
                self._decided.set_exception(error)
            raise

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            async with self._turn:
                await self._send_heartbeats()

    async def _send_heartbeats(self) -> None:
        now_s = time.monotonic()
        due = [group for group in self._groups if group.heartbeat_s <= now_s]
        for group in due:
            group.heartbeat_s = now_s + self._heartbeat_s
        if due:
            heartbeat = _encoded(m.Heartbeat(self._quorum_id, self._step))
            await asyncio.gather(*(group.say(heartbeat) for group in due))
        if due and self._samples:
            values = {"loss": 2.5}
            sample = m.Sample(self._step, 10, 10, 10, 0, 1.0, 0.1, 0.01, 0.1, values=values)
            await asyncio.gather(*(group.say(_encoded(sample)) for group in due))


def _encoded(message: m.GroupMessage | m.Sample) -> bytes:
    return wire.group_to_proto(message).SerializeToString()


def _decoded(data: bytes) -> m.CoordinatorMessage:
    return wire.coordinator_from_proto(pb.CoordinatorMessage.FromString(data))


def main() -> None:
    allow_all_descriptors()
    loop = uvloop.new_event_loop()
    gc.freeze()
    gc.set_threshold(50_000)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    groups = _Groups()

    def run(coroutine: Any, timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)

    serve(
        SimpleNamespace(
            join=lambda **arguments: run(groups.join(**arguments), _JOIN_TIMEOUT_S),
            rounds=lambda count: run(groups.rounds(count), count * _ROUND_TIMEOUT_S),
        )
    )
    run(groups.close(), _ROUND_TIMEOUT_S)


if __name__ == "__main__":
    main()
