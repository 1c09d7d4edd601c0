import io
from pathlib import Path
from typing import IO

import pytest

from jaxft._launch._output import Lines, LogTail, Row, Table, make_output, table_of

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


def test_a_terminal_without_rich_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    stream = Terminal()
    assert isinstance(make_output(stream), Lines)
    assert 'pip install "jaxft[launch]"' in text_of(stream)


def test_the_table_has_a_row_for_each_group() -> None:
    from rich.console import Console

    stream = io.StringIO()
    other = Row(group="group-2", state="waits", pids=(), starts=1, phase="", step=0, phase_s=None)
    Console(file=stream, width=100).print(table_of([ROW, other]))
    first, second = [line.split() for line in text_of(stream).splitlines() if "group-" in line]
    assert first == ["group-1", "runs", "compute", "3", "s", "41", "2", "7", "8"]
    assert second == ["group-2", "waits", "-", "-", "-", "1", "-"]


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
