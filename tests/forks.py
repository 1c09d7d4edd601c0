"""Processes forked from a parent that has JAX and jaxft imported: a fresh interpreter needs two seconds for that.

Each is a real process, with its own address space, threads, sockets and backend: the process that they are forked
from has imported modules, and started no thread and no backend. `Script` is a process as `subprocess.Popen` shows
it; `Actor` holds an object whose methods the test calls over a pipe.
"""

import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from jaxft_launch.processes._warm_process import ALWAYS, WHERE_FOUND
from tests import patience

# Of <sched.h>.
_CLONE_NEWNET = 0x40000000

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *ALWAYS,
        *WHERE_FOUND,
        "jaxft_launch.__main__",
        "jaxft._exchange",
        "jaxft._heal._server",
        "jaxft_launch.supervise.launch",
        "jaxft_coordinator._cli",
        "jaxft_coordinator._serve",
        "tests.exchange.processes",
        "tests.heal.processes",
    ]
)


class Script:
    """`python PATH ARGUMENTS...`, or `python -m MODULE ARGUMENTS...`, with its output in a file.

    Args:
        program: the path of a script, or the name of a module.
        namespace: the network namespace that it runs in, by the name that `ip netns` knows; "": the tests' own.
        variables: of its environment, besides the tests'.
        folder: its working folder; by default the tests'.
    """

    def __init__(
        self,
        program: Path | str,
        arguments: Sequence[str],
        log: Path,
        *,
        namespace: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
        folder: Path = Path(),
        **jax_config: Any,
    ) -> None:
        log.write_bytes(b"")  # an earlier process's output must not be taken for its own
        environment = {**os.environ, **variables}
        process = _context.Process(
            target=_become,
            args=(program, [*arguments], log.absolute(), folder, environment, namespace, jax_config),
            daemon=True,
        )
        process.start()
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return cast(int, self._process.exitcode)

    def send_signal(self, number: int) -> None:
        # The fork server has reaped a process for a moment before it reports it.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _enter(namespace: str) -> None:
    """Have this thread, and its children, see only the network of a namespace. Needs Linux, and root."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _become(  # noqa: PLR0913 (as the context of a process hands them on)
    program: Path | str,
    arguments: list[str],
    log: Path,
    folder: Path,
    environment: dict[str, str],
    namespace: str,
    jax_config: dict[str, Any],
) -> None:
    os.chdir(folder)
    if namespace:
        _enter(namespace)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    import jax

    os.environ.clear()
    os.environ.update(environment)
    for name, value in jax_config.items():  # JAX has read the environment already
        jax.config.update(name, value)
    sys.argv = [str(program), *arguments]
    if isinstance(program, str):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(program), run_name="__main__")


class Actor:
    """A process with an object made by `make(pipe, *arguments)`, as the test sees it.

    CLOCK_MONOTONIC is the same in all processes of a machine.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, name: str, *arguments: Any) -> None:
        """Have a method called; `answer` returns its result."""
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(patience.FAR_S), "no answer"
        return self._pipe.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.answer()

    def go_on(self) -> Any:
        """Let it out of where it waits for a word on its pipe."""
        self._pipe.send("go on")
        return self.answer()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    made = make(pipe, *arguments)
    while (request := pipe.recv()) is not None:
        name, values = request
        pipe.send(getattr(made, name)(*values))
