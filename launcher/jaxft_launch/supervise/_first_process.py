"""What the first process of a container owes: it inherits the processes that others leave, and takes their statuses.

One that has ended counts against the container's limit until then: in time, no group could be started any more.
"""

import contextlib
import os
import signal
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def leave_first_process() -> None:
    """As the first process (of the pid 1), go on as a child of it, which passes on signals and ends as this one does.

    Call it before there is a thread.
    """
    if os.getpid() != 1:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked: the kernel drops a signal to the first process if that has no handler for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, signal.SIGCHLD))
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # or Ctrl-C at a terminal would reach it twice
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    sys.exit(_until_ended(pid))


def _until_ended(child: int) -> int:
    """Take the statuses of all that ends, and pass on signals; return the exit status of the child."""
    while True:
        number = signal.sigwait((*PASSED_ON, signal.SIGCHLD))
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = os.waitstatus_to_exitcode(ended[1])
                return status if status >= 0 else 128 - status
