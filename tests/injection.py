"""Has system calls of a process fail, or the process die at one of them: the words to put before its command."""

import functools
import shutil
import subprocess

from tests import patience


def failing(*injections: str) -> tuple[str, ...]:
    """`strace`, with injections as its manual describes them, such as "fdatasync:error=EIO:when=3+5"."""
    calls = ",".join(dict.fromkeys(one.partition(":")[0] for one in injections))
    words = [word for one in injections for word in ("-e", f"inject={one}")]
    # The interpreter writes and renames files of bytecode, which would count.
    quiet = ("env", "PYTHONDONTWRITEBYTECODE=1", "strace", "-D", "-f", "-qq", "-o", "/dev/null")
    # It stops the process at these calls alone, but then sends no signals.
    fast = () if any("signal=" in one for one in injections) else ("--seccomp-bpf",)
    return (*quiet, *fast, "-e", f"trace={calls}", *words)


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
