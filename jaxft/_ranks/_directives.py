"""Orders of rank 0, and reports of the other ranks, as messages."""

from jaxft_protocol import wire
from jaxft_protocol.messages import Heal, NewQuorum, QuorumId, Step
from jaxft_protocol.proto import coordinator_pb2
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft_protocol.ranks.messages import Decided, Directed, Judged, Order, Outcome, StopWork, Verdict
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


def encode_order(order: Order | StopWork) -> pb.LeaderMessage:
    match order:
        case Directed(directive):
            message = pb.Directive(left=True) if directive is None else encode(directive)
            return pb.LeaderMessage(directive=message)
        case Decided(what, value, number):
            return pb.LeaderMessage(decision=pb.Decision(what=what, value=value, number=number))
        case Judged(what, verdict):
            outcome = encode_outcome(Outcome(what, verdict))
            return pb.LeaderMessage(verdict=pb.Verdict(outcome=outcome, stopped=verdict.stopped))
        case StopWork(what):
            return pb.LeaderMessage(stop_work=pb.StopWork(reason=what))


def decode_order(message: pb.LeaderMessage) -> Order | StopWork | None:
    """Decode an order; return None if the message is none.

    Raises:
        WireError: it is a directive of an unknown kind.
    """
    match message.WhichOneof("kind"):
        case "directive":
            left = message.directive.WhichOneof("kind") == "left"
            return Directed(None if left else decode(message.directive))
        case "decision":
            decision = message.decision
            return Decided(decision.what, decision.value, decision.number)
        case "verdict":
            outcome, stopped = message.verdict.outcome, message.verdict.stopped
            return Judged(outcome.what, _verdict(outcome, stopped=stopped))
        case "stop_work":
            return StopWork(message.stop_work.reason)
        case _:
            return None


def encode_outcome(outcome: Outcome) -> pb.Outcome:
    found = outcome.verdict
    return pb.Outcome(what=outcome.what, failure=found.failure, accused=found.accused, note=found.note)


def decode_outcome(message: pb.Outcome) -> Outcome:
    return Outcome(message.what, _verdict(message))


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


def _verdict(message: pb.Outcome, *, stopped: bool = False) -> Verdict:
    return Verdict(message.failure, tuple(message.accused), message.note, stopped)


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
