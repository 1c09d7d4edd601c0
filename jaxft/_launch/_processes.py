"""Real processes: each with a log of its own, and none that outlives us."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

_DIE_WITH_PARENT = Path(__file__).with_name("_die_with_parent.py")

# A coordinator or a group ends within this after SIGTERM, or it is killed.
STOP_TIMEOUT_S = 5.0
# A process that got SIGKILL is gone as soon as the kernel has taken its memory back.
REAP_TIMEOUT_S = 30.0
LOG_TAIL_LINES = 25
# How a process ends by SIGKILL, or a shell around it.
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(eq=False, slots=True)
class Child:
    """A process that we started, with those that it starts itself: they stand in one process group."""

    name: str
    log: Path
    _process: subprocess.Popen[bytes]
    _orders: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how it ended (negative: by that signal), or None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL, which it can neither see coming nor catch. Does not wait."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGSTOP: from now on it does nothing, and the kernel goes on answering for it."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def order(self, text: str) -> None:
        """Write a line to its pipe of orders, whether or not somebody reads it."""
        assert self._orders is not None, f"{self.name} takes no orders"
        os.write(self._orders, text.encode() + b"\n")

    def terminate(self) -> None:
        """Send SIGTERM: ask it to end."""
        self._signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Give the pipe of its orders back."""
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def log_tail(self) -> str:
        """Return the last lines that it wrote, under a heading, for a person to read."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- end of the log of {self.name} ({self.log.name}) ---", *lines, "---"])


class Processes:
    """Starts processes, and ends those that still run when its `with` block is left, for whatever reason."""

    def __init__(self, folder: Path, *, cwd: Path) -> None:
        """Keep the logs in `folder`, and start everything in `cwd`."""
        self.folder = folder
        self._cwd = cwd
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(self._children, timeout_s=STOP_TIMEOUT_S if kind is None else 0.0)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        orders: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Start a command, bound to our own life. Its output goes to `NAME.log`; its input is empty.

        It stands in a process group of its own, so that a Ctrl-C at the terminal reaches only us, who then end it.

        Args:
            name: of the process and its log.
            command: a list of words.
            orders: make a named pipe here, for `Child.order`.
            environment: what it finds there besides ours.
        """
        log = self.folder / f"{name}.log"
        pipe = None if orders is None else _open_pipe(orders)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._cwd,
                # A token that lies around is not this job's: its coordinator has no secret.
                env={**os.environ, "PYTHONUNBUFFERED": "1", "JAXFT_TOKEN": "", **environment},
                process_group=0,
            )
        child = Child(name, log, process, pipe)
        self._children.append(child)
        return child

    def end(self, children: Sequence[Child], *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask children to end, give all of them together `timeout_s` for it, then kill those that have not."""
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


def _open_pipe(path: Path) -> int:
    """Make a named pipe and return its end for orders, which can be written before anybody reads."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)
