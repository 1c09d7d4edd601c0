"""The file itself: what a crash does to it is repaired, and anything else is refused."""

import os
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxft_coordinator.stores import StoreDamaged, records
from jaxft_coordinator.stores._logfile import (
    FRAME_BYTES,
    HEADER_BYTES,
    MARK,
    MAX_LOG_BYTES,
    MAX_PAYLOAD_BYTES,
    Log,
    frame,
    header,
    read,
)
from jaxft_protocol.coordinator.job import Record

from tests.stores import examples

APPENDS: list[list[Record]] = [
    [examples.saved(step=0)],
    [examples.moved(1)],
    [examples.moved(2), examples.saved("other")],
    [examples.moved(3)],
]
FRAMES = [frame(append) for append in APPENDS]
STARTS = [HEADER_BYTES + sum(map(len, FRAMES[:i])) for i in range(len(FRAMES) + 1)]
# As if the first of them had been there when it was rewritten, and the others appended.
WHOLE = header(STARTS[1]) + b"".join(FRAMES)


def read_back(folder: Path, data: bytes) -> list[object]:
    path = folder / "log"
    path.write_bytes(data)
    try:
        return [record for _, record in read(path)]
    finally:
        assert path.read_bytes() == data, "reading changes nothing"


def flat(appends: list[list[Record]]) -> list[object]:
    return [record for append in appends for record in append]


def test_what_was_appended_is_read(tmp_path: Path):
    path = tmp_path / "log"
    log = Log.write_new(path, APPENDS[0])
    for append in APPENDS[1:]:
        log.append(frame(append))
    log.close()
    assert path.read_bytes() == WHOLE
    assert read_back(tmp_path, WHOLE) == flat(APPENDS)


def test_an_end_torn_at_any_byte_is_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for cut in range(STARTS[-2], STARTS[-1]):
        caplog.clear()
        assert read_back(tmp_path, WHOLE[:cut]) == flat(APPENDS[:-1])
        torn = cut - STARTS[-2]
        assert (f"the last {torn} bytes, from byte {STARTS[-2]}, cannot be read" in caplog.text) == (torn > 0)


@pytest.mark.parametrize(
    "lost", ["zeros", "zeros at the front", "zeros at the back", "another frame's remains"]
)
def test_an_end_that_never_reached_the_disk_is_cut_off(tmp_path: Path, lost: str):
    """A machine that loses power may keep a file's new length and not what was written, or only some pages of it."""
    last = FRAMES[-1]
    half = len(last) // 2
    end = {
        "zeros": bytes(len(last)),
        "zeros at the front": bytes(half) + last[half:],
        "zeros at the back": last[:half] + bytes(len(last) - half),
        "another frame's remains": last[:-1] + FRAMES[1][-30:],
    }[lost]
    assert read_back(tmp_path, WHOLE[: STARTS[-2]] + end) == flat(APPENDS[:-1])


def test_a_flipped_bit_before_the_end_is_refused(tmp_path: Path):
    for i, start in enumerate(STARTS[:-2]):
        for at in range(start, STARTS[i + 1]):
            damaged = bytearray(WHOLE)
            damaged[at] ^= 1 << at % 8
            says = f"follows at byte {STARTS[i + 1]}" if i else "when it was created"
            with pytest.raises(StoreDamaged, match=rf"log is damaged at byte {start}: .*{says}"):
                read_back(tmp_path, bytes(damaged))


def test_a_flipped_bit_in_the_last_record_is_an_end_torn(tmp_path: Path):
    """It cannot be told from one."""
    for at in range(STARTS[-2], STARTS[-1]):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 0x10
        assert read_back(tmp_path, bytes(damaged)) == flat(APPENDS[:-1])


def test_what_was_rewritten_cannot_be_torn(tmp_path: Path):
    """It was on the disk before the file got its name: if its end does not read, that was no crash."""
    whole = header(STARTS[-1]) + WHOLE[HEADER_BYTES:]
    assert read_back(tmp_path, whole) == flat(APPENDS)
    for cut in range(HEADER_BYTES, len(whole), 3):
        with pytest.raises(StoreDamaged, match="when it was created"):
            read_back(tmp_path, whole[:cut])
    for at in range(HEADER_BYTES, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        with pytest.raises(StoreDamaged, match="cannot be read there"):
            read_back(tmp_path, bytes(damaged))


def test_a_header_that_was_changed_loses_nothing(tmp_path: Path):
    for at in range(HEADER_BYTES):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 0x01
        try:
            assert read_back(tmp_path, bytes(damaged)) == flat(APPENDS)
        except StoreDamaged:
            continue


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    for foreign in (b"", b"hello", WHOLE[: HEADER_BYTES - 1], WHOLE.replace(b"log 1", b"log 2"), bytes(1000)):
        with pytest.raises(StoreDamaged, match=r"damaged at byte 0: it begins with"):
            read_back(tmp_path, foreign)


def test_the_text_says_what_to_do(tmp_path: Path):
    with pytest.raises(
        StoreDamaged, match=re.escape(str(tmp_path / "log")) + ".*does not start.*move the file away"
    ):
        read_back(tmp_path, b"hello")


def test_no_memory_is_taken_for_what_a_damaged_length_says(tmp_path: Path):
    huge = MARK + (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "big") + bytes(4)
    assert read_back(tmp_path, WHOLE + huge) == flat(APPENDS)
    with pytest.raises(StoreDamaged, match=f"byte {STARTS[-1]}: .* follows at byte {STARTS[-1] + len(huge)}"):
        read_back(tmp_path, WHOLE + huge + FRAMES[1])


def test_a_file_far_too_long_is_refused_unread(tmp_path: Path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(MAX_LOG_BYTES + 1)  # takes no room on the disk, and must take none in memory
    with pytest.raises(StoreDamaged, match="a log has at most"):
        read(path)


def test_whole_bytes_that_are_no_record_are_refused(tmp_path: Path):
    for payload in (b"", b"hello", records.encode(records.Led(7, "a:1")).replace(b'"v":1', b'"v":99')):
        length = len(payload).to_bytes(4, "big")
        foreign = MARK + length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "big") + payload
        with pytest.raises(StoreDamaged, match=rf"at byte {STARTS[-1]}: .*(not a record|newer)"):
            read_back(tmp_path, WHOLE + foreign)


def test_too_big_a_record_is_refused_with_its_size():
    with pytest.raises(OSError, match=rf"have 67\d+ bytes, but a log takes {MAX_PAYLOAD_BYTES} at once"):
        frame([examples.big("j", MAX_PAYLOAD_BYTES)])


@given(st.lists(st.lists(examples.any_record(), min_size=1, max_size=3), max_size=4), st.integers(0))
def test_any_beginning_of_a_log_is_a_whole_number_of_appends(
    tmp_path_factory: pytest.TempPathFactory, appends: list[list[Record]], cut: int
):
    whole = b"".join(frame(append) for append in appends)
    kept = whole[: cut % (len(whole) + 1)]
    found = read_back(tmp_path_factory.getbasetemp(), header(HEADER_BYTES) + kept)
    lengths = [sum(len(frame(append)) for append in appends[:i]) for i in range(len(appends) + 1)]
    appended = max(i for i, length in enumerate(lengths) if length <= len(kept))
    assert found == flat(appends[:appended])


def test_a_frame_is_a_mark_a_length_a_sum_and_lines():
    """As it stands on disks. If this fails, old logs would not be read any more."""
    first = b'{"job":"a","kind":"moved","quorum_id":7,"step":1,"v":1}'
    second = b'{"job":"b","kind":"moved","quorum_id":7,"step":2,"v":1}'
    data = frame([examples.moved(1, "a"), examples.moved(2, "b")])
    assert data == b"\x1ejax" + bytes.fromhex("0000006f c0c3f489") + first + b"\n" + second
    assert FRAME_BYTES == 12


def test_nothing_is_acknowledged_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The order of the calls is all that can be seen of this without pulling a plug."""
    calls: list[str] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            result = real(*arguments)
            calls.append(name)
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "fsync", "fdatasync", "replace"):
        watch(name)
    log = Log.write_new(tmp_path / "log", APPENDS[0])
    assert calls == ["pwrite", "fsync", "replace"]
    log.settle()
    assert calls == ["pwrite", "fsync", "replace", "fsync"]  # of the folder
    calls.clear()
    log.append(FRAMES[1])
    assert calls == ["pwrite", "fdatasync"]
    log.close()
    # Nor does a log that is not settled forget to be.
    log = Log.write_new(tmp_path / "log", APPENDS[0])
    calls.clear()
    log.append(FRAMES[1])
    assert calls == ["fsync", "pwrite", "fdatasync"]
    log.close()
