"""A coordinator on a free port, which can be killed and restarted on the same port."""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._processes import Processes
from jaxft_launch.processes._ranks import free_ports

# How long the first quorum waits for groups that have joined but still compile, so that all start in one quorum.
JOIN_TIMEOUT_MS = 120_000
COORDINATOR = (
    *(sys.executable, "-P", "-m", "jaxft_coordinator"),  # nothing from the working folder
    *("--min-replicas", "1", "--join-timeout-ms", str(JOIN_TIMEOUT_MS)),
)
# Names the file that a coordinator touches every second, as long as its event loop runs.
ALIVE_FILE = "JAXFT_PHASE_FILE"
LOCAL = "localhost"
LISTENS = re.compile(r"\(port (\d+)\)")
START_TIMEOUT_S = 60.0
POLL_S = 0.02


class StartStopped(Exception):
    """The coordinator did not listen yet, and was not to be waited for any longer."""


class Coordinator:
    """A coordinator's process, and the port on which it listens during the whole job."""

    def __init__(
        self,
        processes: Processes,
        command: Sequence[str] = COORDINATOR,
        *,
        name: str = "coordinator",
        host: str = LOCAL,
        stopped: Callable[[], bool] = lambda: False,
        alive: Path | None = None,
    ) -> None:
        """Start it, and return once it listens: for other machines too, if `host` is a name that they know.

        `alive`: the file for its signs of life.

        Raises:
            LaunchError: it cannot be started, ended, or did not listen in time; the message shows its log.
            StartStopped: `stopped` returned true; it is killed.
        """
        self._processes = processes
        self._command = tuple(command)
        self._name = name
        self._lives = 1
        self._host = host
        self._alive = alive
        # Not the seed of the groups: it keeps names from the network in tables.
        seed = os.environ.get("PYTHONHASHSEED", "random")
        self._environment = {"PYTHONHASHSEED": seed} | ({} if alive is None else {ALIVE_FILE: str(alive)})
        # Not a port that the kernel gives to connections: the next life could find that taken.
        words = [*command, "--bind", self._bind(free_ports(1)[0])]
        try:
            self.child = processes.start(name, words, environment=self._environment)
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"The coordinator cannot be started: {error}.") from error
        self.port = self._until_it_listens(stopped)

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def _bind(self, port: int) -> str:
        return f"{LOCAL if self._host == LOCAL else '[::]'}:{port}"

    def start_again(self) -> None:
        """Restart it on its port after it has ended. Does not wait: see `listens`."""
        command = [*self._command, "--bind", self._bind(self.port)]
        if self._alive is not None:
            self._alive.unlink(missing_ok=True)
        name = f"{self._name}.{self._lives}"
        self.child = self._processes.start(name, command, environment=self._environment)
        self._lives += 1

    def sign(self) -> int | None:
        """Return its last sign of life, as the time of its file; None before the first one."""
        try:
            return None if self._alive is None else self._alive.stat().st_mtime_ns
        except OSError:  # someone has removed it
            return None

    def listens(self) -> bool:
        """Whether the current process has reported that it listens.

        Raises:
            LaunchError: it has ended.
        """
        exit_code = self.child.exit_code()
        if self.has_listened():
            return True
        if exit_code is not None:
            raise LaunchError(
                f"The coordinator ended at once, with exit status {exit_code}.\n{self.child.log_tail()}"
            )
        return False

    def has_listened(self) -> bool:
        """Whether the current process, which may have ended, has reported that it listens."""
        return LISTENS.search(self.child.output()) is not None

    def _until_it_listens(self, stopped: Callable[[], bool]) -> int:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (port := self._port_now()) is None:
            if stopped():
                self.child.kill()
                raise StartStopped
            if time.monotonic() >= deadline_s:
                text = f"The coordinator does not listen after {START_TIMEOUT_S:.0f} s."
                raise LaunchError(f"{text}\n{self.child.log_tail()}")
            time.sleep(POLL_S)
        return port

    def _port_now(self) -> int | None:
        try:
            found = LISTENS.search(self.child.output()) if self.listens() else None
        except OSError:  # its log cannot be read now, as without a free descriptor
            return None
        return None if found is None else int(found.group(1))
