"""Worker processes of a benchmark: commands in and results out, as lines of JSON.

A worker is a module that calls `serve(...)` with an object whose methods are its commands. It may run under another
interpreter (the peer's), so this module imports nothing but the standard library.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks._forks import Forked

ROOT = Path(__file__).resolve().parent.parent
ANSWER_TIMEOUT_S = 120.0


class WorkerFailed(Exception):
    """A worker raised, died, or did not answer in time."""


class Worker:
    """One process, from the parent's side.

    Args:
        module: the module that it runs, such as "benchmarks._ours.exchange".
        arguments: the module's arguments.
        python: the interpreter; by default this one.
        prefix: a command that runs it, such as `ip netns exec NAME`.
        env: additional environment variables.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: Path | None = None,
        prefix: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        command = [*prefix, str(python or sys.executable), "-m", module, *arguments]
        log = tempfile.TemporaryFile("w+")  # shown only if it fails
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=variables(env or {}),
            cwd=ROOT,
            text=True,
        )
        self.follow(module, process, log)

    def follow(self, module: str, process: "subprocess.Popen[str] | Forked", log: IO[str]) -> None:
        """Use a process that already runs, and whose standard error is this log."""
        self.module = module
        self._log = log
        self._process = process
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Any:
        """Send the worker a command, and wait for the result."""
        self.tell(command, **arguments)
        return self.hear(timeout_s)

    def tell(self, command: str, **arguments: Any) -> None:
        """Send the worker a command; `hear` returns the result."""
        assert self._process.stdin is not None
        line = json.dumps({"do": command, "with": arguments}) + "\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerFailed(
                f"{self.module} has ended before the command {command}: {self._last_words()}"
            ) from error

    def hear(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the next result.

        Raises:
            WorkerFailed: with the worker's own traceback, if it raised; or it has died, or does not answer.
        """
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerFailed(f"{self.module} has not answered for {timeout_s:g} s") from None
        if answer is None:
            raise WorkerFailed(
                f"{self.module} died with status {self._process.wait(10)}: {self._last_words()}"
            )
        if "error" in answer:
            raise WorkerFailed(f"{self.module}: {answer['error']}")
        return answer["result"]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)

    def end(self) -> None:
        """Let it end by itself; kill it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):  # other output of libraries is not for us
                self._answers.put(json.loads(line))
        self._answers.put(None)


def variables(more: dict[str, str]) -> dict[str, str]:
    """The environment of a worker."""
    ours = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **ours, **more}


@contextlib.contextmanager
def workers(*made: Worker) -> Iterator[tuple[Worker, ...]]:
    """End these processes, whatever happens."""
    try:
        yield made
    finally:
        for worker in made:
            worker.kill()


def serve(commands: object) -> None:
    """Execute the commands on standard input, which are names of methods, until it ends."""
    import traceback

    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(commands, command["do"])(**command["with"])}
        except Exception:  # the parent raises it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
