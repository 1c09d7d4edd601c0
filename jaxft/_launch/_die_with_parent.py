"""A script: `_die_with_parent.py PARENT_PID COMMAND...` becomes COMMAND, bound to the life of its parent.

When the parent ends in any way, even by SIGKILL, the kernel kills COMMAND, so no process outlives the parent. It is
a separate script because this must happen between fork and exec, where Python code is not safe. It does not import
jaxft, because it delays every start. It keeps its process id.
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
