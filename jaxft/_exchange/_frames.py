"""The header of every frame of an exchange.

A receiver knows from the plan which frames can come next. It packs the headers that it expects and compares
bytes before it reads any payload. A frame of another job, quorum, step or layout, of the wrong size or from the
wrong member, is refused, and the error names the fields that differ.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache

VERSION = 4
PARTIAL, RESULT, CONTINUE, PROGRESS = 1, 2, 3, 4
_MAGIC = b"JXFT"

# magic, version, kind, sender, job, quorum, step, layout, node (start, stop), region, length, offset
_HEADER = struct.Struct("<4sBBHQQQQIIIIQ")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 64


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header, in wire order."""

    magic: bytes
    version: int
    kind: int  # PARTIAL: of a contribution or partial sum; RESULT: of the result; and below
    sender: int  # the member's number in the quorum
    job: int  # a tag of the job's name
    quorum_id: int
    step: int
    layout: int  # a tag of the layout's digest
    node_start: int
    node_stop: int
    region: int
    length_bytes: int
    offset: int  # in elements of the region; CONTINUE: how many exchanges have ended over the connection


@dataclass(frozen=True, slots=True)
class Stamp:
    """The fields that all frames of one member in one exchange share."""

    sender: int
    job: int
    quorum_id: int
    step: int
    layout: int

    def header(
        self, kind: int, *, node: tuple[int, int], region: int, offset: int, length_bytes: int
    ) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            VERSION,
            kind,
            self.sender,
            self.job,
            self.quorum_id,
            self.step,
            self.layout,
            *node,
            region,
            length_bytes,
            offset,
        )

    def header_to_continue(self, exchanges: int) -> bytes:
        return self.header(CONTINUE, node=(0, 0), region=0, offset=exchanges, length_bytes=0)

    def progress_header(self) -> bytes:
        """Of a frame that shows that bytes of an earlier round move (`_grid.py`): the same in all steps."""
        return Stamp(self.sender, self.job, self.quorum_id, 0, 0).header(
            PROGRESS, node=(0, 0), region=0, offset=0, length_bytes=0
        )


@lru_cache(maxsize=64)
def tag(text: str) -> int:
    """A 64-bit tag of a name or digest."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def difference(received: bytes, expected: Sequence[bytes]) -> str:
    """Name the fields in which a header differs from the most similar of the expected headers."""
    if received[: len(_MAGIC)] != _MAGIC:
        return f"it begins with {received[:16]!r}, which is not a frame of an exchange"
    got = Header(*_HEADER.unpack(received))
    if not expected:
        return f"none was expected, received {got}"
    differences = [_differing_fields(got, Header(*_HEADER.unpack(header))) for header in expected]
    return ", ".join(min(differences, key=len))


def _differing_fields(got: Header, wanted: Header) -> list[str]:
    pairs = zip(fields(Header), astuple(got), astuple(wanted), strict=True)
    return [f"{field.name} is {one}, expected {other}" for field, one, other in pairs if one != other]
