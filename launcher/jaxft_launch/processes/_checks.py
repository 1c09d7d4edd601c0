"""Checks before anything is started, with advice on what to do."""

import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxft._errors import JaxftError

# Options of Python that take no value and leave it to run a program.
PYTHON_SWITCHES = "bBdEiIOPqsSuvx"


class LaunchError(JaxftError):
    """The command cannot run here. The message names the reason and a remedy. `status`: the exit status."""

    status = 1


def check_installed(names: Sequence[str], *, remedy: str) -> None:
    """Raise a LaunchError if a package that the command needs is missing; `remedy` installs it."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"This needs {', '.join(missing)}, which jaxft alone does not install. Run: {remedy}"
        )


def check_command(words: Sequence[str], *, command: str) -> None:
    """Raise a LaunchError if there is no such program, or no folder to run it in. `command`: ours: "jaxft chaos"."""
    try:
        Path.cwd()
    except OSError as error:
        raise LaunchError("The current folder does not exist any more. Change to another: cd ...") from error
    if not words:
        raise LaunchError(missing_program(command))
    if shutil.which(words[0]) is None:
        raise LaunchError(_no_program(words[0]))
    if _read_from_input(words):
        raise LaunchError(
            f"{shlex.join(words)!r} would read its program from the standard input, which no group has: each is "
            f"started several times. Save the program in a file, and name that: {command} -- python my_train.py"
        )


def _no_program(word: str) -> str:
    """Why a word names no program that can be run."""
    path = Path(word)
    if not path.exists():
        return f"There is no program {word!r} to run. Check its path."
    if path.is_dir():
        return f"{word!r} is a folder. Name a program in it."
    if path.suffix == ".py":
        remedy = f"python {shlex.quote(word)}"
    elif os.access(path, os.X_OK):
        remedy = shlex.quote(f"./{word}")
    else:
        remedy = f"chmod +x {shlex.quote(word)}"
    return f"{word!r} is no command. Use `{remedy}`."


def _read_from_input(words: Sequence[str]) -> bool:
    """Whether it is Python without a script: `python`, `python -u -`, `python /dev/stdin`."""
    if not Path(words[0]).name.startswith("python"):
        return False
    rest = [word for word in words[1:] if not re.fullmatch(rf"-[{PYTHON_SWITCHES}]+", word)]
    return not rest or rest[0] in ("-", "/dev/stdin")


def missing_program(command: str) -> str:
    """Return where a command expects its program."""
    return f"Name the program to train, after two dashes: {command} -- python my_train.py"


def check_new_folder(folder: Path) -> None:
    """Raise a LaunchError unless the folder is empty or does not exist: old event files would be read as new."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(f"--keep {folder} exists and is not an empty folder. Name a new one.")
