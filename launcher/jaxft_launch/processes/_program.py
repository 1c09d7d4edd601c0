"""Runs a Python program, and gives an error of the library the exit status that its supervisor needs.

python _program.py SCRIPT ARGUMENTS...
python _program.py -m MODULE ARGUMENTS...
"""

import contextlib
import functools
import itertools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from jaxft._base._ending import end_at_once, exit_status
from jaxft._errors import JaxftError, JobFinished


def run(words: Sequence[str]) -> None:
    """Run `python WORDS...` in this interpreter. In a rank of several, an error ends the process at once.

    Raises:
        SystemExit: the program has ended with an error of the library.
    """
    sys.excepthook = functools.partial(_show, sys.excepthook)
    try:
        _run(words)
    except BaseException as error:
        if int(os.environ.get("JAXFT_NPROC", "1")) > 1 and (status := exit_status(error)):
            try:
                _say(error)
            finally:
                end_at_once(status)
        raise


def _run(words: Sequence[str]) -> None:
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            lead_path(os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            lead_path(str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except JobFinished as error:
        _write(f"jaxft: {error}\n")  # it is no failure: no traceback, as in a program without a launcher
        raise SystemExit(error.exit_status) from error
    except JaxftError as error:
        _write("".join(traceback.format_exception(type(error), error, _of_program(error))))
        raise SystemExit(error.exit_status) from error


def lead_path(folder: str) -> None:
    """Have a folder of the program in the place of the launcher's own, unless `-P` forbids one."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _show(show: Callable[..., None], kind: type[BaseException], error: BaseException, _whole: object) -> None:
    """Have `show`, a `sys.excepthook`, print an error as if Python had run the program itself."""
    # Python's own hook prints the error's traceback, not its argument. The error may be a frozen dataclass.
    BaseException.with_traceback(error, _of_program(error))
    show(kind, error, error.__traceback__)


def _of_program(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this module, of its callers, and of runpy.

    Of a program that does not compile nothing is left, as in Python. An error of a frame that is not the program's
    keeps all: it is no error of the program.
    """
    frames = list(_frames(error.__traceback__))
    ours = [number for number, frame in enumerate(frames) if frame.tb_frame.f_code is _run.__code__]
    rest = frames[ours[-1] + 1 :] if ours else frames
    programs = list(itertools.dropwhile(lambda frame: frame.tb_frame.f_globals is vars(runpy), rest))
    if programs:
        return programs[0]
    return None if isinstance(error, SyntaxError) else error.__traceback__


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _say(error: BaseException) -> None:
    """Print what Python would, at the end of the program."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif not isinstance(error.code, int):
        _write(f"{error.code}\n")


def _write(text: str) -> None:
    """Write to stderr, if it is writable: the program may have replaced it, which must not change the status."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


if __name__ == "__main__":
    run(sys.argv[1:])
