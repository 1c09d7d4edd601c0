"""A MAC for each message of a stream, if the job has a key.

Both ends derive a key for each direction from the handshake (`credentials.stream_keys`). A MAC covers the message's
bytes and its sequence number in that direction. If a relay adds, changes, repeats, reorders or drops a message, the
receiver notices at the next message at the latest. The MAC is the last field of the message, so it can be appended to
bytes that were encoded once for a thousand groups, and the result is still a valid message of the protocol.
"""

import hashlib
import hmac
from functools import cached_property

from jaxft_protocol.proto import coordinator_pb2 as pb

MAC_BYTES = 16
_LENGTH_DELIMITED = 2
# Two bytes of field tag, the same for both message types, and one byte of length.
_FIELD = (pb.GroupMessage.MAC_FIELD_NUMBER << 3) | _LENGTH_DELIMITED
_PREFIX = bytes((_FIELD & 0x7F | 0x80, _FIELD >> 7, MAC_BYTES))
assert pb.GroupMessage.MAC_FIELD_NUMBER == pb.CoordinatorMessage.MAC_FIELD_NUMBER
_SUFFIX_BYTES = len(_PREFIX) + MAC_BYTES


class Broken(ValueError):
    """A message has no MAC, or a wrong one."""


class Body:
    """An encoded message. It is hashed once, however many streams it goes to."""

    def __init__(self, message: pb.GroupMessage | pb.CoordinatorMessage) -> None:
        self.data = message.SerializeToString()

    @cached_property
    def digest(self) -> bytes:
        return _digest(self.data)


class Seal:
    """One direction of one stream, at either end."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def close(self, message: Body) -> bytes:
        """Return the bytes of the next message, with its MAC."""
        return message.data + _PREFIX + self._next(message.digest)

    def open(self, received: bytes) -> bytes:
        """Return the bytes of the next message without its MAC.

        Raises:
            Broken: the MAC is missing or wrong. No later message can be opened either.
        """
        data, suffix = received[:-_SUFFIX_BYTES], received[-_SUFFIX_BYTES:]
        number = self._count
        if not suffix.startswith(_PREFIX) or len(suffix) != _SUFFIX_BYTES:
            raise Broken(f"message {number} of this stream has no MAC, but this job has a key")
        if not hmac.compare_digest(suffix[len(_PREFIX) :], self._next(_digest(data))):
            raise Broken(
                f"message {number} of this stream has the wrong MAC: it was changed or added in transit, or an "
                "earlier message is missing"
            )
        return data

    def _next(self, digest: bytes) -> bytes:
        numbered = self._count.to_bytes(8, "big") + digest
        self._count += 1
        return hashlib.blake2b(numbered, key=self._key, digest_size=MAC_BYTES).digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
