"""A process that has imported JAX and jaxft, and forks a program whenever it is asked to: see `_warm`.

    python _warm_process.py DESCRIPTOR MODULE...

It starts no thread and no backend, so a fork of it is like a fresh process that has imported these modules. Requests
and answers are JSON lines on the socket DESCRIPTOR. It ends when the socket closes. A forked program ends with it.

SIGTERM does not end it, since schedulers such as Slurm send that to all processes of a job at once, and the forked
program would die before it has finished its step.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxft_launch.processes._die_with_parent import bind_to
from jaxft_launch.processes._jax_again import JaxAgain, follow
from jaxft_launch.processes._program import lead_path, run

# All that a group may need until its first contribution: `import jaxft` alone imports nothing.
ALWAYS = (
    "jax",
    "jax.numpy",
    "jaxft._arrays._norm",
    "jaxft._supervised._agent",
    "jaxft._ranks._follower",
    "jaxft._ranks._leader",
    "jaxft._step",
    "jaxft.data",
    "cryptography.hazmat.primitives.ciphers.aead",
)
# JAX imports these when it lowers its first program: 40 ms of 150. A later JAX may have others.
WHERE_FOUND = ("jaxlib.mlir.dialects.mhlo", "jaxlib.mlir.dialects.builtin")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    read = dict(os.environ)
    problem = imported(sys.argv[2:])
    tell(connection, {"ready": not problem, "problem": problem})
    if problem:
        return
    gc.collect()
    gc.freeze()  # keeps the pages that all forks share
    # Blocked and not ignored, so that a program gets a SIGTERM that comes right after its fork.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    request = serve(connection)
    if request is not None:  # this is the forked process
        connection.close()
        become(request, read)


def imported(modules: list[str]) -> str:
    """Import the modules; return why this process cannot be forked after that, or ""."""
    for name in ALWAYS:
        importlib.import_module(name)
    for name in WHERE_FOUND:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    lead_path(os.getcwd())
    before = _threads()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            traceback.print_exc()
            return f"the module {name!r} cannot be imported: {type(error).__name__}: {error}"
        if _threads() > before:
            return f"the module {name!r} starts a thread when it is imported"
    return ""


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request; return None when the socket closes, or the request in a forked process."""
    numbers: dict[int, int] = {}  # of requests, by the process id
    with selectors.DefaultSelector() as selector, _child_ends() as ends:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(ends, selectors.EVENT_READ)
        lines = connection.makefile("rb")
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if ends in ready:
                ends.recv(4096)
                for pid, status in _ended():
                    if pid in numbers:  # an imported module may have started processes too
                        tell(connection, {"number": numbers.pop(pid), "status": status})
            if connection in ready:
                # One request is under way at a time, and its line is short.
                line = lines.readline()
                if not line:
                    return None
                request = json.loads(line)
                parent_pid = os.getpid()
                pid = os.fork()
                if pid == 0:
                    bind_to(parent_pid)
                    lines.close()
                    return request
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the fork does the same
                    os.setpgid(pid, pid)
                numbers[pid] = request["number"]
                tell(connection, {"number": request["number"], "pid": pid})


def become(request: dict[str, Any], read: Mapping[str, str]) -> None:
    """Be the requested program, until it ends. `read`: the environment when JAX was imported."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    import jax

    follow(jax, read)
    JaxAgain(os.environ).install()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forks of one process would all draw the same numbers
    run(request["words"])


def tell(connection: socket.socket, fields: dict[str, Any]) -> None:
    connection.sendall(json.dumps(fields).encode() + b"\n")


def _threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


@contextlib.contextmanager
def _child_ends() -> Any:
    """Yield a socket that can be read once a child has ended."""
    ends, wake = socket.socketpair()
    ends.settimeout(0.0)
    wake.settimeout(0.0)
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    try:
        yield ends
    finally:  # in a forked process, too
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, handler)
        ends.close()
        wake.close()


def _ended() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


if __name__ == "__main__":
    main()
