"""`jaxft status --watch`, in a terminal and in a pipe."""

import io
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxft_launch.client._port import PortError
from jaxft_launch.client._status import StatusOptions, run_status
from jaxft_launch.client._status_view import chosen, events, rendered
from tests import patience
from tests.clusters import cluster
from tests.operate import port
from tests.operate.terminal import CTRL_C, terminal


@pytest.mark.long
@pytest.mark.processes
def test_a_watch_outlives_its_coordinator_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path) as here:
        web = port.start(here)
        with terminal("status", "--watch", JAXFT_HTTP=web.url) as shown:
            shown.until_shown("The coordinator has no job yet.")
            worker = here.start("group-0", "--steps", "8", "--gate", f"4:{gate}")
            shown.until_shown("again every 1 s until Ctrl-C")
            seen = shown.until_shown("toy: training  step 4")
            assert here.coordinator is not None
            here.coordinator.kill()
            here.coordinator.wait()
            seen = shown.until_shown("Connection refused", after=seen)
            # The last facts stay on the screen.
            seen = shown.until_shown("It is asked again every 1 s. Below is its last answer.", after=seen)
            seen = shown.until_shown("toy: training  step 4", after=seen)
            here.start_coordinator("--http", web.url.removeprefix("http://"), port=here.port)
            gate.touch()
            shown.until_shown("toy: finished  step 8", after=seen)
            here.until_finished(worker)
            shown.press(CTRL_C)
            assert shown.until_ended() == 0
            assert shown.says_no("Traceback", "interrupted")


def test_a_watch_in_a_pipe_tells_each_look_as_a_line_and_ends_with_its_reader() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "jaxft_launch", "status", "--watch", "--json"]
        with subprocess.Popen(
            [*command, "--http", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                lines = [process.stdout.readline() for _ in range(2)]
                process.stdout.close()
                status = patience.wait(process)
                complaints = process.stderr.read()
            finally:
                process.kill()
    for line in lines:
        assert json.loads(line)["problem"].startswith(f"no answer from {url}/api/v1/jobs (")
    assert (status, complaints) == (0, "")


def test_a_watch_without_a_terminal_begins_before_its_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([PortError("no answer."), []])

    def jobs(_: str) -> Any:
        look = next(looks, None)
        if look is None:
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it should have ended")
        if isinstance(look, Exception):
            raise look
        return look

    monkeypatch.setattr("jaxft_launch.client._status.jobs", jobs)
    monkeypatch.setattr("jaxft_launch.client._status.LOOK_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "160")
    assert run_status(StatusOptions(watch=True)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": no answer. It is asked again every 0 s.")
    assert lines[1].endswith(", again every 0 s until Ctrl-C")
    assert lines[2:] == ["The coordinator has no job yet."]


def test_what_cannot_work_is_refused_before_the_first_look() -> None:
    with pytest.raises(PortError, match=r"must begin with http:// or https://, unlike 'localhost:29511'"):
        run_status(StatusOptions(http="localhost:29511", watch=True))


def job(groups: int, absent: tuple[int, ...]) -> dict[str, Any]:
    """A job of this many groups in the API."""
    event = {"event": "step_retried", "t": 0.0, "step": 7, "reason": "why " * 100}
    return {
        **{"job": "toy", "state": "training", "step": 8, "values": {}, "steps_per_s": 1.0, "members": groups},
        **{"places": groups, "quorum_id": 1, "goodput": None, "badput_seconds": {}, "steps_retried": {}},
        **{"steps_committed": 8, "halted": "", "waiting": "", "events": [event] * 20},
        "group_list": [
            {"group": f"g{n}", "state": "gone" if n in absent else "member", "since": 0.0, "losses": 0}
            for n in range(groups)
        ],
    }


def test_three_hundred_groups_fit_into_a_screen_and_those_that_are_gone_come_first() -> None:
    found = job(300, absent=(250, 299))
    groups, rest = chosen(found["group_list"], 5)
    assert [group["group"] for group in groups] == ["g250", "g299", "g0", "g1", "g2"]
    assert rest == ["... and 295 more groups: 295 member"]
    screen = Console(file=io.StringIO(), width=100, height=30)
    screen.print(rendered(found, note="a note", height=30))
    lines = screen.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(lines) == 30
    assert "step_retried" in lines[-1]
    whole = Console(file=io.StringIO(), width=100)
    whole.print(rendered(found))
    assert whole.file.getvalue().count("member") == 298  # pyright: ignore[reportAttributeAccessIssue]


def test_an_action_that_was_refused_does_not_look_like_one_that_was_done() -> None:
    refused = {"t": 0.0, "event": "operator_action", "action": "drain", "group": "g9", "status": 404}
    (line,) = events([refused])
    assert line.endswith("operator_action  action=drain  status=404  group=g9")


def test_groups_are_sorted_by_name_and_number() -> None:
    found = job(12, absent=(1,))["group_list"]
    assert [group["group"] for group in chosen(found[::-1], None)[0]] == [f"g{n}" for n in range(12)]
