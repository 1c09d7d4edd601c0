"""A script: `_die_with_parent.py PARENT_PID COMMAND...` becomes COMMAND, bound to the life of its parent.

When the parent ends in any way, even by SIGKILL, the kernel kills COMMAND, so no process outlives the parent. It is
a separate script because this must happen between fork and exec, where Python code is not safe. It does not import
jaxft, because it delays every start. It keeps its process id.
"""

import ctypes
import errno
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    command = sys.argv[2:]
    bind_to(int(sys.argv[1]))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        advice = "The first line of a script must name a program that is there, and end as on Unix."
        may_be_script = error.errno in (errno.ENOENT, errno.ENOEXEC)
        sys.exit(
            f"jaxft cannot run {command[0]!r}: {error.strerror}. {advice if may_be_script else ''}".rstrip()
        )


def bind_to(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before its child began")


if __name__ == "__main__":
    main()
