"""One append-only file of records, each append whole or not there at all. Blocking; the caller brings the thread.

    file   = header frame frame ...
    header = a line of text that ends in a length, in hexadecimal digits: the file had it when it was rewritten
    frame  = MARK length crc payload        length, crc: 4 bytes, big-endian; the crc covers length and payload
    payload = records, one a line           all records of one append: so they survive a crash together or not

A crash can only spoil the last append, because each is on the disk before the next begins; and it cannot spoil what
stood there when the file was rewritten, because that was on the disk before it got its name. That tells a torn end
from damage. If a frame that was appended does not read and no whole one follows, it is the end, never acknowledged,
and is cut off; anything else has been done to the file by something else, and nobody may guess. (A record holds no
control character, so the mark, which begins with one, never stands inside a payload.)
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
# A quorum of a thousand groups is saved in 200 KB. A length beyond this is damage, and no memory is taken for it.
MAX_PAYLOAD_BYTES = 64 << 20
# A log is compacted at 8 MiB; one that could not be for lack of space still has to be readable.
MAX_LOG_BYTES = 1 << 30

Written = Record | records.Led | records.Unreadable


def header(length: int) -> bytes:
    """Return the beginning of a file that has `length` bytes, this header included, when it is rewritten."""
    return b"jaxft-coordinator log 1 %016x\n" % length


def frame(written: Sequence[Written]) -> bytes:
    """Return `written` as the one frame of one append.

    Raises:
        OSError: they are longer than a frame may be.
        RecordError: one of them cannot be written down.
    """
    payload = b"\n".join(map(_line, written))
    if len(payload) > MAX_PAYLOAD_BYTES:
        limit = f"a log takes {MAX_PAYLOAD_BYTES} at once"
        raise too_big(len(payload), limit, "Are there so many groups? Stop those that nobody needs")
    return MARK + _LENGTH_AND_CRC.pack(len(payload), _crc(payload)) + payload


def _line(written: Written) -> bytes:
    return written.data if isinstance(written, records.Unreadable) else records.encode(written)


def read(path: Path) -> list[tuple[int, Written]]:
    """Return every record of the log at `path`, in order, each with the offset of its frame in bytes.

    An end that a crash has torn is left out, with a warning. A whole record of a job that does not decode comes back
    as it is. Nothing is written.

    Raises:
        StoreDamaged: it holds something that does not read, and that no crash can have torn; or it is no such log.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size > MAX_LOG_BYTES:
        raise damage(path, 0, f"it has {size} bytes, and a log of the coordinator is never so long")
    data = path.read_bytes()
    begins = _HEADER.match(data)
    if begins is None:
        raise damage(path, 0, f"it begins with {data[:HEADER_BYTES]!r}, which is not how a log begins")
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
            path, end, f"up to byte {rewritten} it was on the disk before it got its name, and does not read"
        )
    if end < len(data):
        _check_end(path, data, end)
    return found


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield offset and payload of each frame, up to the first that does not read."""
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
    """The frame at `end` does not read: it is torn if none that reads follows."""
    offset = end
    while (offset := data.find(MARK, offset + 1)) >= 0:
        if _payload_at(data, offset) is not None:
            raise damage(path, end, f"a record there does not read, and a whole one follows at byte {offset}")
    _log.warning(
        "%s: the last %d bytes, from byte %d, do not read: a record that a crash has torn before anybody heard of "
        "it. It is cut off",
        path,
        len(data) - end,
        end,
    )


def damage(path: Path, offset: int, what: str) -> StoreDamaged:
    """Return the error for a log that does not read at `offset`."""
    return StoreDamaged(
        f"{path} is damaged at byte {offset}: {what}. The coordinator does not start, for it would forget what it "
        "has decided. If there is a whole copy of this very file, and no older one, put it there. If not, move the "
        "file away: the coordinator then begins each job anew, on the newest state that the job's groups bring"
    )


def _crc(payload: bytes) -> int:
    # With the length in it, a run of zeros is no frame.
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "big")))


@dataclass
class Log:
    """A log open for appending. `end` is where the next frame goes: all before it is on the disk."""

    path: Path
    descriptor: int
    end: int
    # Something may stand behind `end`, of an append that failed.
    dirty: bool = False
    # The folder may still name an older file, should the machine stop now.
    unnamed: bool = True

    @classmethod
    def write_new(cls, path: Path, written: Sequence[Written]) -> Self:
        """Replace the log at `path`, all or nothing, by one with these records, and open that. Not yet `settle`d.

        Raises:
            OSError: the disk is full or failing. The log at `path` is as it was.
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
        """Return once this file will be found under its name, whatever happens to the machine.

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
        """Put one frame at the end, on the disk.

        Raises:
            OSError: the disk is full or failing. What had been written of it is cut off again, now or before
                anything else is appended.
        """
        self.settle()
        if self.dirty:
            os.ftruncate(self.descriptor, self.end)
        self.dirty = True
        try:
            _write(self.descriptor, data, self.end)
            os.fdatasync(self.descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # then the next append does it
                os.ftruncate(self.descriptor, self.end)
                self.dirty = False
            raise
        self.end += len(data)
        self.dirty = False

    @property
    def replaced(self) -> bool:
        """Whether somebody has put another file in its place, or none: what is appended here would be lost."""
        return not is_at(self.descriptor, self.path)

    def close(self) -> None:
        os.close(self.descriptor)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    # One call; where it stops short (a full disk, a limit on the file's size) the next one says why.
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that stands at `path`."""
    ours = os.fstat(descriptor)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
