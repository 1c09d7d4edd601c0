"""A script: `_remote_shell.py SHELL... HOST COMMAND` runs a launcher on another host, through a shell such as ssh.

The other launcher reads its standard input (`_attached.py`): first the token, which is never in a command line, then
orders. An empty line every 10 s says that this process and the network are still there. When this process ends in any
way, that input ends, and with it the other launcher and all of its processes.

Only the standard library: there is one such process for each host, and it delays every start.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import FrameType

DIE_WITH_PARENT = Path(__file__).with_name("_die_with_parent.py")
DRAIN = b"drain\n"
STILL_HERE = b"\n"
STILL_HERE_EVERY_S = 10.0
# With this status, the other launcher says that its groups were drained, and that the job goes on without them.
ALL_DRAINED = 79
# ssh ends with it if there is no connection, or if the command was killed.
NO_CONNECTION = 255


def main() -> int:
    """Return the exit status of the other launcher; that of a group to start again if its connection ended."""
    token = os.environ.pop("JAXFT_TOKEN", "")
    words = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), *sys.argv[1:]]
    # A separate process group: signals for this one are not for the shell, which they would end.
    with subprocess.Popen(words, stdin=subprocess.PIPE, process_group=0) as shell:
        assert shell.stdin is not None
        orders = shell.stdin.fileno()

        def drain(number: int, frame: FrameType | None) -> None:
            send(orders, DRAIN)

        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        send(orders, token.encode() + b"\n")
        signal.signal(signal.SIGTERM, drain)
        status = until_ended(shell, orders)
    if status == ALL_DRAINED:
        tell_drained(Path(os.environ["JAXFT_PHASE_FILE"]))
        return 0
    if status in (0, NO_CONNECTION) or status < 0:
        host = sys.argv[-2]
        if status:
            sys.stderr.write(f"the connection to {host} ended, or could not be made (exit status {status})\n")
        return os.EX_TEMPFAIL if status else 0
    return status


def until_ended(shell: "subprocess.Popen[bytes]", orders: int) -> int:
    """Return the exit status of the shell."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return shell.wait(timeout=STILL_HERE_EVERY_S)
        send(orders, STILL_HERE)


def tell_drained(file: Path) -> None:
    """Write the last phase of a drained group, as `_phase_file.py` does, which cannot be imported here."""
    now_t_s = time.time()
    word = {"phase": "drained", "step": 0, "t_s": now_t_s, "first_t_s": now_t_s}
    text = json.dumps(word).encode().ljust(242)
    # Until now it was empty for as long as the job runs, so what clears temporary folders may have removed it.
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text + b"%08x" % zlib.crc32(text))


def send(descriptor: int, line: bytes) -> None:
    """Write a line, unless the shell has ended: its exit status then says more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, line)


if __name__ == "__main__":
    sys.exit(main())
