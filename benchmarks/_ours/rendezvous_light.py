"""Many groups in one process, without a gRPC library, so that what is measured is the server.

In a job each group has a machine of its own, and its client costs the others nothing. Here the clients of all groups
share two cores with the server, and a library's clients take about as much of them as the server does.
"""

import functools
import selectors
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from jaxft_protocol import messages as m
from jaxft_protocol import wire
from jaxft_protocol.admission import allow_all_descriptors
from jaxft_protocol.proto import coordinator_pb2 as pb

from benchmarks._ours import _http2
from benchmarks._ours._http2 import Connection
from benchmarks._worker import serve

_TIMEOUT_S = 60.0
_LOOK_S = 0.05
_GREETED_AT_ONCE = 100
_JOB = "rendezvous"
_PATH = "/jaxft.v1.Coordinator/Session"
_PEERS_PATH = "/torchft.LighthouseService/Quorum"

_ALIVE = wire.coordinator_to_proto(m.Alive()).SerializeToString()


class _Clients:
    """Connections, and what has come on each since it was last asked."""

    def __init__(self) -> None:
        self.all: list[Connection] = []
        self.came: list[bytes] = []
        self.ended: list[bool] = []
        self._selector = selectors.DefaultSelector()

    def dial(self, address: str) -> int:
        """Open one more; return its number."""
        host, _, port = address.rpartition(":")
        self.all.append(Connection(host, int(port)))
        self._selector.register(self.all[-1].sock, selectors.EVENT_READ, len(self.all) - 1)
        self.came.append(b"")
        self.ended.append(False)
        return len(self.all) - 1

    def poll(self, timeout_s: float) -> Iterable[int]:
        """Take what comes within `timeout_s`; yield the numbers of those to whom something came."""
        for key, _ in self._selector.select(timeout_s):
            number = key.data
            for kind, flags, payload in self.all[number].take():
                if kind == _http2.DATA:
                    self.came[number] += payload
                self.ended[number] |= bool(flags & _http2.END_STREAM)
            yield number

    def messages(self, number: int) -> Iterable[bytes]:
        """Take the whole messages of those bytes."""
        while len(self.came[number]) >= 5:
            (length,) = struct.unpack(">I", self.came[number][1:5])
            if len(self.came[number]) < 5 + length:
                return
            message, self.came[number] = self.came[number][5 : 5 + length], self.came[number][5 + length :]
            yield message


class _Ours:
    """Groups of a job, with a stream each."""

    def __init__(self) -> None:
        self._clients = _Clients()
        self._quorum_id, self._step = m.QuorumId(0), m.Step(0)
        self._heartbeat_s = 1.0
        self._due_s: list[float] = []
        self._turn = threading.Lock()

    def join(self, address: str, groups: int) -> None:
        for first in range(0, groups, _GREETED_AT_ONCE):
            numbers = range(first, min(groups, first + _GREETED_AT_ONCE))
            with self._turn:
                self._greet(address, numbers)
            if first == 0:
                threading.Thread(target=self._stay_alive, daemon=True).start()
        join = m.Join(m.Step(0), 0xD1, min_replicas=groups, total_shards=groups)
        with self._turn:
            self._say_all(range(groups), join)
            told = self._hear_all(range(groups), "new_quorum")
        decoded = pb.CoordinatorMessage.FromString(told[0]).new_quorum
        if len(set(told)) != 1 or len(decoded.members) != groups:
            raise ValueError(f"{groups} groups were told of {len(set(told))} quorums, not of one of them all")
        self._quorum_id, self._step = m.QuorumId(decoded.quorum_id), m.Step(decoded.step)

    def rounds(self, count: int) -> list[float]:
        seconds: list[float] = []
        for _ in range(count):
            with self._turn:
                self._send_heartbeats()
                seconds.append(self._round())
        return seconds

    def _greet(self, address: str, numbers: range) -> None:
        for number in numbers:
            assert self._clients.dial(address) == number
            self._clients.all[number].send(_http2.request_frame(1, _PATH, address))
        self._hear_all(numbers, "challenge")
        for number in numbers:
            name, incarnation = m.GroupName(f"group-{number}"), m.Incarnation(1 + number)
            self._say_all([number], m.Hello(_JOB, name, incarnation, f"10.0.0.1:{20000 + number}"))
        welcome = pb.CoordinatorMessage.FromString(self._hear_all(numbers, "welcome")[0]).welcome
        self._heartbeat_s = welcome.heartbeat_interval_ms / 1000
        self._due_s += [time.monotonic() + self._heartbeat_s for _ in numbers]

    def _hear_all(self, numbers: range, kind: str) -> list[bytes]:
        """Wait until each has a message of that kind, and return them. What only tells how it stands is skipped."""
        heard: dict[int, bytes] = {}
        deadline_s = time.monotonic() + _TIMEOUT_S
        while len(heard) < len(numbers):
            for number in self._clients.poll(deadline_s - time.monotonic()):
                for data in self._clients.messages(number):
                    found = pb.CoordinatorMessage.FromString(data).WhichOneof("kind")
                    if found == kind:
                        heard[number] = data
                    elif found not in ("alive", "waiting"):
                        raise ValueError(f"group {number} waited for {kind} and heard {found}")
            self._send_heartbeats()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(heard)} of {len(numbers)} groups have heard {kind}")
        return [heard[number] for number in numbers]

    def _round(self) -> float:
        commit = m.Commit(self._quorum_id, self._step)
        expected = wire.coordinator_to_proto(commit).SerializeToString()
        clients, missing = self._clients, len(self._clients.all)
        deadline_s = time.monotonic() + _TIMEOUT_S
        began_s = time.perf_counter()
        self._say_all(range(missing), m.Vote(self._quorum_id, self._step, ok=True))
        while missing:
            for number in clients.poll(deadline_s - time.monotonic()):
                for message in clients.messages(number):
                    if message == expected:
                        missing -= 1
                    elif message != _ALIVE:
                        raise ValueError(f"group {number} heard {message!r} in step {self._step}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{missing} groups have no decision")
        took_s = time.perf_counter() - began_s
        self._step = m.Step(self._step + 1)
        return took_s

    def _say_all(self, numbers: Iterable[int], message: m.GroupMessage) -> None:
        data = _http2.grpc_frame(1, wire.group_to_proto(message).SerializeToString())
        for number in numbers:
            self._clients.all[number].send(data)

    def _send_heartbeats(self) -> None:
        now_s = time.monotonic()
        due = [number for number, due_s in enumerate(self._due_s) if due_s <= now_s]
        for number in due:
            self._due_s[number] = now_s + self._heartbeat_s
        if due:
            self._say_all(due, m.Heartbeat(self._quorum_id, self._step))

    def _stay_alive(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._turn:
                self._send_heartbeats()


class _Peers:
    """TorchFT's groups: a call each, on a connection each."""

    def __init__(self) -> None:
        self._clients = _Clients()
        self._address = ""
        self._stream = 1
        self._quorum_id: bytes | None = None

    def join(self, address: str, groups: int) -> None:
        self._address = address.removeprefix("http://")
        for _ in range(groups):
            self._clients.dial(self._address)
        self._round()

    def rounds(self, count: int) -> list[float]:
        return [self._round() for _ in range(count)]

    def _round(self) -> float:
        clients, groups = self._clients, len(self._clients.all)
        headers = _http2.request_frame(self._stream, _PEERS_PATH, self._address)
        calls = [headers + _http2.grpc_frame(self._stream, _quorum_request(n), 1) for n in range(groups)]
        clients.came, clients.ended = [b""] * groups, [False] * groups
        deadline_s = time.monotonic() + _TIMEOUT_S
        began_s = time.perf_counter()
        for connection, call in zip(clients.all, calls, strict=True):
            connection.send(call)
        missing = groups
        while missing:
            for number in clients.poll(deadline_s - time.monotonic()):
                missing -= clients.ended[number]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{missing} groups have no quorum")
        took_s = time.perf_counter() - began_s
        self._stream += 2
        self._check(groups)
        return took_s

    def _check(self, groups: int) -> None:
        """All were told the same, which has every group in it."""
        told = set(self._clients.came)
        if len(told) != 1 or next(iter(told)).count(b"group-") != groups:
            raise ValueError(f"{groups} groups were told of {len(told)} quorums, not of one of them all")


def _quorum_request(number: int) -> bytes:
    """`LighthouseQuorumRequest{QuorumMember{replica_id, address, store_address, world_size = 1}}`"""
    address = f"http://10.0.0.1:{20000 + number}"
    texts = ((1, f"group-{number}"), (2, address), (3, address))
    member = (
        b"".join(bytes([place << 3 | 2, len(text)]) + text.encode() for place, text in texts) + b"\x28\x01"
    )
    return bytes([1 << 3 | 2, len(member)]) + member


def main() -> None:
    allow_all_descriptors()
    ours, peers = _Ours(), _Peers()
    joined: list[_Ours | _Peers] = []

    def join(whose: _Ours | _Peers, **arguments: Any) -> None:
        whose.join(**arguments)
        joined.append(whose)

    serve(
        {
            "join": functools.partial(join, ours),
            "join_peer": functools.partial(join, peers),
            "rounds": lambda count: joined[0].rounds(count),
        }
    )


if __name__ == "__main__":
    main()
