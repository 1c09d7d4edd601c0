"""What strangers say on a port, spoken by hand."""

import socket
import struct


def raw_hello(
    version: int = 1, kind: int = 0, job: bytes = b"job", group: bytes = b"group-1", quorum_id: int = 5
) -> bytes:
    """A hello of the data plane, of incarnation 3."""
    head = struct.pack("<8sBBHQQBB", b"jaxft-hi", version, kind, 0, quorum_id, 3, len(job), len(group))
    return head + job + group


def assert_ended(sock: socket.socket) -> None:
    """The other side closes, and says nothing more."""
    try:
        assert sock.recv(1) == b""
    except ConnectionResetError:
        return
