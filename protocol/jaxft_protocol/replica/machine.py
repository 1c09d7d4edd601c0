"""The replica's protocol: one pure function, `step(replica, event, now_s) -> (replica, effects)`.

Theory of operation
===================

One group of a job. Events come from its session with the coordinator and from its training thread; effects go to
the session. The orders to the training thread are no effects but a function of the state, `directive`. It is
correct even if it is read late or twice.

    OFFLINE -> GREETING -> PRESENT -> JOINING -> WORKING -> VOTED -> APPLYING -> WORKING -> ...
                                      JOINING -> HEALING -> FOLLOWING -> WORKING
    any phase in the job -> DRAINED -> LEAVING -> LEFT

What holds after every event:

1. `quorum` only changes to one with a higher id. A vote carries the id of the current quorum and the group's step, so
   a late vote is recognized.
2. Only a COMMIT that matches this group's vote enters APPLYING; or, after a lost connection, a Welcome whose frontier
   was committed by that vote's quorum. A group never infers a commit from its own exchange.
3. Applied and Replayed increase the step by one, and Healed sets it. Nothing else changes it.
4. A lost stream ends the attempt, not the step: the training thread keeps its contributions, and the group comes back
   with the step it holds. It first applies a commit that it has received, so that its Join stays correct. A heal ends
   with the stream at either end, because after that no message could release its pins.
5. A group stays OFFLINE, or waits for a state that no group holds, for at most `failure_timeout_s`.
6. An event is handled only in the phases that `legal.py` lists. A late event is dropped; any other raises.

The handlers are in `sessions.py` (streams, joining, leaving), `quorums.py` (attempts, votes, commits), `healing.py`
(as joiner and as donor) and `deadlines.py` (time).

Deliberately not here: sockets, clocks (time is an argument), threads, arrays.
"""

from typing import assert_never

from jaxft_protocol.messages import (
    Alive,
    AllComputed,
    Commit,
    CoordinatorMessage,
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
    Vote,
    Waiting,
    Welcome,
)
from jaxft_protocol.replica import deadlines, healing, legal, quorums, sessions
from jaxft_protocol.replica.draft import Draft
from jaxft_protocol.replica.state import (
    Applied,
    Apply,
    Attempt,
    Connected,
    Digested,
    Directive,
    Disconnected,
    DrainNow,
    Effect,
    Event,
    ExchangeBroke,
    Exchanged,
    Fail,
    FailureKind,
    HealBroke,
    Healed,
    HealFrom,
    Idle,
    LeaveJob,
    LeaveNow,
    Over,
    Phase,
    Prepared,
    Raised,
    ReadCheckpoint,
    Received,
    Replay,
    Replayed,
    Replica,
    TakeDigest,
    Tick,
    Wait,
)


def step(replica: Replica, event: Event, now_s: float) -> tuple[Replica, tuple[Effect, ...]]:
    """Return the replica after `event` at time `now_s` (monotonic seconds), and what must be done.

    Raises:
        IllegalEvent: the event cannot happen in this phase (`legal.py`).
    """
    draft = Draft(replica, now_s)
    if isinstance(event, Received):
        draft.update(heard_s=now_s)
    if legal.late(replica, event):
        _keep_what_holds(draft, event)
    else:
        _happened(draft, event)
    return draft.replica, tuple(draft.effects)


def directive(replica: Replica) -> Directive:  # noqa: C901 (a case for each phase)
    """Return the training thread's current order."""
    if replica.failure is not None:
        return Fail(replica.failure)
    if replica.drained and replica.phase in (Phase.DRAINED, Phase.LEFT):
        return LeaveJob()
    match replica.phase:
        case Phase.WORKING if replica.quorum is not None and not replica.paused:
            return Attempt(replica.quorum, replica.step)
        case Phase.APPLYING if replica.vote is not None:
            return Apply(replica.vote.quorum_id, replica.vote.step)
        case Phase.HEALING if replica.heal is not None:
            return HealFrom(replica.heal)
        case Phase.FOLLOWING if replica.heal is not None and replica.frontier_step is not None:
            if replica.step < replica.frontier_step:
                return Replay(replica.heal, replica.step, replica.frontier_step)
        case Phase.FINISHED | Phase.LEFT:
            return Over(replica.step if replica.finished is None else replica.finished)
        case _:
            pass
    if replica.reads and replica.phase in (Phase.PRESENT, Phase.JOINING):
        return ReadCheckpoint()
    if _needs_digest(replica):
        return TakeDigest(replica.step)
    return Wait(_whom(replica))


def _needs_digest(replica: Replica) -> bool:
    """Return whether the digest of this group's state is needed: as a donor, or to join."""
    if replica.step in replica.digests_due.values():
        return True
    ready = replica.phase is Phase.PRESENT and not replica.busy
    return ready and replica.prepared is not None and not replica.digest_taken


def _keep_what_holds(draft: Draft, event: Event) -> None:
    """Keep a late event's news of the training thread: the digest of its state, and that it is idle."""
    match event:
        case Exchanged(_, number, digest) if digest is not None:
            healing.digested(draft, number, digest)
        case HealBroke():
            sessions.no_longer_busy(draft)
        case _:
            pass


def _happened(draft: Draft, event: Event) -> None:  # noqa: C901 (a case for each event)
    match event:  # the most frequent first
        case Received(message):
            _heard(draft, message)
        case Tick():
            deadlines.tick(draft, event)
        case Connected():
            sessions.connected(draft)
        case Disconnected(reason, busy):
            sessions.disconnected(draft, reason, busy=busy)
        case Idle():
            sessions.no_longer_busy(draft)
        case Prepared():
            sessions.prepared(draft, event)
        case Exchanged(quorum_id, number, digest, nonfinite, edit):
            vote = Vote(quorum_id, number, ok=True, digest=digest, nonfinite=nonfinite, edit=edit)
            quorums.cast(draft, vote)
            if digest is not None:
                healing.digested(draft, number, digest)
        case ExchangeBroke(quorum_id, number, accused, reason):
            quorums.cast(draft, Vote(quorum_id, number, ok=False, accused=accused, reason=reason))
        case Raised(number, reason, shard):
            quorums.raised(draft, number, reason, shard)
        case Applied(number):
            quorums.applied(draft, number)
        case Digested(number, digest):
            healing.digested(draft, number, digest)
        case Healed(heal_id, number) | Replayed(heal_id, number):
            healing.caught_up_to(draft, heal_id, number)
        case HealBroke(heal_id, reason):
            healing.heal_broke(draft, heal_id, reason)
        case LeaveNow(finished):
            sessions.leave(draft, finished=finished)
        case DrainNow(at_once):
            sessions.drain(draft, at_once=at_once)
        case _:
            assert_never(event)


def _heard(draft: Draft, message: CoordinatorMessage) -> None:  # noqa: C901 (a case for each message)
    match message:
        case Alive():
            pass
        case AllComputed(quorum_id, number):
            draft.update(all_computed=(quorum_id, number))
        case Commit():
            quorums.commit(draft, message.next)
        case NewQuorum():
            quorums.new_quorum(draft, message)
        case Pin():
            healing.pin(draft, message)
        case Release(heal_id):
            healing.release(draft, heal_id)
        case Heal():
            healing.heal(draft, message)
        case FrontierMoved(number):
            draft.update(frontier_step=number)
        case Welcome():
            sessions.welcome(draft, message)
        case Refused():
            sessions.refused(draft, message)
        case Waiting(reason, held, fresh):
            sessions.waiting(draft, reason, held=held, fresh=fresh)
        case Evicted(reason, may_return, aside):
            sessions.evicted(draft, reason, may_return=may_return, aside=aside)
        case Halted(reason, kind):
            sessions.halted(draft, reason, kind)
        case Finished(number):
            draft.enter(Phase.FINISHED, finished=number)
        case Goodbye():
            draft.enter(Phase.LEFT)
        case Drained():
            sessions.drained(draft)
        case Paused():
            draft.update(paused=True)
        case _:
            assert_never(message)


def _whom(replica: Replica) -> str:  # noqa: C901 (a text for each phase)
    """Name whom this group waits for."""
    me = replica.identity
    if replica.waiting:
        return replica.waiting
    match replica.phase:
        case Phase.OFFLINE | Phase.GREETING if (
            replica.refusal and replica.refusal_kind is FailureKind.EVICTED
        ):
            return f"the other process of group {me.group!r} to end"
        case Phase.OFFLINE | Phase.GREETING:
            return f"the coordinator {me.coordinator} ({replica.offline_reason or 'connecting'})"
        case Phase.VOTED if (
            replica.quorum is not None and replica.vote is not None and not replica.vote.raised
        ):
            others = ", ".join(member.group for member in replica.quorum.members if member.group != me.group)
            votes = f"the votes of {others}, or " if others else ""
            return f"the decision on step {replica.step}: {votes}the coordinator's store"
        case _ if replica.vote is not None and replica.vote.raised:
            return f"the other groups to try step {replica.vote.step}, in which this group's code raised an exception"
        case Phase.JOINING:
            return f"the coordinator {me.coordinator} to name donors to heal from, or a quorum"
        case Phase.FOLLOWING if replica.prepared is not None and replica.prepared.spare:
            return f"the commit of step {replica.step}, as a spare"
        case Phase.FOLLOWING:
            return f"the boundary after step {replica.step}, to enter the quorum"
        case Phase.WORKING if replica.paused:
            return f"an operator to resume the job, which is paused before step {replica.step}"
        case Phase.LEAVING if replica.pins:
            return "joiners that still fetch this group's state"
        case Phase.LEAVING:
            return f"the coordinator {me.coordinator} to let this group go"
        case _:
            return "the coordinator's next message"
