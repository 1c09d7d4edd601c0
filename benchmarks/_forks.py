"""Incarnations by the dozen: one process imports everything once, and forks whenever another is wanted.

Standard library only: the peer's workers use it as well. Nothing may have been started before the fork: imports make
no threads on either side, and what trains begins in the child.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO


class Forks:
    """The parent's side: a process of `module` that waits to be forked."""

    def __init__(self, module: str, *arguments: str, python: Path, env: dict[str, str], cwd: Path) -> None:
        self.module = module
        self.log = tempfile.TemporaryFile("w+")  # of all of them
        self._sock, theirs = socket.socketpair()
        with theirs:
            command = [str(python), "-m", module, *arguments, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=env, cwd=cwd, stderr=self.log
            )

    def fork(self) -> "Forked":
        """Return a new process; blocks until the imports are done."""
        told, tell = os.pipe()
        heard, hear = os.pipe()
        socket.send_fds(self._sock, [b"f"], [told, hear])
        os.close(told)
        os.close(hear)
        pid = self._sock.recv(4)
        if len(pid) != 4:
            raise ChildProcessError(f"{self.module} cannot be forked")
        return Forked(int.from_bytes(pid, "big"), os.fdopen(tell, "w"), os.fdopen(heard))

    def close(self) -> None:
        self._sock.close()
        self._process.kill()
        self._process.wait()


class Forked:
    """What is needed of `subprocess.Popen`, for a process that is no child of this one."""

    def __init__(self, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return when it is gone; its status is not known."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return 0


def serve_forks(descriptor: int) -> None:
    """The other side: return in each child, with standard input and output of its own; never in this process."""
    sock = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        word, descriptors, _, _ = socket.recv_fds(sock, 1, 2)
        if not word:
            sys.exit(0)
        pid = os.fork()
        if pid == 0:
            break
        for each in descriptors:
            os.close(each)
        sock.sendall(pid.to_bytes(4, "big"))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sock.close()
    for target, each in enumerate(descriptors):
        os.dup2(each, target)
        os.close(each)
