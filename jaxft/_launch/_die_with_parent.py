"""A script: `_die_with_parent.py PARENT_PID COMMAND...` becomes COMMAND, bound to the life of its parent.

However the parent ends, SIGKILL included, the kernel then kills COMMAND: no process outlives us. Started as
a script of its own, since what must happen between fork and exec is not safe to do in Python there, and without
any import of jaxft, since it stands before every start. It keeps its process id.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before its child began")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
