"""Has system calls of a process fail, or the process die at a call: the words to put before its command."""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests import patience


def failing(*injections: str) -> tuple[str, ...]:
    """`strace`, with injections as its manual describes them, such as "fdatasync:error=EIO:when=3+5"."""
    calls = ",".join(dict.fromkeys(each.partition(":")[0] for each in injections))
    words = [word for each in injections for word in ("-e", f"inject={each}")]
    # The interpreter writes and renames files of bytecode, which would count.
    quiet = ("env", "PYTHONDONTWRITEBYTECODE=1", "strace", "-D", "-f", "-qq", "-o", "/dev/null")
    # It stops the process at these calls alone, but then sends no signals.
    fast = () if any("signal=" in each for each in injections) else ("--seccomp-bpf",)
    return (*quiet, *fast, "-e", f"trace={calls}", *words)


@contextlib.contextmanager
def attached(pid: int, *injections: str) -> Iterator[None]:
    """Within the context, calls of a process that runs already fail. Counts begin now, in each thread."""
    calls = ",".join(dict.fromkeys(each.partition(":")[0] for each in injections))
    words = [word for each in injections for word in ("-e", f"inject={each}")]
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}", *words, "-p", str(pid)]
    threads = [*Path(f"/proc/{pid}/task").iterdir()]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as tracer:
        patience.until(lambda: all(map(_is_traced, threads)), f"strace to attach to {pid}")
        try:
            yield
        finally:
            tracer.terminate()


def _is_traced(thread: Path) -> bool:
    """Whether a thread is traced, or has ended."""
    with contextlib.suppress(OSError):
        return "\nTracerPid:\t0\n" not in (thread / "status").read_text()
    return True


@functools.cache
def why_not() -> str:
    """Why no system call can be made to fail here; "" if it can."""
    if shutil.which("strace") is None:
        return "there is no command strace"
    done = patience.run(
        [*failing("fsync:error=EIO"), "sync", "/dev/null"], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    return (
        ""
        if b"Input/output error" in done.stderr
        else f"strace may not trace: {done.stderr.decode().strip()}"
    )
