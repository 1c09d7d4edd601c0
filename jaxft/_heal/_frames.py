"""The bytes of a heal connection: requests of fixed size, and a header of fixed size before each answer's payload.

A tag of both (`_seals.py`) follows: nothing is used before it has been verified. A donor describes the state that it
keeps with a *manifest*, as JSON: its step, the shape and dtype of each leaf, which stripe of it this donor keeps, and
whether the state is still live, so that the rest can be asked for too.
"""

import enum
import json
import struct
from dataclasses import dataclass

from jaxft_protocol.messages import Stripe
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._leaf_types import LeafType

MAGIC = 0x4A58_4833  # "JXH3"
_REQUEST = struct.Struct("!IBxxxQQIIII")
_REPLY = struct.Struct("!IBxxxII")
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size
MAX_TEXT_BYTES = 10_000


class Kind(enum.IntEnum):
    MANIFEST = 1
    STATE = 2
    MEANS = 3
    HOLDS = 4  # the joiner holds state `step`; has no answer
    EDITS = 5  # the leaves that were edited before step `step`


class Status(enum.IntEnum):
    OK = 0
    NOT_YET = 1  # ask again
    GONE = 2  # this donor no longer keeps it
    BAD = 3  # the request is invalid
    NOT_KEPT = 4  # this donor no longer has more than its stripe


class BadFrame(ConnectionError):
    """The peer sent bytes that violate the protocol."""


class Damaged(BadFrame):
    """A payload does not match its tag."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a joiner: chunks `first` to `first + count` of the parts that belong to some lanes.

    Without a span, leaves are whole: both groups have one process.
    """

    kind: Kind
    heal_id: int
    step: int
    first: int = 0
    count: int = 0
    span: Span | None = None

    def encode(self) -> bytes:
        lanes = (0, 0) if self.span is None else (self.span.start, self.span.stop)
        return _REQUEST.pack(MAGIC, self.kind, self.heal_id, self.step, self.first, self.count, *lanes)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> "Request":
        magic, kind, heal_id, step, first, count, start, stop = _REQUEST.unpack(data)
        if magic != MAGIC or kind not in Kind._value2member_map_:
            raise BadFrame(f"a request of kind {kind} with magic {magic:#x} is not a request for healing")
        if start >= stop > 0 or start > stop:
            raise BadFrame(f"a request for the lanes from {start} up to {stop} asks for none")
        return Request(Kind(kind), heal_id, step, first, count, Span(start, stop) if stop else None)


@dataclass(frozen=True, slots=True)
class Reply:
    status: Status
    index: int
    length: int

    def encode(self) -> bytes:
        return _REPLY.pack(MAGIC, self.status, self.index, self.length)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> "Reply":
        magic, status, index, length = _REPLY.unpack(data)
        if magic != MAGIC or status not in Status._value2member_map_:
            raise BadFrame(f"a reply of status {status} with magic {magic:#x} is not a reply of healing")
        return Reply(Status(status), index, length)


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    leaves: list[LeafType]
    stripe: Stripe
    live: bool

    def encode(self) -> str:
        leaves = [[list(leaf.shape), leaf.dtype] for leaf in self.leaves]
        stripe = [self.stripe.number, self.stripe.count]
        return json.dumps({"step": self.step, "leaves": leaves, "stripe": stripe, "live": self.live})


def read_manifest(received: str) -> Manifest:
    """Parse a donor's manifest. Raises BadFrame if it is not one."""
    try:
        found = json.loads(received)
        leaves = [LeafType(tuple(map(int, shape)), str(dtype)) for shape, dtype in found["leaves"]]
        number, count = map(int, found["stripe"])
        if not 0 <= number < count:
            raise BadFrame(f"its manifest names stripe {number} of {count}, which keeps nothing")
        return Manifest(int(found["step"]), leaves, Stripe(number, count), bool(found["live"]))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise BadFrame(f"its manifest cannot be read ({error!r}): {received[:80]!r}") from error
