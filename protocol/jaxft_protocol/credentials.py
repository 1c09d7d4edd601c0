"""Authentication: the coordinator's secret, the key of each job, and proofs of knowing a key.

A coordinator has one secret. The key of a job is derived from it, so a group that holds this key can act for that job
only. Keys are never sent: each side sends a fresh random nonce, and the group answers with a proof. Only a holder of
the key can compute this proof, and it is valid for this connection only.

    coordinator                                     group
      | -- Challenge(nonce C) ----------------------> |
      | <-- Hello(..., nonce G, proof over C, G) ---- |
      | -- every later message, with a MAC ---------- |
      | <- every later message, with a MAC ---------- |

A proof covers all fields of the Hello: the job, the group, its incarnation and address. From the same transcript both
sides derive one key for each direction of this stream (`seals.py`), so the Welcome authenticates the coordinator, and
a relay cannot add messages. Each label is used once, so a proof cannot be reflected as another one. The data plane
does the same with a separate key, and covers both ends: see `jaxft/_transport/_handshake.py`.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NewType

from jaxft_protocol.messages import Hello

JobKey = NewType("JobKey", bytes)
DataKey = NewType("DataKey", bytes)

# The length of an HMAC-SHA256: fewer bits would be easier to guess, more would add nothing.
NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_BYTES = 32
# Against offline guessing from a captured proof: 128 bits, if they are random.
MIN_SECRET_BYTES = 16
# No secret is larger. If the path leads to a larger file, the rest is not read.
_MAX_SECRET_BYTES = 1 << 16


class CredentialsError(ValueError):
    """A secret, a key or a certificate cannot be used. The text has the reason and the advice; never the secret."""


def read_secret(path: Path) -> bytes:
    """Read the coordinator's secret: any bytes, without a trailing newline.

    Raises:
        CredentialsError: the file cannot be read, is accessible to users other than its owner, or is too short.
    """
    secret = _private(path)
    if len(secret) < MIN_SECRET_BYTES:
        raise CredentialsError(
            f"the token file {str(path)!r} holds {len(secret)} bytes; a secret needs at least {MIN_SECRET_BYTES} "
            f"random bytes: `(umask 077; head -c 32 /dev/urandom | base64 > {path})`"
        )
    return secret


def _private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(_MAX_SECRET_BYTES)
    except OSError as error:
        raise CredentialsError(f"cannot read the token file {str(path)!r}: {error.strerror}") from error
    if mode & 0o077:
        raise CredentialsError(
            f"the token file {str(path)!r} is accessible to users other than its owner (mode {mode:04o}): make it "
            f"private with `chmod 600 {path}`, and replace the secret if another user may have read it"
        )
    return secret.removesuffix(b"\n").removesuffix(b"\r")


def job_key(secret: bytes, job: str) -> JobKey:
    """The key of one job, for its groups to hold."""
    return JobKey(hmac.digest(secret, b"jaxft job\0" + job.encode(), hashlib.sha256))


def operator_key(secret: bytes) -> bytes:
    """The key of those who operate the coordinator: it allows actions on all its jobs, but no group to take part."""
    return hmac.digest(secret, b"jaxft operator", hashlib.sha256)


def key_from_text(text: str) -> JobKey:
    """Read a key as `jaxft-coordinator token` prints it. Raises CredentialsError."""
    digits = text.strip()
    try:
        key = bytes.fromhex(digits) if digits.isalnum() else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise CredentialsError(
            f"the token must be {2 * KEY_BYTES} hexadecimal digits, not {len(digits)} characters: the key of this "
            "job, as `jaxft-coordinator token --token-file FILE JOB` prints it, not the coordinator's secret itself"
        )
    return JobKey(key)


def data_key(key: JobKey) -> DataKey:
    """The key for connections between a job's groups. It does not reveal the job's key."""
    return DataKey(hmac.digest(key, b"jaxft data", hashlib.sha256))


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def group_proof(key: JobKey, hello: Hello, *, coordinator_nonce: bytes, group_nonce: bytes) -> bytes:
    """A group's answer to the coordinator's challenge."""
    return _proof(key, "jaxft control", coordinator_nonce, group_nonce, *_fields_of(hello))


def stream_keys(
    key: JobKey, hello: Hello, *, coordinator_nonce: bytes, group_nonce: bytes
) -> tuple[bytes, bytes]:
    """The keys of one stream: for the coordinator's messages, and for the group's messages."""
    fields = _fields_of(hello)
    return (
        _proof(key, "jaxft stream to group", coordinator_nonce, group_nonce, *fields),
        _proof(key, "jaxft stream to coordinator", coordinator_nonce, group_nonce, *fields),
    )


def dialler_proof(key: DataKey, hello: bytes, *, listener_nonce: bytes, dialler_nonce: bytes) -> bytes:
    """The dialler's answer to the listener's challenge; `hello` is the bytes that the dialler has sent."""
    return _proof(key, "jaxft data dial", listener_nonce, dialler_nonce, hello)


def listener_proof(key: DataKey, hello: bytes, *, listener_nonce: bytes, dialler_nonce: bytes) -> bytes:
    """The listener's proof when it accepts a dialler."""
    return _proof(key, "jaxft data accept", listener_nonce, dialler_nonce, hello)


def connection_keys(
    key: DataKey, hello: bytes, *, listener_nonce: bytes, dialler_nonce: bytes
) -> tuple[bytes, bytes]:
    """The keys of one connection: for the listener's frames, and for the dialler's frames."""
    return (
        _proof(key, "jaxft data to dialler", listener_nonce, dialler_nonce, hello),
        _proof(key, "jaxft data to listener", listener_nonce, dialler_nonce, hello),
    )


def is_proof(given: bytes, wanted: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(given, wanted)


def _fields_of(hello: Hello) -> tuple[bytes, ...]:
    numbers = (
        hello.incarnation,
        hello.rank,
        hello.ranks,
        hello.protocol_version,
        hello.term,
        hello.step,
        hello.history,
        hello.stream,
    )
    texts = (hello.job, hello.group, hello.address, *map(str, numbers))
    return tuple(text.encode() for text in texts)


def _proof(key: bytes, label: str, *fields: bytes) -> bytes:
    """Each field is prefixed with its length, so different lists of fields never give the same input."""
    mac = hmac.new(key, label.encode() + b"\0", hashlib.sha256)
    for field in fields:
        mac.update(len(field).to_bytes(8, "big"))
        mac.update(field)
    return mac.digest()
