"""Which commands run a Python program, in the launcher's eyes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft_launch.processes._python_command import PythonCommand, python_command, runs_python


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "SCRIPT x"),
        ("", "-m a.b x"),
        ("-u", "SCRIPT"),
        ("-uO", "-m a.b"),
        ("-X dev", "SCRIPT"),
        ("-W error -P -uB", "SCRIPT x"),
        ("--check-hash-based-pycs always", "SCRIPT"),
    ],
)
def test_a_script_or_a_module_of_this_interpreter_is_one(options: str, words: str) -> None:
    given, rest = options.split(), words.replace("SCRIPT", __file__).split()
    assert python_command([sys.executable, *given, *rest]) == PythonCommand(tuple(given), tuple(rest))


NOT_A_PROGRAM = ("-c pass", "-uc pass", "-", "", "-u", "-m", "-X", "no-such-file.py", "-V", "--help")
OTHER_OPTIONS = ("-i", "-x", "-I", "-S", "-uE", "-s")


@pytest.mark.parametrize("words", [*NOT_A_PROGRAM, *(f"{option} SCRIPT" for option in OTHER_OPTIONS)])
def test_others_are_none(words: str) -> None:
    assert python_command([sys.executable, *words.replace("SCRIPT", __file__).split()]) is None


@pytest.mark.parametrize("program", ["sh", "no-such-program", "/usr/bin/env"])
def test_other_programs_are_none(program: str) -> None:
    assert python_command([program, __file__]) is None


def test_all_names_of_the_interpreter_in_its_environment_are_the_same() -> None:
    names = [path for path in Path(sys.executable).parent.glob("python*") if path.samefile(sys.executable)]
    assert len(names) > 1
    for name in names:
        assert python_command([str(name), __file__]) == PythonCommand((), (__file__,))


def test_an_environment_behind_a_link_is_the_same(tmp_path: Path) -> None:
    interpreter = Path(sys.executable)
    (tmp_path / "link").symlink_to(interpreter.parent.parent)
    linked = tmp_path / "link" / interpreter.parent.name / interpreter.name
    assert python_command([str(linked), __file__]) == PythonCommand((), (__file__,))
    assert python_command([str(interpreter.resolve()), __file__]) is None  # without our packages


def test_a_process_shows_what_it_runs() -> None:
    assert runs_python(os.getpid()) is True
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:  # it ends with its input
        assert runs_python(other.pid) is False
    assert runs_python(other.pid) is None, "it has ended"
