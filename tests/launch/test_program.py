"""The exit status of a program under the launcher, and its last words, where its streams take nothing any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft_launch.processes._warm import PROGRAM
from tests import patience

RUN = (sys.executable, str(PROGRAM))
AGAIN = "from jaxft._errors import CoordinatorUnreachable; raise CoordinatorUnreachable('it is gone')"


def run(program: str, tmp_path: Path, *, nproc: int, stderr: int) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {**os.environ, "JAXFT_NPROC": str(nproc)}
    return patience.run([*RUN, str(script)], stderr=stderr, env=environment, text=True)


@pytest.mark.parametrize(
    ("closes", "nproc"),
    [("sys.stdout.close()", 1), ("sys.stderr.close()", 2), ("", 1), ("sys.stderr = None", 2)],
)
def test_a_stream_that_takes_nothing_does_not_change_the_status(
    tmp_path: Path, closes: str, nproc: int
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = run(f"import sys; {closes}\n{AGAIN}", tmp_path, nproc=nproc, stderr=full.fileno())
    assert ended.returncode == os.EX_TEMPFAIL


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_a_program_exits_with_is_printed(tmp_path: Path, nproc: int) -> None:
    program = "import sys; sys.exit(ValueError('there is no data'))"
    ended = run(program, tmp_path, nproc=nproc, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (1, "there is no data\n")


FAILURES = {
    "an error": "def f():\n    raise ValueError('mine')\nf()",
    "an error of the library": AGAIN,
    "what does not compile": "def f(:\n",
    "a frozen error": "import dataclasses as d\n@d.dataclass(frozen=True)\nclass E(Exception):\n  n: int\nraise E(3)",
    "several": "raise ExceptionGroup('both', [ValueError('mine'), OSError('yours')])",
    "a hook": "import sys\nsys.excepthook = lambda *error: print(error[:2], file=sys.stderr)\nraise OSError('mine')",
    "an interrupt": "raise KeyboardInterrupt",
}


@pytest.mark.parametrize(("nproc", "name"), [(1, name) for name in FAILURES] + [(2, "an error")])
def test_a_failure_is_printed_as_python_prints_it(tmp_path: Path, name: str, nproc: int) -> None:
    """Without the frames of what runs the program."""
    ended = run(FAILURES[name], tmp_path, nproc=nproc, stderr=subprocess.PIPE)
    alone = patience.run([sys.executable, str(tmp_path / "program.py")], stderr=subprocess.PIPE, text=True)
    assert alone.stderr
    assert ended.stderr == alone.stderr


@pytest.mark.parametrize("words", [("-m", "is_missing"), ("is_missing.py",)])
def test_a_program_that_is_missing_is_named(words: tuple[str, ...]) -> None:
    ended = patience.run([*RUN, *words], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert "is_missing" in ended.stderr.splitlines()[-1]
