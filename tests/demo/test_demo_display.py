import io
import sys
from typing import Any

import pytest

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm._display import GroupRow, PlainDisplay, View
from lab._live import LiveDisplay, make_display, make_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def view(step: int, **changes: Any) -> View:
    fields: dict[str, Any] = {
        "title": "run with kills",
        "step": step,
        "planned_steps": 60,
        "loss": 4.5,
        "participating": 2,
        "quorum_id": 3,
        "kills": 1,
        "planned_kills": 3,
        "rows": (
            GroupRow(
                group="group-0", pid=11, launches=1, state="training", step=step, loss=4.5, shards=(0, 2)
            ),
            GroupRow(group="group-1", pid=12, launches=2, state="coming back"),
        ),
    }
    return View(**{**fields, **changes})


def plain() -> tuple[io.StringIO, PlainDisplay]:
    stream, times_s = io.StringIO(), iter(range(100))
    return stream, PlainDisplay(stream, name="jaxft demo", clock=lambda: float(next(times_s)))


def test_plain_lines_carry_the_time_and_come_at_every_tenth_step_only() -> None:
    stream, display = plain()
    with display:
        display.say("launched group-0 (pid 11)")
        for step in range(25):
            display.show(view(step))
            display.show(view(step))
    assert stream.getvalue().splitlines() == [
        "[jaxft demo]    1.0 s  launched group-0 (pid 11)",
        "[jaxft demo]    2.0 s  step  1/60  loss  4.5000  groups 2/2  quorum   3",
        "[jaxft demo]    3.0 s  step 10/60  loss  4.5000  groups 2/2  quorum   3",
        "[jaxft demo]    4.0 s  step 20/60  loss  4.5000  groups 2/2  quorum   3",
    ]


def test_a_long_run_may_ask_for_fewer_plain_lines() -> None:
    stream = io.StringIO()
    display = make_display(stream, name="jaxft chaos", every_steps=50)
    for step in range(1, 151):
        display.show(view(step))
    assert [line.split("step")[1].split("/")[0].strip() for line in stream.getvalue().splitlines()] == [
        "1",
        "50",
        "100",
        "150",
    ]


def test_plain_lines_begin_anew_in_the_next_run() -> None:
    stream, display = plain()
    display.show(view(1))
    display.show(view(1, title="undisturbed run"))
    assert len(stream.getvalue().splitlines()) == 2


def test_plain_text_has_no_escapes_and_every_line_its_head() -> None:
    stream, display = plain()
    display.say("first\nsecond")
    assert "\x1b" not in stream.getvalue()
    assert all(line.startswith("[jaxft demo]") for line in stream.getvalue().splitlines())


def test_a_terminal_gets_a_table_and_lines_above_it_that_stay() -> None:
    stream = Terminal()
    times_s = iter(range(100))
    display = LiveDisplay(stream, clock=lambda: float(next(times_s)))
    with display:
        display.show(view(7))
        display.say("killed group-1 [kill -9 12]")
        display.show(view(8))
    text = stream.getvalue()
    assert "coming back" in text
    assert "step 8/60" in text
    assert "killed group-1 [kill -9 12]" in text


def test_the_table_renews_itself_no_more_often_than_a_person_can_see() -> None:
    times_s = iter((0.0, *(0.0, 0.05, 0.1, 0.15, 0.2, 0.3)))
    display = LiveDisplay(Terminal(), clock=lambda: next(times_s))
    drawn: list[object] = []
    display._live.update = lambda table, refresh: drawn.append(table)  # type: ignore[method-assign]
    for _ in range(6):
        display.show(view(1))
    assert len(drawn) == 3


def test_the_table_shows_dashes_for_what_is_not_known() -> None:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=120).print(make_table(view(7), elapsed_s=3.0))
    row = next(line for line in stream.getvalue().splitlines() if "group-1" in line)
    assert row.split() == ["group-1", "coming", "back", "12", "2", "-", "-", "-", "-"]


def test_the_stream_decides() -> None:
    assert isinstance(make_display(io.StringIO(), name="jaxft demo"), PlainDisplay)
    assert isinstance(make_display(Terminal(), name="jaxft demo"), LiveDisplay)


def test_without_rich_a_terminal_is_told_what_to_do_and_a_pipe_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich.console", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LaunchError, match=r'pip install -e "\.\[llama3\]"'):
        make_display(Terminal(), name="jaxft demo")
    make_display(io.StringIO(), name="jaxft demo").say("works")
