"""Fast starts of incarnations: one process imports everything once, and forks a child for each incarnation.

Standard library only, because the peer's workers use it too. Nothing may be started before the fork: imports start no
threads on either side, and training starts in the child.
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
        self.log = tempfile.TemporaryFile("w+")  # of all children
        self._sock, theirs = socket.socketpair()
        with theirs:
            command = [str(python), "-m", module, *arguments, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=env, cwd=cwd, stderr=self.log
            )

    def fork(self) -> "Forked":
        """Return a new process; waits for the imports."""
        orders, tell = os.pipe()
        heard, hear = os.pipe()
        socket.send_fds(self._sock, [b"f"], [orders, hear])
        os.close(orders)
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
    """The used part of `subprocess.Popen`, for a process that is not a child of this one."""

    def __init__(self, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit status is not known."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return 0


def serve_forks(descriptor: int) -> None:
    """The child's side: returns only in children, each with its own standard input and output."""
    sock = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
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
