"""A stream for people that never holds up who writes to it, and takes any text.

A reader may stop: `less`, Ctrl-S, an ssh connection whose other end is gone. A launcher that waited for it would not
restart its groups, and would hear no signal. And a character that the stream's encoding lacks must not end a launch.
"""

import contextlib
import io
import os
import select
import stat
from typing import IO

# How long a reader may take before what follows is left out.
PATIENCE_S = 1.0
# A pipe that poll() calls writable takes so much without blocking (PIPE_BUF of POSIX).
_PART_BYTES = 512


class Unblocked(io.TextIOBase):
    """Writes to the descriptor of a stream, or leaves out what would block, and says so once there is room.

    What the descriptor does not take for another reason (a full disk, a terminal that is gone) is lost.
    """

    def __init__(self, stream: IO[str], *, patience_s: float = PATIENCE_S) -> None:
        """Raise io.UnsupportedOperation if the stream has no descriptor."""
        stream.flush()
        self._stream = stream
        self._fd = _without_blocking(stream.fileno())
        self._encoding: str = getattr(stream, "encoding", None) or "utf-8"
        self._patience_s = patience_s
        self._left_out_bytes = 0

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        """Write the text, or as much as there is room for. Returns its length in any case."""
        if self._left_out_bytes and self._has_room(0.0):
            notice = f"\n[{self._left_out_bytes} bytes of output are left out here: nothing read it]\n"
            self._left_out_bytes = 0
            self._write(notice)
        self._write(text)
        return len(text)

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode(self._encoding, "backslashreplace"))
        with contextlib.suppress(OSError):
            while rest:
                has_room = self._has_room(0.0 if self._left_out_bytes else self._patience_s)
                sent = self._sent(rest[:_PART_BYTES]) if has_room else 0
                if sent == 0:
                    self._left_out_bytes += len(rest)
                    return
                rest = rest[sent:]

    def _sent(self, part: memoryview) -> int:
        try:
            return os.write(self._fd, part)
        except BlockingIOError:
            return 0

    def _has_room(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        return bool(poller.poll(1000 * seconds))


def _without_blocking(fd: int) -> int:
    """A second descriptor of the same pipe or terminal that does not block; else the same one.

    A terminal that poll() calls writable may take less than is written, and block for the rest. The first
    descriptor is shared with other processes, such as a shell, which need it as it is.
    """
    if not (os.isatty(fd) or stat.S_ISFIFO(os.fstat(fd).st_mode)):
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # no /proc, or a terminal of another user
        return fd


def unblocked(stream: IO[str]) -> IO[str]:
    """The same stream, unblocked if it has a descriptor."""
    try:
        return Unblocked(stream)  # pyright: ignore[reportReturnType]
    except (io.UnsupportedOperation, ValueError):  # in memory, as in a test or a notebook
        return stream
