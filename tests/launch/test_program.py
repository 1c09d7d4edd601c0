"""The exit status of a program under the launcher, and its last words, where its streams take nothing any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience

RUN = (sys.executable, "-m", "jaxft._launch._program")
AGAIN = "from jaxft._errors import CoordinatorUnreachable; raise CoordinatorUnreachable('it is gone')"


def run(program: str, tmp_path: Path, *, nproc: int, stderr: int) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {**os.environ, "JAXFT_NPROC": str(nproc)}
    return patience.run([*RUN, str(script)], stderr=stderr, env=environment, text=True)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("closes", ["sys.stdout.close()", "sys.stderr.close()", ""])
def test_a_stream_that_takes_nothing_does_not_change_the_status(
    tmp_path: Path, closes: str, nproc: int
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = run(f"import sys; {closes}\n{AGAIN}", tmp_path, nproc=nproc, stderr=full.fileno())
    assert ended.returncode == os.EX_TEMPFAIL


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_a_program_exits_with_is_told(tmp_path: Path, nproc: int) -> None:
    program = "import sys; sys.exit(ValueError('there is no data'))"
    ended = run(program, tmp_path, nproc=nproc, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (1, "there is no data\n")
