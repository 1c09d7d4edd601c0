"""The command `jaxft launch`: starts a job's groups on this machine, and keeps them alive until the job is done."""

import contextlib
import io
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from jaxft_protocol.values import LongWait

from jaxft_launch.processes._checks import LaunchError, check_command, check_installed
from jaxft_launch.processes._coordinator import COORDINATOR, Coordinator, StartStopped
from jaxft_launch.processes._devices import devices_here
from jaxft_launch.processes._processes import Child, Processes
from jaxft_launch.supervise._folder import Journal, claimed
from jaxft_launch.supervise._options import LaunchOptions
from jaxft_launch.supervise._output import LogTail, Output, Row, make_output
from jaxft_launch.supervise._plan import LaunchPlan, plan
from jaxft_launch.supervise.core import launch as core
from jaxft_launch.supervise.core.entries import CoordinatorStarted, Entry, LaunchBegan, LaunchEnded
from jaxft_launch.supervise.core.group import ALIVE, Group
from jaxft_launch.supervise.core.values import AGAIN, Signalled
from jaxft_launch.supervise.driver import Driver

EVENTS = "events.jsonl"
POLL_S = 0.02
# Schedulers send the last two on request, some time before the end.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_launch(options: LaunchOptions, words: Sequence[str]) -> int:
    """Run the groups until all have ended; return the exit status.

    Raises:
        LaunchError: an option is not valid, the program does not exist, or the coordinator does not start.
    """
    check_command(words, command="jaxft launch")
    return run(plan(options, words, os.environ, devices=devices_here(os.environ)))


def run(planned: LaunchPlan, *, coordinator: tuple[str, ...] = COORDINATOR) -> int:
    """Run a plan until all of its groups have ended; return the exit status.

    Raises:
        LaunchError: a program of the plan does not exist, or the coordinator does not start.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # no character of a program's output ends a launch
        sys.stdout.reconfigure(errors="backslashreplace")
    for flag, command in (("--probe", planned.probe), ("--check", planned.check)):
        if command and shutil.which(command[0]) is None:
            raise LaunchError(f"{flag}: there is no program {command[0]!r} to run.")
    if not planned.coordinator:
        check_installed(("jaxft_coordinator",), remedy="pip install jaxft-coordinator")
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_signals())
        folder = _folder(planned, stack)
        phases = _phases(stack)
        output = stack.enter_context(make_output(sys.stdout))
        reporter = Reporter(Journal(folder / EVENTS, output.say), output)
        processes = stack.enter_context(
            Processes(folder, cwd=Path.cwd(), keeps_token=bool(planned.coordinator))
        )
        own = None
        if not planned.coordinator:
            try:
                own = _own_coordinator(planned, processes, coordinator, phases, output, signals)
            except StartStopped:
                name = signal.Signals(signals[0]).name
                output.say(f"got {name} while the coordinator started: no group was started")
                return 128 + signal.SIGINT if signals[0] == signal.SIGINT else AGAIN
        driver = Driver(planned, processes, phases=phases, listener=reporter, coordinator=own)
        stack.callback(driver.end)
        reporter.begin(planned, folder, own)
        _until_over(driver, signals, output)
        status, lines = core.verdict(driver.launch)
        for text in lines:
            output.say(text)
        reporter.write(LaunchEnded(status=status))
        output.say(f"ends with exit status {status}")
        return status


class Reporter:
    """Writes the journal of a launch, and its lines."""

    def __init__(self, journal: Journal, output: Output) -> None:
        self._journal = journal
        self._output = output

    def write(self, entry: Entry) -> None:
        self._journal.write(entry)

    def say(self, text: str) -> None:
        self._output.say(text)

    def begin(self, planned: LaunchPlan, folder: Path, own: Coordinator | None) -> None:
        nproc = planned.groups[0].nproc
        self.say(f"{len(planned.groups)} groups x {nproc}; logs and {EVENTS} in {folder}")
        for note in planned.notes:
            self.say(note)
        self.write(
            LaunchBegan(
                groups=[member.name for member in planned.groups],
                nproc=nproc,
                coordinator=planned.coordinator if own is None else own.address,
                command=list(planned.command),
                folder=str(folder),
            )
        )
        if own is not None:
            self.say(f"coordinator at {own.address} (pid {own.child.pid})")
            self.write(CoordinatorStarted(pid=own.child.pid, address=own.address))


def _until_over(driver: Driver, signals: Sequence[int], output: Output) -> None:
    """Drive until all groups are over. A number in `signals`, which may grow, drains or ends them."""
    seen, tails = 0, dict[Child, LogTail]()
    while not driver.over:
        for number in signals[seen:]:
            seen += 1
            driver.send(Signalled(signal.Signals(number).name))
        driver.poll()
        _pass_on(driver, tails, output)
        output.show(lambda: [_row_of(driver, group) for group in driver.launch.groups])
        time.sleep(POLL_S)
    _pass_on(driver, tails, output)


def _pass_on(driver: Driver, tails: dict[Child, LogTail], output: Output) -> None:
    """Pass on the new lines of all programs."""
    for group in driver.launch.groups:
        children = driver.children(group.name)
        for rank, child in zip(group.ranks, children, strict=False):
            tail = tails.setdefault(child, LogTail(child.log, child.log_start_bytes))
            name = group.name if len(group.ranks) == 1 else f"{group.name}/{rank}"
            # Its child processes may still write, such as a program in a shell.
            for line in tail.lines(last=group.phase not in ALIVE):
                output.pass_on(name, line)


def _row_of(driver: Driver, group: Group) -> Row:
    """Return a group's line of the table."""
    alive = group.life is not None and group.phase in ALIVE
    ranks = [rank for rank in group.life.ranks if rank.sign] if alive and group.life else []
    return Row(
        group=group.name,
        state=group.phase,
        pids=group.life.pids if alive and group.life else (),
        starts=group.lives,
        phase=" ".join(dict.fromkeys(rank.sign.phase for rank in ranks if rank.sign)),
        step=group.highest_step,
        phase_s=max((driver.now_s - rank.since_s for rank in ranks), default=None),
    )


def _own_coordinator(
    planned: LaunchPlan,
    processes: Processes,
    command: Sequence[str],
    phases: Path,
    output: Output,
    signals: Sequence[int],
) -> Coordinator:
    """Start a coordinator, unless a signal arrives. Its page never stops a launch."""
    flags = ["--state", str(processes.folder / "coordinator")]
    if planned.http:
        if problem := _taken(planned.http):
            output.say(
                f"there is no page at http://{planned.http}/: {problem}. The launch continues without it"
            )
        else:
            flags += ["--http", planned.http]
            output.say(f"the page is at http://{planned.http}/")
    wait = LongWait(time.monotonic())

    def stopped() -> bool:
        if (waited_s := wait.to_say(time.monotonic())) is not None:
            output.say(f"waits for its coordinator to listen, for {waited_s:.0f} s now")
        return bool(signals)

    return Coordinator(processes, (*command, *flags), stopped=stopped, alive=phases / "coordinator.alive")


def _taken(address: str) -> str:
    """Return why nothing can listen at HOST:PORT; "" if it can."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield the list of the signals that have arrived."""
    arrived: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    # `nohup jaxft launch` is to outlive its terminal.
    heeded = [
        number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
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


def _folder(planned: LaunchPlan, stack: contextlib.ExitStack) -> Path:
    """Return the folder, which is this launch's until the stack is left."""
    folder = planned.folder or Path(time.strftime(f"jaxft-launch-%Y%m%d-%H%M%S-{os.getpid()}"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(claimed(folder, planned.locks))
        (folder / EVENTS).open("ab").close()
    except OSError as error:
        raise LaunchError(
            f"--folder {folder} cannot hold logs and events: {error}. Name another one."
        ) from error
    return folder.absolute()
