"""Directives of the replica's core as messages from rank 0 to the other ranks."""

from jaxft_protocol import wire
from jaxft_protocol.messages import Heal, NewQuorum, QuorumId, Step
from jaxft_protocol.proto import coordinator_pb2
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft_protocol.replica.state import (
    Apply,
    Attempt,
    Directive,
    Fail,
    Failure,
    FailureKind,
    HealFrom,
    LeaveJob,
    Over,
    ReadCheckpoint,
    Replay,
    TakeDigest,
)


def encode(directive: Directive) -> pb.Directive:
    match directive:
        case Attempt(quorum, step):
            return pb.Directive(attempt=pb.Attempt(quorum=wire.coordinator_to_proto(quorum), step=step))
        case Apply(quorum_id, step):
            return pb.Directive(apply=pb.Apply(quorum_id=quorum_id, step=step))
        case HealFrom(heal):
            return pb.Directive(heal=wire.coordinator_to_proto(heal))
        case Replay(heal, step, until):
            replay = pb.Replay(heal=wire.coordinator_to_proto(heal), step=step, until=until)
            return pb.Directive(replay=replay)
        case TakeDigest(step):
            return pb.Directive(take_digest=step)
        case ReadCheckpoint():
            return pb.Directive(read_checkpoint=True)
        case Over(step):
            return pb.Directive(over=step)
        case LeaveJob():
            return pb.Directive(leave_job=True)
        case Fail(failure):
            return pb.Directive(fail=encode_failure(failure))
        case _:
            raise AssertionError(f"{directive} is not for the training thread")


def decode(message: pb.Directive) -> Directive:
    """Decode a directive.

    Raises:
        WireError: it is none.
    """
    match message.WhichOneof("kind"):
        case "attempt":
            return Attempt(_quorum(message.attempt.quorum), Step(message.attempt.step))
        case "apply":
            return Apply(QuorumId(message.apply.quorum_id), Step(message.apply.step))
        case "heal":
            return HealFrom(_heal(message.heal))
        case "replay":
            replay = message.replay
            return Replay(_heal(replay.heal), Step(replay.step), Step(replay.until))
        case "take_digest":
            return TakeDigest(Step(message.take_digest))
        case "read_checkpoint":
            return ReadCheckpoint()
        case "over":
            return Over(Step(message.over))
        case "leave_job":
            return LeaveJob()
        case "fail":
            return Fail(decode_failure(message.fail))
        case other:
            raise wire.WireError(
                f"rank 0 sent a directive of kind {other!r}, which this version does not know"
            )


def encode_failure(failure: Failure) -> pb.Fail:
    return pb.Fail(kind=failure.kind.name, text=failure.text)


def decode_failure(message: pb.Fail) -> Failure:
    """Decode a failure.

    Raises:
        WireError: it is none.
    """
    kind = FailureKind.__members__.get(message.kind)
    if kind is None:
        raise wire.WireError(f"rank 0 reports a failure of unknown kind {message.kind!r}")
    return Failure(kind, message.text)


def _quorum(message: coordinator_pb2.CoordinatorMessage) -> NewQuorum:
    found = wire.coordinator_from_proto(message)
    if not isinstance(found, NewQuorum):
        raise wire.WireError(f"rank 0 sent {type(found).__name__} in place of a quorum")
    return found


def _heal(message: coordinator_pb2.CoordinatorMessage) -> Heal:
    found = wire.coordinator_from_proto(message)
    if not isinstance(found, Heal):
        raise wire.WireError(f"rank 0 sent {type(found).__name__} in place of a heal")
    return found
