"""`jaxft status` and `jaxft doctor`, against a real coordinator with real groups."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft_launch.__main__ import main
from jaxft_launch.client._port import PortError
from jaxft_launch.client._status import StatusOptions, run_status
from tests import patience
from tests.clusters import cluster
from tests.operate import port


def jaxft(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxft_launch", *words]
    variables = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "COLUMNS": "160", **environment}
    return patience.run(command, capture_output=True, text=True, limit_s=60.0, env=variables)


@pytest.mark.long
@pytest.mark.processes
def test_status_and_doctor_of_a_job(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path) as here:
        web = port.start(here)
        assert "The coordinator has no job yet." in jaxft("status", "--http", web.url).stdout
        flags = ("--steps", "8", "--gate", f"4:{gate}", "--show")
        workers = here.start_together(("group-0", "group-1"), lambda _name: flags)
        here.until(lambda: web.job()["values"].get("loss"), "a sample")
        at_gate = lambda: [each.get("step") for each in web.job()["group_list"]] == [4, 4]  # noqa: E731
        here.until(at_gate, "samples of the step at the gate")
        shown = jaxft("status", JAXFT_HTTP=web.url).stdout
        answer = json.loads(jaxft("status", "toy", "--json", "--http", web.url).stdout)
        missing = jaxft("status", "other", "--http", web.url)
        found = jaxft("doctor", JAXFT_COORDINATOR=f"localhost:{here.port}")
        gate.touch()
        here.until_finished(*workers.values())
    assert re.search(r"toy: training  step 4  loss \d\.\d+  .* groups 2/2  quorum 1  goodput", shown)
    assert re.search(r"group-1 +member( \(away\))? +\d+ s +4 ", shown)
    assert "quorum_changed  step=0  quorum_id=1  members=2" in shown
    assert (answer["job"], len(answer["group_list"])) == ("toy", 2)
    assert (missing.returncode, missing.stderr) == (
        1,
        "jaxft: this coordinator knows no job 'other'; 1 jobs are listed at /api/v1/jobs\n",
    )
    assert found.returncode == 0, found.stdout + found.stderr
    for text in (
        f"ok    the coordinator localhost:{here.port} answers, and leads",
        "ok    this machine reaches itself at ",
    ):
        assert text in found.stdout


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["lunch", "--groups", "3"], "jaxft: there is no command 'lunch'"),
        (
            ["launch", "--groups", "3", "python", "train.py"],
            "jaxft: Name the program to train, after two dashes: jaxft launch -- python my_train.py",
        ),
        (
            ["chaos", "python", "train.py"],
            "jaxft: Name the program to train, after two dashes: jaxft chaos -- python my_train.py",
        ),
    ],
)
def test_what_a_newcomer_mistypes_is_named(
    words: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err.splitlines()[-1] == output


def test_a_wrong_flag_before_the_dashes_is_no_missing_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--grups", "3", "--", "python", "train.py"])
    assert "two dashes" not in capsys.readouterr().err


def test_without_a_coordinator_status_says_what_to_do() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(PortError, match=r"Connection refused.*Does the coordinator run, with --http\?"):
            run_status(StatusOptions(http=f"http://127.0.0.1:{free.getsockname()[1]}"))
