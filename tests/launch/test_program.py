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


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(
    "closes",
    [
        "sys.stdout.close()",
        "sys.stderr.close()",
        "",
        "sys.stderr = None",
        "sys.stdout = None",
    ],
)
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


FAILURES = {
    "an error": "def f():\n    raise ValueError('mine')\nf()",
    "an error of another": "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise ValueError('mine') from e",
    "one of the library": AGAIN,
    "what does not compile": "def f(:\n",
    "what does not compile, imported": "import ast; ast.parse('def f(:')",
    "a frozen one": "import dataclasses as d\n@d.dataclass(frozen=True)\nclass E(Exception):\n    n: int\nraise E(3)",
    "several": "raise ExceptionGroup('both', [ValueError('mine'), OSError('yours')])",
    "a hook": "import sys\nsys.excepthook = lambda *told: print(told[:2], file=sys.stderr)\nraise OSError('mine')",
    "an interrupt": "raise KeyboardInterrupt",
}


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_printed_as_python_prints_it(tmp_path: Path, name: str, nproc: int) -> None:
    """Without the frames of what runs the program."""
    ended = run(FAILURES[name], tmp_path, nproc=nproc, stderr=subprocess.PIPE)
    alone = patience.run([sys.executable, str(tmp_path / "program.py")], stderr=subprocess.PIPE, text=True)
    assert alone.stderr
    assert ended.stderr == alone.stderr


@pytest.mark.parametrize("words", [("-m", "is_missing"), ("is_missing.py",)])
def test_a_program_that_is_missing_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = patience.run([*RUN, *words], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert "is_missing" in ended.stderr.splitlines()[-1]
