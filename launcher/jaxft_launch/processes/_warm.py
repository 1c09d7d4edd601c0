"""A warm process, which has imported JAX and jaxft: a group's processes are forked from it.

A restarted group is back sooner by the seconds that these imports take. Each group has its own warm process, because
its forks end with it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxft_launch.processes._python_command import python_command

# Run as files, not as modules: those would import what lies in the working folder, such as a `random.py`.
PROGRAM = Path(__file__).with_name("_program.py")
WARM_PROCESS = Path(__file__).with_name("_warm_process.py")
# A fork takes milliseconds; the machine may be busy.
FORK_TIMEOUT_S = 20.0
IMPORT_TIMEOUT_S = 300.0


def with_statuses(command: Sequence[str]) -> list[str]:
    """Return the command so that errors of the library get their own exit statuses, if it is a Python program."""
    python = python_command(command)
    return list(command) if python is None else python.through(PROGRAM)


def warm_command(descriptor: int, preload: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command of a warm process that is asked through a socket."""
    return [sys.executable, *options, str(WARM_PROCESS), str(descriptor), *preload]


class Fork:
    """A process that was forked from a warm one, with the methods of `subprocess.Popen` that are used here."""

    def __init__(self, warm: "Warm", pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        if self.status is None:
            self._warm.listen()
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left_s = 1.0 if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._warm.listen(min(left_s, 1.0))
        assert self.status is not None
        return self.status


class Warm:
    """The launcher's end of a warm process."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        # Why it cannot fork (any more), as a sentence without an end; "" as long as it can, or may soon.
        self.problem = ""
        self._connection = connection
        self._began_s = time.monotonic()
        self._ready = False
        self._rest = b""
        self._number = 0
        self._new: dict[int, Fork] = {}
        self._running: dict[int, Fork] = {}

    @property
    def was_ready(self) -> bool:
        """Whether it could fork at some time."""
        return self._ready

    @property
    def age_s(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self._began_s

    @property
    def ready(self) -> bool:
        """Whether it can fork now."""
        self.listen()
        if not self._ready and not self.problem and self.age_s > IMPORT_TIMEOUT_S:
            self._end(f"its imports take longer than {IMPORT_TIMEOUT_S:.0f} s")
        return self._ready and not self.problem

    def until_ready(self) -> bool:
        """Wait until it can fork, or cannot; return which."""
        while not self.ready and not self.problem:
            self.listen(0.5)
        return not self.problem

    def fork(self, words: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Fork | None:
        """Run `python WORDS...` in a fork; return None if it cannot."""
        number = self._number
        self._number += 1
        request = {"number": number, "words": list(words), "log": str(log), "environment": dict(environment)}
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            self._end(f"it does not take requests: {error}")
            return None
        deadline_s = time.monotonic() + FORK_TIMEOUT_S
        while number not in self._new and not self.problem:
            if time.monotonic() > deadline_s:
                self._end(f"it did not answer within {FORK_TIMEOUT_S:.0f} s")
            self.listen(0.1)
        return self._new.pop(number, None)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Read its answers; wait up to `timeout_s` for the first."""
        if self.problem:
            return
        self._connection.settimeout(timeout_s)
        try:
            new = self._connection.recv(65536)
        except (BlockingIOError, TimeoutError):
            return
        except OSError as error:
            self._end(f"its connection failed: {error}")
            return
        finally:
            self._connection.settimeout(FORK_TIMEOUT_S)
        if not new:
            self._end("it has ended")
            return
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def close(self) -> None:
        """Let it end, with its forks."""
        self._end("it was closed")

    def _hear(self, fields: dict[str, Any]) -> None:
        match fields:
            case {"ready": bool(ready), "problem": str(problem)}:
                self._ready = ready
                if problem:
                    self._end(problem)
            case {"number": int(number), "pid": int(pid)}:
                self._new[number] = self._running[number] = Fork(self, pid)
            case {"number": int(number), "status": int(status)}:
                self._running.pop(number).status = status
            case _:
                raise AssertionError(fields)

    def _end(self, problem: str) -> None:
        """The kernel kills its forks when it ends."""
        if self.problem:
            return
        self.problem = problem
        self._connection.close()
        for fork in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(fork.pid, signal.SIGKILL)
            fork.status = -signal.SIGKILL
        self._running.clear()
