"""Resources of the system: free host memory, and waits for a descriptor, thread or memory in a shortage.

Other parts of the program, or other programs, may give some back soon: a checkpoint that is written, files of data,
another connection. Without, the training thread would raise, and end the group.
"""

import contextlib
import errno
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger("jaxft")

TIMEOUT_S = 5.0
# Most shortages are over before.
_SAY_AFTER_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_THREAD = "can't start new thread"
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
MORE_DESCRIPTORS = "If that is a limit of this process (`ulimit -n`, LimitNOFILE= of systemd), raise it"


def once_there_is_room(make: Callable[[], T]) -> T:
    """Return what `make` opens or starts. If there is no room for it, try again for a while.

    Raises:
        OSError: there was no descriptor, or no memory, in that time; the text has the advice.
        RuntimeError: the same for a thread.
    """
    begun_s, say_after_s, pause_s = time.monotonic(), _SAY_AFTER_S, _FIRST_PAUSE_S
    while True:
        try:
            return make()
        except (OSError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            waited_s = time.monotonic() - begun_s
            if waited_s >= TIMEOUT_S:
                raise _explained(error, waited_s) from error
            if waited_s >= say_after_s:
                say_after_s = math.inf
                text = "No room for a connection or a thread for %.1f s (%s); tries again for %.0f s."
                _log.warning(text, waited_s, _text(error), TIMEOUT_S - waited_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def start_thread(target: Callable[..., object], *arguments: object, name: str) -> threading.Thread:
    """Start a daemon thread and return it. If there is no room for it, try again for a while.

    Raises:
        RuntimeError: there was none in that time; the text has the advice.
    """

    def start() -> threading.Thread:
        # A new thread each time: Python 3.13 believes that a thread which failed to start runs.
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    return once_there_is_room(start)


def is_shortage(error: OSError | RuntimeError) -> bool:
    return error.errno in _NO_ROOM if isinstance(error, OSError) else str(error) == _NO_THREAD


def _text(error: OSError | RuntimeError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


def _explained(error: OSError | RuntimeError, waited_s: float) -> OSError | RuntimeError:
    if isinstance(error, OSError):
        return OSError(
            error.errno,
            f"{_text(error)}, for {waited_s:.1f} s. {MORE_DESCRIPTORS}; `ls -l /proc/PID/fd` shows the open files",
        )
    return RuntimeError(
        f"{_text(error)}, for {waited_s:.1f} s. If that is a limit on processes (`ulimit -u`, TasksMax= of systemd, "
        "pids.max of the container), raise it; `ps -eLf` shows all threads."
    )


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """The host memory that this process can still get, with the limit of its container; None if unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, TypeError, ValueError):
        found.append(1024 * _number(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text()))
    with contextlib.suppress(OSError, TypeError, ValueError):  # no limit is "max"
        used = int((cgroup / "memory.current").read_text())
        cached = _number(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text())
        found.append(int((cgroup / "memory.max").read_text()) - used + cached)
    return min(found, default=None)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1])  # pyright: ignore[reportOptionalSubscript] (a TypeError if it is not there)
