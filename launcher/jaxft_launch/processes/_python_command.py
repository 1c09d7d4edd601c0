"""Which commands run a Python program, and how Python reads their words (Python's "Command line and environment")."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Options of one letter, which may share a word: `-uO`. Left out are options that only print something or run
# another program (`-c`, `-i`, `-V`, `-h`, `-x`), and options that may hide jaxft (`-E`, `-I`, `-s`, `-S`).
_FLAGS = frozenset("bBdOPqRuv")
_WITH_VALUE = frozenset("WX")
_WITH_NEXT_WORD = ("--check-hash-based-pycs",)


class PythonCommand(NamedTuple):
    """A script or a module that this interpreter runs.

    Attributes:
        options: of the interpreter.
        words: `SCRIPT ARGUMENTS...` or `-m MODULE ARGUMENTS...`.
    """

    options: tuple[str, ...]
    words: tuple[str, ...]

    def through(self, script: Path) -> list[str]:
        """The command that gives these words to a script, with the same options."""
        return [sys.executable, *self.options, str(script), *self.words]


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Read a command; return None if it is no script or module for the interpreter of this process."""
    program = shutil.which(command[0])
    if program is None or not sys.executable or not _is_ours(Path(program)):
        return None
    rest = list(command[1:])
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        count = _words_of_option(rest[0])
        if count == 0:
            return None
        options += rest[:count]
        del rest[:count]
    if len(rest) >= 2 and rest[0] == "-m":
        return PythonCommand(tuple(options), tuple(rest))
    return PythonCommand(tuple(options), tuple(rest)) if rest and Path(rest[0]).is_file() else None


def _words_of_option(word: str) -> int:
    """How many words an option of Python takes; 0 if it is none after which a script or module may come."""
    if word in _WITH_NEXT_WORD:
        return 2
    letters = word[1:]
    for number, letter in enumerate(letters, 1):
        if letter in _WITH_VALUE:  # the rest of the word is the value, or the next word
            return 1 if number < len(letters) else 2
        if letter not in _FLAGS:
            return 0
    return 1 if letters else 0


def _is_ours(program: Path) -> bool:
    """Whether it is this interpreter with the same packages: python and python3 of one environment are the same."""
    ours = Path(sys.executable)
    return program.parent.resolve() == ours.parent.resolve() and program.samefile(ours)


def runs_python(pid: int) -> bool | None:
    """Whether a process is a Python interpreter now, whatever has started it (proc_pid_exe(5)); None: unknown."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return None
    return program.startswith(("python", "pypy"))
