"""The coordinator's door: who may speak for a job, and how many may wait to be asked.

Every stream begins as a stranger. It is challenged, and stays a stranger until its Hello has proved that it knows the
job's key; with no secret, any Hello will do. Strangers are few: who comes when there is no room drives out another.
"""

from jaxft_protocol import credentials
from jaxft_protocol.admission import crowded_out
from jaxft_protocol.coordinator.job import SessionId
from jaxft_protocol.messages import Hello
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.seals import Said, Seal

from jaxft_coordinator.limits import MAX_STRANGERS


class Door:
    """Knows who has come and has not been let in yet."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._strangers: dict[SessionId, tuple[str, bytes]] = {}  # their addresses and nonces, oldest first

    def __len__(self) -> int:
        return len(self._strangers)

    def knock(self, session: SessionId, peer: str) -> tuple[Said, SessionId | None]:
        """Take in a stranger; return what it is to be told, and who must go for it, if anybody.

        Args:
            session: the stranger's stream.
            peer: where it comes from, in gRPC's words: "ipv4:127.0.0.1:4711".
        """
        gone = None
        if len(self._strangers) >= MAX_STRANGERS:
            addresses = ((known, address) for known, (address, _) in self._strangers.items())
            (gone,) = crowded_out(addresses, MAX_STRANGERS - 1)
            del self._strangers[gone]
        nonce = credentials.new_nonce()
        self._strangers[session] = (peer.rpartition(":")[0], nonce)
        return Said(pb.CoordinatorMessage(challenge=pb.Challenge(nonce=nonce))), gone

    def leave(self, session: SessionId) -> None:
        """This stranger is one no more: it is known now, or gone."""
        self._strangers.pop(session, None)

    def refusal(self, session: SessionId, hello: Hello, said: pb.Hello) -> str:
        """Why a stranger is not let in; "" if it is."""
        if self._secret is None:
            return ""
        tell = (
            f"give it the token that `jaxft-coordinator token --token-file FILE {hello.job}` prints, as "
            "`Manager(token=...)` or in the environment variable JAXFT_TOKEN"
        )
        if not said.proof:
            return f"only groups that know their job's key may come, and group {hello.group!r} shows none: {tell}"
        key = credentials.job_key(self._secret, hello.job)
        if not credentials.is_proof(
            said.proof, credentials.group_proof(key, hello, **self._nonces(session, said))
        ):
            return f"group {hello.group!r} does not prove that it knows the key of job {hello.job!r}: {tell}"
        return ""

    def seals(self, session: SessionId, hello: Hello, said: pb.Hello) -> tuple[Seal, Seal] | None:
        """For what is said to a group that was let in, and by it; None where there is no secret."""
        if self._secret is None:
            return None
        key = credentials.job_key(self._secret, hello.job)
        to_group, from_group = credentials.stream_keys(key, hello, **self._nonces(session, said))
        return Seal(to_group), Seal(from_group)

    def _nonces(self, session: SessionId, said: pb.Hello) -> dict[str, bytes]:
        return {"coordinator_nonce": self._strangers[session][1], "group_nonce": said.nonce}
