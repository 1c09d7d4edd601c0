"""How much memory a process can still get from its host, or from its container."""

import contextlib
import re
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


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
