"""An append-only log file: each append is complete or absent. Blocking; call it from a thread.

    file   = header frame frame ...
    header = a line of text that ends with the file's length, in hexadecimal digits, when it was last rewritten
    frame  = MARK length crc payload        length, crc: 4 bytes, big-endian; the crc covers length and payload
    payload = records, one per line         all records of one append, so that they survive a crash together or not

A crash can damage only the last append, because each is on the disk before the next begins. It cannot damage what the
file held when it was rewritten, because that was on the disk before the file was renamed into place. That separates a
torn end from other damage. If an appended frame is invalid and no valid one follows, it is the torn end, was never
acknowledged, and is cut off; any other damage has another cause, and is never repaired by guessing. (A record
contains no control characters, so the mark, which begins with one, never occurs inside a payload.)
"""

import contextlib
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jaxft_protocol.coordinator.job import Record

from jaxft_coordinator.stores import records
from jaxft_coordinator.stores._store import StoreDamaged, too_big

_log = logging.getLogger("jaxft_coordinator")

_HEADER = re.compile(rb"jaxft-coordinator log 1 ([0-9a-f]{16})\n")
HEADER_BYTES = 41
MARK = b"\x1ejax"
_LENGTH_AND_CRC = struct.Struct(">II")
FRAME_BYTES = len(MARK) + _LENGTH_AND_CRC.size
# A quorum of a thousand groups takes 200 KB. A length beyond this is damage, and no memory is allocated for it.
MAX_PAYLOAD_BYTES = 64 << 20
# A log is compacted at 8 MiB; one that could not be, for lack of space, must still be readable.
MAX_LOG_BYTES = 1 << 30

Written = Record | records.Led | records.Unreadable


def header(length: int) -> bytes:
    """Return the header of a file that is rewritten with `length` bytes, header included."""
    return b"jaxft-coordinator log 1 %016x\n" % length


def frame(written: Sequence[Written]) -> bytes:
    """Encode the records of one append as one frame.

    Raises:
        OSError: they are longer than a frame may be.
        RecordError: one of them cannot be encoded.
    """
    payload = b"\n".join(map(_line, written))
    if len(payload) > MAX_PAYLOAD_BYTES:
        limit = f"a log takes {MAX_PAYLOAD_BYTES} at once"
        raise too_big(len(payload), limit, "Stop groups that are not needed")
    return MARK + _LENGTH_AND_CRC.pack(len(payload), _crc(payload)) + payload


def _line(written: Written) -> bytes:
    return written.data if isinstance(written, records.Unreadable) else records.encode(written)


def read(path: Path) -> list[tuple[int, Written]]:
    """Return every record of the log at `path`, in order, each with the byte offset of its frame.

    A torn end, left by a crash, is skipped with a warning. A complete record that cannot be decoded is returned as it
    is if it names its job. Nothing is written.

    Raises:
        StoreDamaged: the log is unreadable in a way that no crash can cause, or the file is not a log.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if size > MAX_LOG_BYTES:
        raise damage(path, 0, f"it has {size} bytes, but a log has at most {MAX_LOG_BYTES}")
    data = path.read_bytes()
    begins = _HEADER.match(data)
    if begins is None:
        raise damage(path, 0, f"it begins with {data[:HEADER_BYTES]!r}, not with the header of a log")
    found: list[tuple[int, Written]] = []
    end = HEADER_BYTES
    for offset, payload in _frames(data):
        try:
            found += [(offset, records.decode_or_keep(line)) for line in payload.split(b"\n")]
        except records.RecordError as error:
            raise damage(path, offset, str(error)) from error
        end = offset + FRAME_BYTES + len(payload)
    rewritten = int(begins[1], 16)
    if end < rewritten:
        raise damage(
            path, end, f"it was complete up to byte {rewritten} when it was created, and cannot be read there"
        )
    if end < len(data):
        _check_end(path, data, end)
    return found


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield offset and payload of each frame, up to the first that is invalid."""
    offset = HEADER_BYTES
    while (payload := _payload_at(data, offset)) is not None:
        yield offset, payload
        offset += FRAME_BYTES + len(payload)


def _payload_at(data: bytes, offset: int) -> bytes | None:
    start = offset + FRAME_BYTES
    if start > len(data) or not data.startswith(MARK, offset):
        return None
    length, crc = _LENGTH_AND_CRC.unpack_from(data, offset + len(MARK))
    if length > MAX_PAYLOAD_BYTES or start + length > len(data):
        return None
    payload = data[start : start + length]
    return payload if _crc(payload) == crc else None


def _check_end(path: Path, data: bytes, end: int) -> None:
    """The frame at `end` is invalid: a crash has torn it, unless a valid one follows."""
    offset = end
    while (offset := data.find(MARK, offset + 1)) >= 0:
        if _payload_at(data, offset) is not None:
            raise damage(
                path, end, f"a record there cannot be read, but a complete one follows at byte {offset}"
            )
    _log.warning(
        "%s: the last %d bytes, from byte %d, cannot be read. They are a record that a crash tore before it was "
        "announced, and are cut off",
        path,
        len(data) - end,
        end,
    )


def damage(path: Path, offset: int, what: str) -> StoreDamaged:
    """Return the error for a log that cannot be read at `offset`."""
    return StoreDamaged(
        f"{path} is damaged at byte {offset}: {what}. The coordinator does not start, because it would forget "
        "decisions. If there is an intact copy of this very file, and not an older one, put it there. If not, move "
        "the file away: each job then starts again from the newest state that its groups hold"
    )


def _crc(payload: bytes) -> int:
    # The length is included, so that a run of zeros is not a valid frame.
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "big")))


@dataclass
class Log:
    """A log open for appending. The next frame goes to `end`, and everything before it is durable."""

    path: Path
    descriptor: int
    end: int
    # A failed append may have left bytes after `end`.
    dirty: bool = False
    # If the machine stopped now, the folder might still name an older file.
    unnamed: bool = True

    @classmethod
    def write_new(cls, path: Path, written: Sequence[Written]) -> Self:
        """Atomically replace the log at `path` by one with these records, and open it. Call `settle` afterwards.

        Raises:
            OSError: the disk is full or failing. The log at `path` is unchanged.
        """
        fresh = path.with_name(path.name + ".new")
        frames = b"".join(frame([record]) for record in written)
        data = header(HEADER_BYTES + len(frames)) + frames
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write(descriptor, data, 0)
            os.fsync(descriptor)
            os.replace(fresh, path)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        return cls(path, descriptor, len(data))

    def settle(self) -> None:
        """Return once this file's name is durable too.

        Raises:
            OSError: the disk is failing. Try again before relying on what was appended.
        """
        if not self.unnamed:
            return
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.unnamed = False

    def append(self, data: bytes) -> None:
        """Append one frame durably.

        Raises:
            OSError: the disk is full or failing. Bytes already written are cut off again, now or before the next
                append.
        """
        self.settle()
        if self.dirty:
            os.ftruncate(self.descriptor, self.end)
        self.dirty = True
        try:
            _write(self.descriptor, data, self.end)
            os.fdatasync(self.descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # the next append tries again
                os.ftruncate(self.descriptor, self.end)
                self.dirty = False
            raise
        self.end += len(data)
        self.dirty = False

    @property
    def replaced(self) -> bool:
        """Whether the file was replaced, deleted or overwritten: appended records would be lost."""
        size = os.fstat(self.descriptor).st_size
        overwritten = size < self.end or (size > self.end and not self.dirty)
        return overwritten or not is_at(self.descriptor, self.path)

    def close(self) -> None:
        os.close(self.descriptor)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    # After a short write (a full disk, a limit on file size) the next call raises the reason.
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    ours = os.fstat(descriptor)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
