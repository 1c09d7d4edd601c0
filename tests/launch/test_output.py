import io
import os
import tracemalloc
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import pytest

from jaxft_launch.processes._processes import Child
from jaxft_launch.supervise._output import (
    LAST_BYTES,
    LONGEST_LINE_BYTES,
    Lines,
    LogTail,
    Row,
    Table,
    make_output,
)

ROW = Row(group="group-1", state="runs", pids=(7, 8), starts=2, phase="compute", step=41, phase_s=3.4)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read()


def test_lines_have_the_name_of_their_process() -> None:
    stream = io.StringIO()
    with make_output(stream) as output:
        assert isinstance(output, Lines)
        output.say("one\ntwo")
        output.pass_on("group-1/0", "loss 3.2")
        output.show(lambda: pytest.fail("there is no table"))
    lines = text_of(stream).splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["one", "two"]
    assert all(line.startswith("[jaxft launch]") for line in lines[:2])
    assert lines[2] == "[group-1/0] loss 3.2"


def test_a_terminal_has_a_table() -> None:
    stream = Terminal()
    with make_output(stream) as output:
        assert isinstance(output, Table)
        output.pass_on("group-1", "[bold]loss")
        output.show(lambda: [ROW])
    shown = text_of(stream)
    assert "[group-1] [bold]loss" in shown
    assert "compute" in shown


def test_a_log_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.lines() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.lines() == ["one"]
        assert tail.lines() == []
        file.write(b"o\n\nthr\xffee")
        assert tail.lines() == ["two", ""]
        assert tail.lines(last=True) == ["thr\ufffdee"]
        assert tail.lines(last=True) == []


def test_of_a_line_that_is_drawn_again_and_again_the_last_state_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    with path.open("ab", buffering=0) as file:
        file.write(b"start\n\r10%\r20%")
        assert tail.lines() == ["start"]
        file.write(b"\r100%\n\rnext\r")
        assert tail.lines() == ["100%"]
        assert tail.lines(last=True) == ["next"]


@pytest.mark.parametrize("size", [1, 100])
def test_a_line_may_end_with_a_carriage_return_and_a_line_feed(tmp_path: Path, size: int) -> None:
    path, found = tmp_path / "log", list[str]()
    tail, text = LogTail(path), b"one\r\n\r\ntwo\r\r\n"
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(text), size):
            file.write(text[start : start + size])
            found += tail.lines()
    assert found == ["one", "", "two"]


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_that_is_too_long_is_shown_in_part_and_not_kept(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    with path.open("ab", buffering=0) as file:
        for _ in range(5):
            file.write(b"x" * LONGEST_LINE_BYTES)
            assert tail.lines() == []
            assert len(tail._part) == LONGEST_LINE_BYTES
        file.write(end)
        (line,) = tail.lines(last=True)
        assert line == "x" * LONGEST_LINE_BYTES + f" ... ({4 * LONGEST_LINE_BYTES} more bytes are in the log)"
        file.write(b"y\n")
        assert tail.lines() == ["y"]


def test_a_log_that_was_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"an old line\n")
    tail = LogTail(path, path.stat().st_size)
    with path.open("ab", buffering=0) as file:
        file.write(b"one\nhal")
        assert tail.lines() == ["one"]
        os.truncate(path, 0)
        assert tail.lines() == []
        file.write(b"two\n")
        assert tail.lines() == ["two"]


def test_of_a_flood_only_the_last_part_is_shown_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "group-0.0.log"
    tail = LogTail(path)
    path.write_bytes(b"first\n" + (1 << 20) * b"1234567\n" + b"last")
    left_out_bytes = path.stat().st_size - LAST_BYTES
    first, *_, last = tail.lines(last=True)
    assert first == f"... ({left_out_bytes} bytes are left out here, and are in group-0.0.log)"
    assert last == "last"
    assert tail.lines(last=True) == []


def test_the_end_of_a_log_is_told_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "group-0.0.log"
    with log.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    tracemalloc.start()
    try:
        text = Child("group-0.0", log, Mock()).log_tail()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text.endswith("\nlast\n---")
    assert most_bytes < 8 << 20
