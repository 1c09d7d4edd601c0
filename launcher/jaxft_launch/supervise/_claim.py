"""What a launch has for itself in its folder: each of its groups, or its node of one.

Two launches of one group there would mix their logs and events, and the second coordinator would stand by without a
word. Each holds a lock (flock) on a file for each group, so launches of different groups may share a folder, also on
several hosts. The kernel frees it when the launcher ends in any way.
"""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._statuses import AGAIN

# A file system without locks: the launch goes on as if it were alone.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class FolderTaken(LaunchError):
    """Another launch has it. That may be about to end, so a scheduler or another launcher tries again."""

    status = AGAIN


@contextlib.contextmanager
def claimed(folder: Path, groups: Sequence[str], *, node: int | None = None) -> Iterator[None]:
    """Hold these groups in a folder, or one node of a group.

    Raises:
        FolderTaken: another launch holds one of them.
        OSError: there can be no file.
    """
    with contextlib.ExitStack() as stack:
        for group in groups:
            name = group if node is None else f"{group}.node-{node}"
            file = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderTaken(
                    f"Another `jaxft launch` ({_text_of(file)}) runs {name} in --folder {folder}: name another "
                    "folder, or end that launch first."
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            with contextlib.suppress(OSError):  # a full disk
                os.truncate(file, 0)
                os.write(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def _text_of(file: int) -> str:
    return os.pread(file, 300, 0).decode(errors="replace").strip() or "it has not said which"
