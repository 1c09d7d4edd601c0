"""The bytes of a heal connection: fixed requests, and a fixed header before each answer's payload.

The tag of both (`_seal.py`) follows: nothing is used before it has been compared.
"""

import enum
import struct
from dataclasses import dataclass

MAGIC = 0x4A58_4832  # "JXH2"
_REQUEST = struct.Struct("!IBxxxQQII")
_REPLY = struct.Struct("!IBxxxII")
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size
MAX_TEXT_BYTES = 10_000


class Kind(enum.IntEnum):
    MANIFEST = 1
    STATE = 2
    MEANS = 3
    HOLDS = 4  # the joiner holds state `step`; not answered


class Status(enum.IntEnum):
    OK = 0
    NOT_YET = 1  # ask again
    GONE = 2  # this donor no longer keeps it
    BAD = 3  # a request that makes no sense


class BadFrame(ConnectionError):
    """The other end does not speak this protocol, or not any more."""


@dataclass(frozen=True, slots=True)
class Request:
    kind: Kind
    heal_id: int
    step: int
    first: int = 0
    count: int = 0

    def encode(self) -> bytes:
        return _REQUEST.pack(MAGIC, self.kind, self.heal_id, self.step, self.first, self.count)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> "Request":
        magic, kind, heal_id, step, first, count = _REQUEST.unpack(data)
        if magic != MAGIC or kind not in Kind._value2member_map_:
            raise BadFrame(f"a request of kind {kind} with magic {magic:#x} is none of healing's")
        return Request(Kind(kind), heal_id, step, first, count)


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
            raise BadFrame(f"a reply of status {status} with magic {magic:#x} is none of healing's")
        return Reply(Status(status), index, length)
