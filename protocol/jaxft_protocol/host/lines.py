"""Files of lines, one JSON object each, which programs read while they grow."""

import contextlib
import os
from pathlib import Path


def append(path: Path, text: str) -> None:
    """Append whole lines, all or none: a disk that is full does not keep the beginning of one.

    The file is opened for each call, so that it may be moved away at any time.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        with contextlib.suppress(OSError):  # it is no regular file
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise
