"""The command `jaxft`.

Each command is imported when it is asked for, and its options without its work: `--help` imports no JAX.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from jaxft_protocol.host.commands import empty_flags, open_closed_streams, quiet_without_reader

from jaxft._errors import JaxftError
from jaxft_launch._version import __version__

_Options = TypeVar("_Options")

HELP = """usage: jaxft launch [options] -- program [arguments...]
       jaxft chaos [options] -- program [arguments...]
       jaxft status [JOB] [--watch]
       jaxft drain GROUP [--job JOB]
       jaxft doctor [options]
       jaxft check gpu|disk|memory [options]
       jaxft plan [options]
       jaxft --version

Fault-tolerant training for JAX.

launch    start the groups of a job on this machine, and keep them alive: jaxft launch --help
chaos     kill the groups of your own training, and compare the bits: jaxft chaos --help
status    show the jobs of a coordinator, and their groups: jaxft status --help
drain     let a group finish its step, hand over its place, and end: jaxft drain --help
doctor    check whether a group could train on this machine: jaxft doctor --help
check     check devices, a disk or memory, as a plugin of Nagios: jaxft check --help
plan      predict the goodput of a job, and what it needs: jaxft plan --help
"""
INTERRUPTED = 130  # the exit status that a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with its status."""
    open_closed_streams()
    with quiet_without_reader(), ending_at_interrupts():
        _run(arguments)


@contextlib.contextmanager
def ending_at_interrupts() -> Iterator[None]:
    """Exit without a traceback at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        print("jaxft: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> None:
    match sys.argv[1:] if arguments is None else list(arguments):
        case ["--version"]:
            print(f"jaxft {__version__}")
        case ["-h" | "--help"]:
            print(HELP, end="")
        case [name, *rest] if name in _COMMANDS:
            _COMMANDS[name](rest)
        case other:
            print(HELP, end="", file=sys.stderr)
            if other:
                print(f"\njaxft: there is no command {other[0]!r}", file=sys.stderr)
            sys.exit(2)


def exit_with_status_of(command: Callable[[], int]) -> NoReturn:
    """Run a command and exit; its expected errors are printed to stderr without a traceback."""
    from jaxft_launch.processes._checks import LaunchError

    try:
        sys.exit(command())
    except JaxftError as error:
        print(f"jaxft: {error}", file=sys.stderr)
        sys.exit(error.status if isinstance(error, LaunchError) else 1)


def _launch(arguments: list[str]) -> NoReturn:
    from jaxft_launch.supervise._options import LaunchOptions
    from jaxft_launch.supervise.launch import run_launch

    own, program = _split(arguments)
    with _reminding_of_dashes("jaxft launch", arguments):
        options = _parsed(LaunchOptions, "jaxft launch", own)
    exit_with_status_of(lambda: run_launch(options, program))


def _chaos(arguments: list[str]) -> NoReturn:
    from jaxft_launch.storm.chaos import ChaosOptions, run_chaos

    own, program = _split(arguments)
    with _reminding_of_dashes("jaxft chaos", arguments):
        options = _parsed(ChaosOptions, "jaxft chaos", own)
    exit_with_status_of(lambda: run_chaos(options, program))


def _status(arguments: list[str]) -> NoReturn:
    from jaxft_launch.client._status import StatusOptions, run_status

    options = _parsed(StatusOptions, "jaxft status", arguments)
    exit_with_status_of(lambda: run_status(options))


def _drain(arguments: list[str]) -> NoReturn:
    from jaxft_launch.client._drain import DrainOptions, run_drain

    options = _parsed(DrainOptions, "jaxft drain", arguments)
    exit_with_status_of(lambda: run_drain(options))


def _doctor(arguments: list[str]) -> NoReturn:
    from jaxft_launch.check._doctor import DoctorOptions, run_doctor

    options = _parsed(DoctorOptions, "jaxft doctor", arguments)
    exit_with_status_of(lambda: run_doctor(options))


def _check(arguments: list[str]) -> NoReturn:
    from jaxft_launch.check._check import run_check

    exit_with_status_of(lambda: run_check(arguments))


def _plan(arguments: list[str]) -> NoReturn:
    from jaxft_launch.plan.plan import PlanOptions, run_plan

    options = _parsed(PlanOptions, "jaxft plan", arguments)
    exit_with_status_of(lambda: run_plan(options))


def _parsed(options: type[_Options], command: str, arguments: list[str]) -> _Options:
    import tyro

    if flag := _empty_path(options, arguments):
        print(
            f"jaxft: {flag} has an empty value, as from a shell variable that is not set: name a file or a folder, "
            "or omit it",
            file=sys.stderr,
        )
        sys.exit(2)
    return tyro.cli(options, prog=command, args=arguments)


def _empty_path(options: type[Any], arguments: list[str]) -> str:
    """Which flag of a file or folder has an empty value, which would be the current folder; "" if none has."""
    types = get_type_hints(options)
    paths = {f"--{name.replace('_', '-')}" for name, kind in types.items() if Path in (kind, *get_args(kind))}
    return next((flag for flag in empty_flags(arguments) if flag in paths), "")


@contextlib.contextmanager
def _reminding_of_dashes(command: str, arguments: list[str]) -> Iterator[None]:
    """Without two dashes, the words of the program look like wrong options."""
    try:
        yield
    except SystemExit as end:
        if end.code and "--" not in arguments:
            from jaxft_launch.processes._checks import missing_program

            print(f"jaxft: {missing_program(command)}", file=sys.stderr)
        raise


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the words of the program after the first two dashes."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return own, arguments[len(own) + 1 :]


_COMMANDS: dict[str, Callable[[list[str]], NoReturn]] = {
    "launch": _launch,
    "chaos": _chaos,
    "status": _status,
    "drain": _drain,
    "doctor": _doctor,
    "check": _check,
    "plan": _plan,
}


if __name__ == "__main__":
    main()
