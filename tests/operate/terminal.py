"""A command in a terminal, as a person sees it."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

from tests import patience

CTRL_C = b"\x03"


class Terminal:
    """The output of a command on its terminal of 160 columns and 40 lines."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._written = b""

    def until_shown(self, text: str, *, after: int = 0) -> int:
        """Wait until it shows `text`, beyond the first `after` bytes; return how many bytes it has shown then."""

        def shown() -> bool:
            self._read()
            return text.encode() in self._written[after:]

        patience.until(shown, f"{text!r} in the terminal", context=lambda: repr(self._written[-3000:]))
        return len(self._written)

    def says_no(self, *texts: str) -> bool:
        """Whether none of these was ever shown."""
        self._read()
        return not any(text.encode() in self._written for text in texts)

    def press(self, key: bytes) -> None:
        os.write(self._descriptor, key)

    def until_ended(self) -> int:
        """Return the status of the command."""

        def ended() -> bool:
            self._read()
            return self.process.poll() is not None

        patience.until(ended, "the command to end", context=lambda: repr(self._written[-3000:]))
        return self.process.returncode

    def _read(self) -> None:
        # EIO: the command has closed its side.
        with contextlib.suppress(BlockingIOError, OSError):
            while new := os.read(self._descriptor, 65536):
                self._written += new


@contextlib.contextmanager
def terminal(*words: str, **environment: str) -> Iterator[Terminal]:
    """Run `jaxft` with these words in a terminal."""
    ours, its = pty.openpty()
    os.set_blocking(ours, False)
    variables = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "COLUMNS": "160", "LINES": "40", **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", _OWN_TERMINAL, sys.executable, "-m", "jaxft_launch", *words],
        stdin=its,
        stdout=its,
        stderr=its,
        env=variables,
        start_new_session=True,
    )
    os.close(its)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# Makes its standard input the terminal of its session, so that Ctrl-C reaches the command as a signal.
_OWN_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
