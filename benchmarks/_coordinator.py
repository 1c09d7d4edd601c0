"""A coordinator in a separate process, and what it uses of the machine."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

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
        listens = re.search(r"\(port (\d+)\)", process.stderr.readline())
        serves = re.search(r" are at (http://\S+)/", process.stderr.readline()) if http else None
        assert listens is not None
        assert (serves is not None) == http
        threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
        url = "" if serves is None else serves.group(1)
        yield Coordinator(f"localhost:{listens.group(1)}", process.pid, url)
    finally:
        process.kill()
        process.wait()
