"""The command `jaxft launch`: starts a job's groups on this machine, and keeps them alive until the job is done."""

import contextlib
import io
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from jaxft_launch.processes._checks import LaunchError, check_command, check_installed
from jaxft_launch.processes._coordinator import COORDINATOR, Coordinator, StartStopped
from jaxft_launch.processes._processes import Processes
from jaxft_launch.processes._ranks import Member, dealt
from jaxft_launch.processes._statuses import AGAIN
from jaxft_launch.supervise._claim import claimed
from jaxft_launch.supervise._deadlines import SILENCE, parse_deadlines
from jaxft_launch.supervise._journal import Journal, LaunchBegan, LaunchEnded
from jaxft_launch.supervise._ladder import Ladder
from jaxft_launch.supervise._launcher import Launcher
from jaxft_launch.supervise._options import (
    LaunchOptions,
    check_options,
    devices_of,
    rungs_of,
    words_of,
)
from jaxft_launch.supervise._output import make_output
from jaxft_launch.supervise._probe import Probe
from jaxft_launch.supervise._supervisor import Rules

EVENTS = "events.jsonl"
# Of the deadline for silence: groups wait as long for a coordinator, by default, and end together if it stays away.
COORDINATOR_SILENCE, LEAST_SILENCE_S = 1 / 3, 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_launch(
    options: LaunchOptions, words: Sequence[str], *, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the groups until all have ended; return the exit status. Tests pass another command for the coordinator.

    Raises:
        LaunchError: an option is not valid, the program does not exist, or the coordinator does not start.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # no character of a program's output ends a launch
        sys.stdout.reconfigure(errors="backslashreplace")
    check_command(words, command="jaxft launch")
    check_options(options)
    rules = Rules(
        deadlines=parse_deadlines(options.deadlines),
        max_restarts=options.max_restarts,
        warm=options.warm,
        preload=tuple(words_of(options.preload)),
        drain_timeout_s=options.drain_timeout_s,
    )
    silence_s = max(LEAST_SILENCE_S, COORDINATOR_SILENCE * rules.deadlines[SILENCE])
    address = options.coordinator or os.environ.get("JAXFT_COORDINATOR", "")
    if not address and options.group is not None:
        raise LaunchError(
            "--group starts one group of a job, so it needs the job's coordinator: --coordinator HOST:PORT. "
            "To start N groups on this machine, say --groups N."
        )
    if address and options.http:
        raise LaunchError(
            f"--http is for a coordinator that the launcher starts, but the job's coordinator is {address}. Give "
            "--http to that one."
        )
    if not address:
        check_installed(("jaxft_coordinator",), remedy="pip install jaxft-coordinator")
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_signals())
        folder = _folder(options, stack)
        phases = _phases(stack)
        output = stack.enter_context(make_output(sys.stdout))
        journal = Journal(folder / EVENTS, output.say)
        processes = stack.enter_context(Processes(folder, cwd=Path.cwd(), keeps_token=bool(address)))
        own = None
        if not address:
            try:
                own = _own_coordinator(options, processes, coordinator, phases, lambda: bool(signals))
            except StartStopped:
                name = signal.Signals(signals[0]).name
                output.say(f"got {name} while the coordinator started: no group was started")
                return 128 + signal.SIGINT if signals[0] == signal.SIGINT else AGAIN
            address = own.address
            if options.http:
                output.say(f"the page is at http://{options.http}/")
        output.say(f"{len(options.names)} groups x {options.nproc}; logs and {EVENTS} in {folder}")
        journal.write(
            LaunchBegan(
                groups=options.names,
                nproc=options.nproc,
                coordinator=address,
                command=list(words),
                folder=str(folder),
            )
        )
        launcher = Launcher(
            members_of(options, address, folder),
            words,
            processes,
            rules,
            coordinator=own,
            silence_s=silence_s,
            journal=journal,
            output=output,
            phases=phases,
            probe=_probe(options, output.say),
            ladder_of=lambda member: ladder_of(options, member),
        )
        status = launcher.run(signals)
        journal.write(LaunchEnded(status=status))
        output.say(f"ends with exit status {status}")
        return status


def _own_coordinator(
    options: LaunchOptions,
    processes: Processes,
    command: Sequence[str],
    phases: Path,
    stopped: Callable[[], bool],
) -> Coordinator:
    """Start a coordinator, unless `stopped`."""
    flags = ["--state", str(processes.folder / "coordinator")]
    if options.http:
        flags += ["--http", options.http]
    return Coordinator(processes, (*command, *flags), stopped=stopped, alive=phases / "coordinator.alive")


def ladder_of(options: LaunchOptions, member: Member) -> Ladder | None:
    """Return a group's ladder."""
    rungs = rungs_of(options)
    return Ladder(member.devices, rungs, options.rung_after_s) if rungs else None


def _probe(options: LaunchOptions, say: Callable[[str], None]) -> Probe | None:
    if not options.probe:
        return None
    return Probe(shlex.split(options.probe), say=say, patience_s=options.rung_after_s)


def members_of(options: LaunchOptions, coordinator: str, folder: Path) -> list[Member]:
    """Return the groups of the launch."""
    caches = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # the user's own choice
    shares = dealt(devices_of(options), len(options.names))
    return [
        Member(
            name=name,
            nproc=options.nproc,
            nodes=options.nodes,
            node=options.node,
            meet=options.meet,
            coordinator=coordinator,
            spare=name.startswith("spare-"),
            devices=devices,
            compilation_cache=None if caches else folder / "compiled" / name,
            extra={"JAXFT_OTHER_MESHES": "1"} if options.rungs else {},
        )
        for name, devices in zip(options.names, shares, strict=True)
    ]


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield the list of the signals that have arrived."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    # `nohup jaxft launch` is to outlive its terminal.
    heeded = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    # While a parent's choice to ignore it is inherited, the kernel keeps no exit status: all of them would be 0.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _phases(stack: contextlib.ExitStack) -> Path:
    """Return a new folder on this machine, which is removed when the stack is left."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="jaxft-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"There is no folder for temporary files: {error}. Set TMPDIR to one on this machine."
        ) from error
    return Path(stack.enter_context(temporary))


def _folder(options: LaunchOptions, stack: contextlib.ExitStack) -> Path:
    """Return the folder, which is this launch's until the stack is left."""
    folder = options.folder or Path(time.strftime(f"jaxft-launch-%Y%m%d-%H%M%S-{os.getpid()}"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        of_node = f".node-{options.node}" if options.nodes > 1 else ""
        stack.enter_context(claimed(folder, [f"{name}{of_node}" for name in options.names]))
        (folder / EVENTS).open("ab").close()
    except OSError as error:
        raise LaunchError(
            f"--folder {folder} cannot hold logs and events: {error}. Name another one."
        ) from error
    return folder.absolute()
