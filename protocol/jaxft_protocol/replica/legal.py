"""Which event is legal in which phase. `machine.step` asks here first.

There are three answers:

* *legal*: the event is handled;
* *late*: the event was overtaken by another one, as expected. It is dropped for the reason in the table, but
  its news about the state that the training thread holds is kept (`machine.step`);
* *illegal*: anything else. The coordinator violates the protocol, or the training thread does not follow `directive`.
  `IllegalEvent` is raised, and the replica is unchanged.

Events arrive late for four reasons:

* the training thread reads `directive` at its own pace: it may report on an attempt, a heal or a stream that is over;
* the coordinator sends messages until it learns that a group leaves;
* a stream stays open for a moment after its session is over;
* a stream may open after the group has left.

A message from the coordinator is never late for another reason: a stream is ordered, and a session ends with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxft_protocol.messages import (
    Alive,
    AllComputed,
    Commit,
    Drained,
    Evicted,
    Finished,
    FrontierMoved,
    Goodbye,
    Halted,
    Heal,
    NewQuorum,
    Paused,
    Pin,
    Refused,
    Release,
    Waiting,
    Welcome,
)
from jaxft_protocol.replica.state import (
    Applied,
    Connected,
    Digested,
    Disconnected,
    DrainNow,
    Event,
    ExchangeBroke,
    Exchanged,
    HealBroke,
    Healed,
    Idle,
    LeaveNow,
    Phase,
    Prepared,
    Raised,
    Received,
    Replayed,
    Replica,
    Tick,
)


class IllegalEvent(Exception):
    """An event that cannot happen in the replica's phase. The replica is unchanged."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The phases in which an event is handled, and the phases in which it may arrive late, with the reason."""

    legal: frozenset[Phase]
    late: Mapping[Phase, str]


_ALL = frozenset(Phase)
_OFFLINE = frozenset({Phase.OFFLINE})
_GREETING = frozenset({Phase.GREETING})
_PRESENT = frozenset({Phase.PRESENT})
_FINISHED = frozenset({Phase.FINISHED})
_LEAVING = frozenset({Phase.DRAINED, Phase.LEAVING})
_OVER = frozenset({Phase.LEFT, Phase.FAILED})
_UNWELCOME = _OFFLINE | _GREETING
_CATCHES_UP = frozenset({Phase.HEALING, Phase.FOLLOWING})
_IN_QUORUM = frozenset({Phase.WORKING, Phase.VOTED, Phase.APPLYING})
_JOINED = frozenset({Phase.JOINING}) | _CATCHES_UP | _IN_QUORUM

_LEFT_MEANWHILE = "the group left while the stream was being opened"
_LEAVES = "sent before the coordinator knew that this group leaves"
_SESSION_OVER = "the session is over, but its stream has not ended yet"
_JOB_OVER = "the job is over for this group"
_ATTEMPT_OVER = "the attempt ended with its stream, or other groups replaced this group in the quorum"
_HEAL_OVER = "the heal ended with its stream"


def _rule(legal: Iterable[Phase], *late: tuple[Iterable[Phase], str]) -> Rule:
    return Rule(frozenset(legal), {phase: reason for phases, reason in late for phase in phases})


_CROSSES_LEAVE = ((_LEAVING, _LEAVES), (_OVER, _SESSION_OVER))
# The outcome of an attempt. In APPLYING no attempt is under way, so it is of an earlier one.
_OUTCOME = _rule(
    {Phase.WORKING, Phase.VOTED},
    (_UNWELCOME | _PRESENT | {Phase.JOINING, Phase.APPLYING} | _CATCHES_UP, _ATTEMPT_OVER),
    (_FINISHED | _LEAVING | _OVER, _JOB_OVER),
)
# A state that was healed or replayed. The training thread holds it now, even if the heal has been abandoned.
_CAUGHT_UP = _rule(_ALL - _IN_QUORUM)

RULES: Mapping[type[Any], Rule] = {
    # ---- from the session ----
    Connected: _rule(_OFFLINE, (_OVER, _LEFT_MEANWHILE)),
    Disconnected: _rule(_ALL),
    Idle: _rule(_ALL),
    Tick: _rule(_ALL),
    # ---- from the training thread ----
    # A second Prepared has the state of a checkpoint, which the group then read itself; a heal may have overtaken it.
    Prepared: _rule(_ALL - _IN_QUORUM),
    Exchanged: _OUTCOME,
    ExchangeBroke: _OUTCOME,
    # Ctrl-C may come at any time, also just after the outcome was reported.
    Raised: _rule({Phase.WORKING}, (_ALL - {Phase.WORKING}, _ATTEMPT_OVER)),
    # A received commit is applied before the group joins again, so there is no Applied from PRESENT to VOTED.
    Applied: _rule(_UNWELCOME | {Phase.APPLYING} | _FINISHED | _LEAVING | _OVER),
    Digested: _rule(_ALL),
    Healed: _CAUGHT_UP,
    Replayed: _CAUGHT_UP,
    HealBroke: _rule(
        _CATCHES_UP,
        (_UNWELCOME | _PRESENT | {Phase.JOINING, Phase.WORKING}, _HEAL_OVER),
        (_FINISHED | _LEAVING | _OVER, _JOB_OVER),
    ),
    LeaveNow: _rule(_ALL - {Phase.LEAVING}),
    # SIGTERM may come at any time.
    DrainNow: _rule(_UNWELCOME | _PRESENT | _JOINED, (_FINISHED | _LEAVING | _OVER, _JOB_OVER)),
    # ---- from the coordinator ----
    Alive: _rule(_ALL - _UNWELCOME),
    Welcome: _rule(_GREETING, (_OVER, _SESSION_OVER)),
    Refused: _rule(_GREETING | _PRESENT | _JOINED, *_CROSSES_LEAVE),
    # A group that leaves learns for which joiners it stays.
    Waiting: _rule(_PRESENT | _JOINED | _FINISHED | _LEAVING, (_OVER, _SESSION_OVER)),
    # JOINING: founders, and a joiner whose HealFailed crosses the quorum that admits it.
    NewQuorum: _rule(_JOINED - {Phase.HEALING}, *_CROSSES_LEAVE),
    AllComputed: _rule(_JOINED - {Phase.HEALING}, *_CROSSES_LEAVE),
    # The coordinator commits without a group that has left VOTED for another quorum, a heal or a new stream.
    Commit: _rule({Phase.VOTED}, *_CROSSES_LEAVE),
    Heal: _rule(_JOINED, *_CROSSES_LEAVE),
    # PRESENT: to a group whose code raised an exception, and which the others did without.
    FrontierMoved: _rule(_PRESENT | {Phase.JOINING, Phase.APPLYING} | _CATCHES_UP, *_CROSSES_LEAVE),
    # A holder of the frontier can be a donor until the coordinator sends Goodbye.
    Pin: _rule(_JOINED - {Phase.HEALING} | _FINISHED | _LEAVING, (_OVER, _SESSION_OVER)),
    # PRESENT: the coordinator may still list a donor that came back, for a joiner that is gone.
    Release: _rule(_PRESENT | _JOINED | _FINISHED | _LEAVING | _OVER),
    Finished: _rule(_JOINED, *_CROSSES_LEAVE),
    # GREETING: the coordinator cannot read the Hello.
    Evicted: _rule(_GREETING | _PRESENT | _JOINED | _FINISHED | _LEAVING, (_OVER, _SESSION_OVER)),
    Halted: _rule(_GREETING | _PRESENT | _JOINED | _FINISHED | _LEAVING, (_OVER, _SESSION_OVER)),
    Drained: _rule(_PRESENT | _JOINED, *_CROSSES_LEAVE),
    # A commit follows.
    Paused: _rule({Phase.VOTED}, *_CROSSES_LEAVE),
    Goodbye: _rule(_FINISHED | _LEAVING, (_OVER, _SESSION_OVER)),
}


def late(replica: Replica, event: Event) -> str:
    """Return why `event` is late and must be dropped; "" if it must be handled.

    Raises:
        IllegalEvent: the event is neither legal now nor late.
    """
    received = event.message if isinstance(event, Received) else event
    rule = RULES.get(type(received))
    if rule is None:
        raise IllegalEvent(f"{type(received).__name__} is not an event of this protocol")
    if replica.phase in rule.legal:
        return _late_in_phase(replica, event)
    if reason := rule.late.get(replica.phase):
        return reason
    raise IllegalEvent(f"{type(received).__name__} is illegal while the group is {replica.phase.value}")


def _late_in_phase(replica: Replica, event: Event) -> str:
    """Like `late`, for rules that depend on more than the phase."""
    match event:
        case Exchanged(quorum_id, number) | ExchangeBroke(quorum_id, number):
            return _late_outcome(replica, (quorum_id, number))
        case Raised(number) if number != replica.step:
            return "it was an attempt at an earlier step"
        case HealBroke(heal_id) if replica.heal is None or replica.heal.heal_id != heal_id:
            return f"heal {heal_id} was abandoned"
        case Received(NewQuorum() as quorum):
            _check_newer(replica, quorum)
        case Received(Commit() as commit):
            _check_commit(replica, commit)
        # A spare that was relieved by the commit follows; its donor may turn out to be corrupt before it has applied.
        case Received(Heal(log_only=False)) if replica.phase is Phase.APPLYING and replica.heal is None:
            raise IllegalEvent("Heal is illegal while the group is applying, unless it is for the log first")
        case _:
            pass
    return ""


def _late_outcome(replica: Replica, attempt: tuple[int, int]) -> str:
    quorum = replica.quorum
    assert quorum is not None
    quorum_id, number = attempt
    if quorum_id < quorum.quorum_id:
        return f"quorum {quorum_id} has been replaced by quorum {quorum.quorum_id}"
    if replica.phase is Phase.WORKING and attempt == (quorum.quorum_id, replica.step):
        return ""
    raise IllegalEvent(
        f"the outcome of step {number} in quorum {quorum_id} is illegal while the group is {replica.phase.value} at "
        f"step {replica.step} in quorum {quorum.quorum_id}"
    )


def _check_newer(replica: Replica, quorum: NewQuorum) -> None:
    if quorum.quorum_id <= replica.last_quorum_id:
        raise IllegalEvent(f"quorum {quorum.quorum_id} comes after quorum {replica.last_quorum_id}")


def _check_commit(replica: Replica, commit: Commit) -> None:
    vote = replica.vote
    if vote is None or not vote.ok or (commit.quorum_id, commit.step) != (vote.quorum_id, vote.step):
        raise IllegalEvent(
            f"the commit of step {commit.step} in quorum {commit.quorum_id} is illegal, because this group has not "
            f"voted ok for it (its last vote: {vote})"
        )
    if commit.next is not None:
        _check_newer(replica, commit.next)
