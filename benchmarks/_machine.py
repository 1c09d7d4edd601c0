"""The machine of a measurement, without which figures have no meaning."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from jaxft._exchange import _compiled


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jaxft", "jax", "jaxlib", "numpy", "grpcio")},
        "lane": _compiled.describe(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def memory_bytes(field: str, file: str = "self/status") -> int:
    """A figure of the kernel's about memory: of this process, or of another file of /proc."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc", file).read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) << 10


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
