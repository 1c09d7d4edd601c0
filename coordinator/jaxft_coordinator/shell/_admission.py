"""Admission to the coordinator: who may speak for a job, and how many streams may be unauthenticated.

Every stream starts unauthenticated. It is challenged, and stays so until its Hello has proved that it knows the job's
key; without a secret, any Hello is accepted. When too many are unauthenticated, a new one evicts the busiest
address's oldest stream.
"""

from jaxft_protocol import credentials
from jaxft_protocol.coordinator.job import SessionId
from jaxft_protocol.host.admission import crowded_out
from jaxft_protocol.messages import Hello
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.seals import Said, Seal

from jaxft_coordinator.shell.limits import MAX_UNAUTHENTICATED


class Admission:
    """The streams that have connected and have not been admitted yet."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._waiting: dict[SessionId, tuple[str, bytes]] = {}  # their addresses and nonces, oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def challenge(self, session: SessionId, peer: str) -> tuple[Said, SessionId | None]:
        """Register a new stream; return its challenge, and the stream that it evicts, if any.

        Args:
            session: the new stream.
            peer: its address as gRPC writes it: "ipv4:127.0.0.1:4711".
        """
        evicted = None
        if len(self._waiting) >= MAX_UNAUTHENTICATED:
            addresses = ((known, address) for known, (address, _) in self._waiting.items())
            (evicted,) = crowded_out(addresses, MAX_UNAUTHENTICATED - 1)
            del self._waiting[evicted]
        nonce = credentials.new_nonce()
        self._waiting[session] = (peer.rpartition(":")[0], nonce)
        return Said(pb.CoordinatorMessage(challenge=pb.Challenge(nonce=nonce))), evicted

    def leave(self, session: SessionId) -> None:
        """Forget a stream, which was admitted or has ended."""
        self._waiting.pop(session, None)

    def refusal(self, session: SessionId, hello: Hello, said: pb.Hello) -> str:
        """Why a stream is not admitted; "" if it is."""
        if self._secret is None:
            return ""
        advice = (
            f"give it the token that `jaxft-coordinator token --token-file FILE {hello.job}` prints, as "
            "`Network(token=...)` or in the environment variable JAXFT_TOKEN. The coordinator has read that file "
            "when it started"
        )
        if not said.proof:
            return (
                "only groups that know their job's key are admitted, and group "
                f"{hello.group!r} sent no proof: {advice}"
            )
        key = credentials.job_key(self._secret, hello.job)
        if not credentials.is_proof(
            said.proof, credentials.group_proof(key, hello, **self._nonces(session, said))
        ):
            return (
                f"group {hello.group!r} does not prove that it knows the key of job {hello.job!r}: {advice}"
            )
        return ""

    def seals(self, session: SessionId, hello: Hello, said: pb.Hello) -> tuple[Seal, Seal] | None:
        """The seals of the messages to an admitted group, and from it; None without a secret."""
        if self._secret is None:
            return None
        key = credentials.job_key(self._secret, hello.job)
        to_group, from_group = credentials.stream_keys(key, hello, **self._nonces(session, said))
        return Seal(to_group), Seal(from_group)

    def _nonces(self, session: SessionId, said: pb.Hello) -> dict[str, bytes]:
        return {"coordinator_nonce": self._waiting[session][1], "group_nonce": said.nonce}
