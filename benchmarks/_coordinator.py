"""A coordinator in a separate process, and its use of the machine."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from benchmarks._machine import memory_bytes
from benchmarks._worker import ROOT


@dataclass(frozen=True)
class Coordinator:
    """A coordinator that listens.

    Attributes:
        url: of its HTTP port; "" without one.
    """

    address: str
    pid: int
    url: str = ""

    def cpu_s(self) -> float:
        """The CPU time of all its threads."""
        return time.clock_gettime((~self.pid << 3) | 2)  # Linux: the CPU clock of that process

    def resident_mib(self) -> float:
        return memory_bytes("VmRSS", f"{self.pid}/status") / (1 << 20)


@contextlib.contextmanager
def coordinator(*options: str, http: bool = False) -> Iterator[Coordinator]:
    """A coordinator on a free port, by default with its default settings."""
    more = ("--http", "localhost:0") if http else ()
    command = [sys.executable, "-m", "jaxft_coordinator", "--bind", "localhost:0", *more, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        port = _said(process.stderr, r"\(port (\d+)\)")
        url = _said(process.stderr, r" are at (http://\S+)/") if http else ""
        threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
        yield Coordinator(f"localhost:{port}", process.pid, url)
    finally:
        process.kill()
        process.wait()


def _said(log: IO[str], pattern: str) -> str:
    """The match in the first line with the pattern. gRPC may write its own lines first."""
    lines: list[str] = []
    for line in log:
        if found := re.search(pattern, line):
            return found.group(1)
        lines.append(line)
    raise RuntimeError(f"the coordinator ended without {pattern!r} in its log:\n{''.join(lines)}")
