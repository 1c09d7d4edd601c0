"""Real processes: each has its own log, and none outlives this one."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Self

from jaxft_launch.processes._python_command import python_command, runs_python
from jaxft_launch.processes._warm import Fork, Warm, warm_command, with_statuses

DIE_WITH_PARENT = Path(__file__).with_name("_die_with_parent.py")

# The files of the certificates for a group's stream to its coordinator.
TLS_VARIABLES = ("JAXFT_TLS_CA", "JAXFT_TLS_CERT", "JAXFT_TLS_KEY")
# A coordinator or a group ends within this after SIGTERM, or it is killed.
STOP_TIMEOUT_S = 5.0
# After SIGKILL, a process ends as soon as the kernel has reclaimed its memory.
REAP_TIMEOUT_S = 30.0
# Child processes may end by themselves after their parent: Python's tracker of shared memory frees that first.
REST_TIMEOUT_S = 2.0
REST_POLL_S = 0.05
LOG_TAIL_LINES = 25
# No more of a log is read for these.
LOG_TAIL_BYTES = 64 << 10
# Exit statuses after SIGKILL: of a process, and of a shell around it.
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(eq=False, slots=True)
class Child:
    """A process that we started, and its own children: they form one process group.

    `log_start_bytes`: where its output begins in its log, after the output of earlier launches.
    `python`: whether its command runs a Python program. A shell, or `env`, may become one later.
    """

    name: str
    log: Path
    _process: subprocess.Popen[bytes] | Fork
    _orders: int | None = None
    log_start_bytes: int = 0
    python: bool = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def warm(self) -> bool:
        """Whether it was forked from a warm process."""
        return isinstance(self._process, Fork)

    def exit_code(self) -> int | None:
        """Return how it ended (negative: by that signal), or None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL, which it cannot catch. Does not wait.

        Child processes of a Python program end after it: its tracker of shared memory frees that first.
        """
        self._signal(signal.SIGKILL, also_rest=not self._is_python())

    def stop(self) -> None:
        """Send SIGSTOP: the process does nothing, while the kernel still answers for its connections."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def order(self, text: str) -> None:
        """Write a line to its pipe of orders, whether or not it is read."""
        assert self._orders is not None, f"{self.name} takes no orders"
        os.write(self._orders, text.encode() + b"\n")

    def say_where(self) -> None:
        """Send SIGUSR2: the library prints where the threads stand; a program without it ends."""
        self._signal(signal.SIGUSR2)

    def terminate(self) -> None:
        """Send SIGTERM: ask it to end.

        Child processes of a Python program do not get it: its step may need the workers of its loader.
        """
        self._signal(signal.SIGTERM, also_rest=not self._is_python())

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close its pipe of orders."""
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None

    def rest(self) -> list[int]:
        """Return the processes of its group that still run. Ask soon after its end: the number may be given again.

        Raises:
            OSError: this cannot be found out now.
        """
        return _running(self.pid)

    def kill_rest(self) -> None:
        """Send SIGKILL to these. Does not wait."""
        for pid in self.rest():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _is_python(self) -> bool:
        found = runs_python(self.pid)
        return self.python if found is None else found

    def _signal(self, number: int, *, also_rest: bool = True) -> None:
        """Send a signal, by default to its child processes, too. A program of another user gets none."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if also_rest else os.kill)(self.pid, number)

    def output(self) -> str:
        """Return its output so far."""
        with self.log.open("rb") as file:
            file.seek(self.log_start_bytes)
            return file.read().decode(errors="replace")

    def _last_output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self.log_start_bytes, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode(errors="replace")

    def log_tail(self) -> str:
        """Return the last lines of its log, under a heading, for messages."""
        try:
            lines = self._last_output().splitlines()[-LOG_TAIL_LINES:]
        except OSError as error:  # someone has removed it, or no descriptor is free
            lines = [f"it cannot be read: {error}"]
        return "\n".join([f"--- end of the log of {self.name} ({self.log.name}) ---", *lines, "---"])


def start_beside(
    words: Sequence[str], output: IO[bytes], *, stderr: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a short command, such as a check. It ends with this process."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=stderr,
        env={name: value for name, value in environment.items() if name != "JAXFT_TOKEN"},
        process_group=0,
    )


def kill_beside(process: subprocess.Popen[bytes]) -> None:
    """End such a command, and its children. Does not wait."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class Processes:
    """Starts processes. At the end of its `with` block, for any reason, the rest of them is ended."""

    def __init__(self, folder: Path, *, cwd: Path, keeps_token: bool = False) -> None:
        """Keep the logs in `folder`, and start everything in `cwd`.

        `keeps_token`: pass on the token and the certificates in our environment. Not to a job with a coordinator of
        our own, which has neither.
        """
        self.folder = folder
        self.cwd = cwd
        none = () if keeps_token else ("JAXFT_TOKEN", *TLS_VARIABLES)
        # Sets of texts have one order in all groups: where a step goes through one, it is the same program in each.
        seed = os.environ.get("PYTHONHASHSEED", "0")
        self._own = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": seed, **dict.fromkeys(none, "")}
        self._children: list[Child] = []
        self._warm: dict[Warm, Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout_s = STOP_TIMEOUT_S if kind is None else 0.0
        self.end(self._children, timeout_s=timeout_s)
        self.end_warm(list(self._warm), timeout_s=timeout_s)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        orders: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        warm: Warm | None = None,
    ) -> Child:
        """Start a command that dies with this process. Its output goes to `NAME.log`; its input is empty.

        It has a separate process group, so that Ctrl-C at the terminal reaches only this process, which then ends it.

        Args:
            name: the name of the process and its log.
            command: a list of words.
            orders: where to create a named pipe for `Child.order`.
            environment: additional environment variables.
            warm: fork it from this warm process, if that is ready and the command allows it. If not, a Python program
                gets the statuses of `with_statuses` all the same.
        """
        log = self.folder / f"{name}.log"
        pipe = None if orders is None else _open_pipe(orders)
        whole = {**os.environ, **self._own, **environment}
        start_bytes = _size_bytes(log)
        cold = command if warm is None else with_statuses(command)
        process = self._forked(warm, command, log, whole) or self._started(cold, log, whole)
        child = Child(name, log, process, pipe, start_bytes, python=python_command(command) is not None)
        self._children.append(child)
        return child

    def start_warm(
        self,
        name: str,
        *,
        environment: Mapping[str, str],
        preload: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Warm:
        """Start a warm process."""
        ours, theirs = socket.socketpair()
        command = warm_command(theirs.fileno(), preload, options)
        log = self.folder / f"{name}.log"
        whole = {**os.environ, **self._own, **environment}
        start_bytes = _size_bytes(log)
        with theirs:
            process = self._started(command, log, whole, pass_fds=(theirs.fileno(),))
        warm = Warm(name, ours)
        self._warm[warm] = Child(name, log, process, log_start_bytes=start_bytes)
        return warm

    def _forked(
        self, warm: Warm | None, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> Fork | None:
        python = python_command(command)
        if warm is None or python is None or not warm.ready:
            return None
        log.touch()
        return warm.fork(python.words, log=log, environment=environment)

    def _started(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        pass_fds: tuple[int, ...] = (),
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env=dict(environment),
                process_group=0,
                pass_fds=pass_fds,
            )

    def end(self, children: Sequence[Child], *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask children to end, wait up to `timeout_s` for all of them together, then kill the others.

        Their child processes end with them, a moment later.
        """
        running = [child for child in children if child.exit_code() is None]
        for child in running:
            child.terminate()
        deadline_s = time.monotonic() + timeout_s
        for child in running:
            if not child.wait(max(0.0, deadline_s - time.monotonic())):
                child.kill()
        for child in children:
            child.wait(REAP_TIMEOUT_S)
            child.close()
        deadline_s = time.monotonic() + min(timeout_s, REST_TIMEOUT_S)
        while _any_left(running) and time.monotonic() < deadline_s:
            time.sleep(REST_POLL_S)
        with contextlib.suppress(OSError):
            for child in running:
                child.kill_rest()

    def end_warm(self, warm: Sequence[Warm], *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End warm processes, and the forks of them that still run."""
        for each in warm:
            each.close()
        self.end([self._warm.pop(each) for each in warm], timeout_s=timeout_s)


def _any_left(children: Sequence[Child]) -> bool:
    """Whether their child processes may still run."""
    try:
        return any(child.rest() for child in children)
    except OSError:  # it may be found out later
        return True


def _running(group: int) -> list[int]:
    """The processes of a process group in our session that run. None where there is no /proc.

    Raises:
        OSError: this cannot be found out now, as without a free descriptor.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:  # none at all, which needs no descriptor to find out
        return []
    except PermissionError:  # of another user
        pass
    session = os.getsid(0)
    found: list[int] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            # After its name, which may have spaces and brackets: state, parent, process group, session.
            state, _, its_group, its_session = file.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if (int(its_group), int(its_session)) == (group, session) and state not in "ZX":
                found.append(int(file.parent.name))
    return found


def _size_bytes(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _open_pipe(path: Path) -> int:
    """Create a named pipe and return its end for orders, which accepts data before there is a reader."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)
