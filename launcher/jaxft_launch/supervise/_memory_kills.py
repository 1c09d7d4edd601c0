"""How often the kernel has killed a process of this machine for lack of memory."""

import re
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def memory_kills() -> int:
    """Return how often since the machine started, in any container; 0 if the kernel does not tell."""
    try:
        found = _COUNT.search(Path("/proc/vmstat").read_text())
    except OSError:
        return 0
    return 0 if found is None else int(found[1])


def memory_text(kills: int) -> str:
    """Return what a process that was killed may have died of, if the kernel did this so often while it lived."""
    if kills <= 0:
        return ""
    processes = "a process" if kills == 1 else f"{kills} processes"
    return (
        f". While it ran, the kernel killed {processes} of this machine for lack of memory: its own log says which "
        "(dmesg). Give the group more memory, or let it take less, such as fewer workers that load data"
    )
