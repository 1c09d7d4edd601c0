"""Admission to the coordinator: who may speak for a job, and how many streams may be unauthenticated.

Every stream starts unauthenticated. It is challenged, and stays so until its Hello has proved that it knows the job's
key; without a secret, any Hello is accepted. When too many are unauthenticated, a new one evicts the busiest
address's oldest stream. A group is also refused if its names cannot be shown and sent, or if there is no room for it.
"""

from collections import Counter
from collections.abc import Iterable

from jaxft_protocol import credentials, names
from jaxft_protocol.coordinator.job import Job, SessionId
from jaxft_protocol.host.admission import crowded_out
from jaxft_protocol.messages import Hello
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.seals import Body, Seal

from jaxft_coordinator.shell import limits
from jaxft_coordinator.shell.limits import MAX_UNAUTHENTICATED

# How much of a bad address an error quotes.
_MAX_QUOTED = 300


class Admission:
    """The streams that have connected and have not been admitted yet."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._waiting: dict[SessionId, tuple[str, bytes]] = {}  # their addresses and nonces, oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def challenge(self, session: SessionId, peer: str) -> tuple[Body, SessionId | None]:
        """Register a new stream; return its challenge, and the stream that it evicts, if any."""
        evicted = None
        if len(self._waiting) >= MAX_UNAUTHENTICATED:
            addresses = ((known, address) for known, (address, _) in self._waiting.items())
            (evicted,) = crowded_out(addresses, MAX_UNAUTHENTICATED - 1)
            del self._waiting[evicted]
        nonce = credentials.new_nonce()
        self._waiting[session] = (peer.rpartition(":")[0], nonce)
        return Body(pb.CoordinatorMessage(challenge=pb.Challenge(nonce=nonce))), evicted

    def leave(self, session: SessionId) -> None:
        """Forget a stream, which was admitted or has ended."""
        self._waiting.pop(session, None)

    def refusal(self, session: SessionId, hello: Hello, sent: pb.Hello) -> str:
        """Why a stream is not admitted; "" if it is."""
        if self._secret is None:
            return ""
        advice = (
            f"give it the token that `jaxft-coordinator token --token-file FILE {hello.job}` prints, as "
            "`Network(token=...)` or in the environment variable JAXFT_TOKEN. The coordinator has read that file "
            "when it started"
        )
        if not sent.proof:
            return (
                "only groups that know their job's key are admitted, and group "
                f"{hello.group!r} sent no proof: {advice}"
            )
        key = credentials.job_key(self._secret, hello.job)
        if not credentials.is_proof(
            sent.proof, credentials.group_proof(key, hello, **self._nonces(session, sent))
        ):
            return (
                f"group {hello.group!r} does not prove that it knows the key of job {hello.job!r}: {advice}"
            )
        return ""

    def seals(self, session: SessionId, hello: Hello, sent: pb.Hello) -> tuple[Seal, Seal] | None:
        """The seals of the messages to an admitted group, and from it; None without a secret."""
        if self._secret is None:
            return None
        key = credentials.job_key(self._secret, hello.job)
        to_group, from_group = credentials.stream_keys(key, hello, **self._nonces(session, sent))
        return Seal(to_group), Seal(from_group)

    def _nonces(self, session: SessionId, sent: pb.Hello) -> dict[str, bytes]:
        return {"coordinator_nonce": self._waiting[session][1], "group_nonce": sent.nonce}


def no_room(hello: Hello, job: Job | None, served: Iterable[str]) -> str:
    """Why a coordinator cannot serve one more group of a job; "" if it can. `served`: the job of each session."""
    if _is_full_for(hello.job, Counter(served)):
        return (
            f"this coordinator serves {limits.MAX_SESSIONS} groups, its limit: start another one for this job"
        )
    if job is None:
        return ""
    if hello.group not in job.groups and len(job.groups) >= limits.MAX_GROUPS_PER_JOB:
        return (
            f"job {hello.job!r} already has {limits.MAX_GROUPS_PER_JOB} groups, its limit: stop a group that it "
            "does not need"
        )
    return _too_long_addresses(hello, job)


def _is_full_for(job: str, counts: Counter[str]) -> bool:
    """Whether there are too many groups. Then a job still gets its share, so that no other can keep it out."""
    if counts.total() < limits.MAX_SESSIONS:
        return False
    return counts[job] >= limits.MAX_SESSIONS // len({*counts, job})


def names_problem(hello: Hello) -> str:
    """Why a name or address cannot be logged, or sent to all members of a quorum; "" if all can."""
    for what, name in (("job", hello.job), ("group", hello.group)):
        if not 0 < len(name) <= limits.MAX_NAME_LENGTH:
            return f"the name of a {what} must have 1 to {limits.MAX_NAME_LENGTH} characters, not {len(name)}"
        if not name.isprintable():
            return f"the name of a {what} must have only printable characters, unlike {name!r}"
        if problem := names.unclear(name):
            return f"the name of a {what} {problem}"
    if len(hello.address) > limits.MAX_ADDRESS_LENGTH or not hello.address.isprintable():
        address = hello.address[:_MAX_QUOTED]
        return (
            f"the address {address!r} of group {hello.group!r} must be at most {limits.MAX_ADDRESS_LENGTH} printable "
            "characters"
        )
    return ""


def _too_long_addresses(hello: Hello, job: Job) -> str:
    """Why the addresses of a job would be too long with one more group; "" if they are not."""
    others = [group.address for name, group in job.groups.items() if name != hello.group]
    sent_bytes = (len(others) + 1) * sum(map(_most_bytes, (*others, hello.address)))
    if sent_bytes <= limits.MAX_ADDRESSES_BYTES:
        return ""
    return (
        f"each of {len(others) + 1} groups of job {job.name!r} receives the addresses of all: with group "
        f"{hello.group!r} that is {sent_bytes >> 20} MB, and the limit is {limits.MAX_ADDRESSES_BYTES >> 20}. Have "
        "groups announce fewer or shorter addresses (`Network(host=...)`), or use fewer groups"
    )


def _most_bytes(text: str) -> int:
    """How many bytes a text takes at most in UTF-8."""
    return len(text) if text.isascii() else 4 * len(text)
