"""The exchange in C: `lane/loop.c`, given the plan, turn by turn. It does what `_python_lane.py` does."""

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from functools import cache

import xxhash

from jaxft._exchange import _lane_structs as c
from jaxft._exchange._compiled import Library
from jaxft._exchange._frames import HEADER_BYTES, difference
from jaxft._exchange._links import Links
from jaxft._exchange._plan import PeerLost, Task, Turn
from jaxft._transport._seals import Checksums, Connection, Macs

_FAILED = 3  # LANE_FAILED


class CompiledLane:
    def __init__(self, library: Library, links: Links, task: Task) -> None:
        self._c = library.c
        self._connections = links.connections
        self.task = task  # its memory is read and written
        shards = task.partials.shards
        self._sheet = links.sheet(
            task.plan or links.plan(task.layout, shards, task.strands), task.layout, shards
        )
        self._sheet.begin(task.step, task.partials, task.result, task.kept)
        self._looks = (c.Look * len(links.members))()
        plan = self._sheet.plan
        for number, connection in links.connections.items():
            self._sheet.members[number].fd = connection.sock.fileno()
        tags = [tags for peer in links.connections.values() for tags in (peer.outgoing, peer.incoming)]
        self._sheet.heed(progress=task.heeds_progress)
        plan.abort_fd = links.abort.fileno()
        plan.tag_bytes = tags[0].size_bytes
        plan.secrets = _secrets(links.connections, len(links.members)) if library.macs else None
        plan.digest = _digest() if all(isinstance(each, Checksums) for each in tags) else None
        # The plan outlives this lane, so it must not hold what holds the result.
        self._tagger = _Tagger(links.connections)
        plan.tag = c.TAG(self._tagger.make)
        self._lane = self._c.lane_open(ctypes.byref(plan))
        if not self._lane:
            raise MemoryError("There is no memory for an exchange.")

    def turn(self, seconds: float) -> Turn:
        turn = self._c.lane_turn(self._lane, seconds)
        if turn == _FAILED:
            self._raise()
        return Turn(turn)

    def owing(self) -> list[int]:
        looks = self._look()
        return [number for number in self._connections if looks[number].owes]

    def unfinished(self) -> list[int]:
        looks = self._look()
        return [number for number in self._connections if looks[number].is_watched]

    def idle(self) -> list[int]:
        looks = self._look()
        return [number for number in self._connections if looks[number].is_idle]

    def moved_s(self, number: int) -> float:
        return self._look()[number].moved_s

    def close(self) -> None:
        self._c.lane_close(self._lane)
        self._lane = None

    def _look(self) -> ctypes.Array[c.Look]:
        self._c.lane_looks(self._lane, self._looks)
        return self._looks

    def _raise(self) -> None:
        failure = c.Failure()
        self._c.lane_why(self._lane, ctypes.byref(failure))
        number = failure.member
        match failure.why:
            case c.CLOSED:
                raise PeerLost(number, "closed the connection")
            case c.ERROR:
                raise PeerLost(number, os.strerror(failure.error))
            case c.UNEXPECTED:
                expected = self._sheet.expected(number, results=failure.results, partials=failure.partials)
                text = difference(bytes(failure.header), expected)
                raise PeerLost(number, f"sent an unexpected frame: {text}")
            case c.DAMAGED:
                raise PeerLost(
                    number,
                    "sent a frame whose tag does not match: its data were damaged or changed on the way",
                )
            case c.NO_MEMORY:
                raise MemoryError("There is no memory for a chunk of an exchange.")
            case c.NO_TAG if self._tagger.error is not None:
                raise self._tagger.error
            case c.NO_TREE:
                raise AssertionError("The nodes of the members are not the leaves of one tree.")
            case _:
                raise OSError(failure.error, f"The exchange cannot poll: {os.strerror(failure.error)}.")


def _secrets(connections: Mapping[int, Connection], members: int) -> "ctypes.Array[c.Secret] | None":
    """The keys and sequence numbers for MACs; None if frames have checksums."""
    secrets = (c.Secret * (2 * members))()
    for number, connection in connections.items():
        for direction, tags in enumerate((connection.outgoing, connection.incoming)):
            if not isinstance(tags, Macs):
                return None
            secrets[2 * number + direction] = c.Secret(tags.key, ctypes.pointer(tags.count))
    return secrets


class _Tagger:
    """Makes tags for C, where C cannot."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self.error: BaseException | None = None
        self._connections = connections

    def make(self, member: int, incoming: int, header: int, payload: int, size_bytes: int, out: int) -> int:
        """Write the tag of the next frame. No exception may pass through C."""
        try:
            connection = self._connections[member]
            tags = connection.incoming if incoming else connection.outgoing
            made = tags.tag(_memory(header, HEADER_BYTES), _memory(payload, size_bytes))
            ctypes.memmove(out, made, len(made))
        except BaseException as error:
            self.error = error
            return 1
        return 0


def _memory(at: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size_bytes).from_address(at)).cast("B")


@cache
def _digest() -> int | None:
    """The address of XXH3 in the library that xxhash has loaded; None if it does not export it.

    With the function itself, C needs no lock of the interpreter for a checksum; without, it calls Python for each.
    """
    spec = importlib.util.find_spec("xxhash._xxhash")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    for name in ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed"):
        function = getattr(library, name, None)
        if function is not None and _is_xxh3(function):
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _is_xxh3(function: "ctypes._NamedFuncPointer") -> bool:
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
    function.restype = ctypes.c_uint64
    samples = [(bytes(range(64)), 0), (bytes(range(256)) * 9, 2**64 - 3)]
    return all(
        function(data, len(data), seed) == xxhash.xxh3_64_intdigest(data, seed) for data, seed in samples
    )
