"""The replica's protocol: one pure function, `step(replica, event, now_s) -> (replica, effects)`.

Theory of operation
===================

One group of a job. Events come from its session with the coordinator and from its training thread; effects go to
the session. What the training thread should be doing is not an effect but a function of the state, `directive`:
it may be read late, or twice, and is right all the same.

    OFFLINE -> GREETING -> PRESENT -> JOINING -> WORKING -> VOTED -> APPLYING -> WORKING -> ...
                                      JOINING -> HEALING -> FOLLOWING -> WORKING

What holds after every event:

1. `quorum` only ever changes to one with a higher id. A vote carries the id of the quorum in force and the step
   that the group stands at, so a late one is told apart.
2. APPLYING is entered only by a COMMIT that names the vote this group cast, or, after a lost connection, by a
   Welcome whose frontier was made by that very vote's quorum. A group never infers a commit from its own
   exchange.
3. The step goes up by one with Applied or Replayed, and is set by Healed. Nothing else moves it.
4. A lost stream ends the attempt, not the step: what was computed stays with the training thread, and the group
   comes back with the step it holds. A commit that it has heard is applied first: what Join says stays true.
   Heals do not outlive a stream, at either end: nobody could say any more when a pin may go.
5. A stay in OFFLINE ends after `failure_timeout_s`, and so does a wait for a state that nobody holds.

Deliberately not here: sockets, clocks (time comes as an argument), threads, arrays.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

from jaxft_protocol.messages import (
    Alive,
    AllComputed,
    Commit,
    CoordinatorMessage,
    Evicted,
    Finished,
    FrontierMoved,
    Goodbye,
    GroupMessage,
    Halted,
    HaltKind,
    Heal,
    HealFailed,
    HealId,
    Heartbeat,
    Hello,
    Join,
    Leave,
    NewQuorum,
    Pin,
    Pinned,
    QuorumId,
    Ready,
    Refused,
    Release,
    Step,
    Vote,
    Waiting,
    Welcome,
)
from jaxft_protocol.names import done_again
from jaxft_protocol.replica.state import (
    Applied,
    Apply,
    Attempt,
    Connected,
    Dial,
    Digested,
    Directive,
    Disconnected,
    Effect,
    Event,
    ExchangeBroke,
    Exchanged,
    Fail,
    Failure,
    HangUp,
    HealBroke,
    Healed,
    HealFrom,
    Heard,
    Idle,
    LeaveNow,
    Note,
    Over,
    Phase,
    PinState,
    Prepared,
    ReadCheckpoint,
    ReleasePin,
    Replay,
    Replayed,
    Replica,
    Say,
    TakeDigest,
    Tick,
    Wait,
)
from jaxft_protocol.values import changed

FIRST_REDIAL_S = 0.05
LAST_REDIAL_S = 1.0
# A coordinator answers a greeting in milliseconds; one whose machine is gone, or that is frozen, not at all.
GREETING_TIMEOUT_S = 5.0
# As many as the coordinator waits for a group's: the timeout is the same in both directions.
HEARTBEATS_UNANSWERED = 5

# Phases in which the session is over, or its end is no loss.
_DONE = (Phase.FINISHED, Phase.LEAVING, Phase.LEFT, Phase.FAILED)
_CATCHES_UP = (Phase.HEALING, Phase.FOLLOWING)


def step(replica: Replica, event: Event, now_s: float) -> tuple[Replica, tuple[Effect, ...]]:
    """Return the replica after `event` at time `now_s` (monotonic seconds), and what must be done."""
    turn = _Turn(replica, now_s)
    match event:
        case Heard(message):
            _heard(turn, message)
        case Connected():
            _connected(turn)
        case Disconnected(reason, busy):
            _disconnected(turn, reason, busy=busy)
        case Tick():
            _tick(turn, event)
        case Idle():
            _no_longer_busy(turn)
        case Prepared():
            _prepared(turn, event)
        case Exchanged(quorum_id, number, digest, nonfinite):
            _cast(turn, Vote(quorum_id, number, ok=True, digest=digest, nonfinite=nonfinite))
            if digest is not None:
                _digested(turn, number, digest)
        case ExchangeBroke(quorum_id, number, accused, reason):
            _cast(turn, Vote(quorum_id, number, ok=False, accused=accused, reason=reason))
        case Applied(number):
            _applied(turn, number)
        case Digested(number, digest):
            _digested(turn, number, digest)
        case Healed(heal_id, number) | Replayed(heal_id, number):
            _caught_up_to(turn, heal_id, number)
        case HealBroke(heal_id, reason):
            _heal_broke(turn, heal_id, reason)
        case LeaveNow(finished):
            _leave(turn, finished=finished)
        case _:
            assert_never(event)
    return turn.replica, tuple(turn.effects)


def directive(replica: Replica) -> Directive:
    """What the training thread should be doing."""
    if replica.failure is not None:
        return Fail(replica.failure)
    match replica.phase:
        case Phase.WORKING if replica.quorum is not None:
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
    """Whether the coordinator waits for the digest of the state that this group holds: as a donor, or to join."""
    if replica.step in replica.digests_due.values():
        return True
    ready = replica.phase is Phase.PRESENT and not replica.busy
    return ready and replica.prepared is not None and not replica.digest_taken


class _Turn:
    def __init__(self, replica: Replica, now_s: float) -> None:
        self.replica = replica
        self.now_s = now_s
        self.effects: list[Effect] = []

    def update(self, **changes: Any) -> None:
        self.replica = changed(self.replica, **changes)

    def enter(self, phase: Phase, **changes: Any) -> None:
        self.update(phase=phase, since_s=self.now_s, waiting="", **changes)

    def say(self, message: GroupMessage) -> None:
        self.effects.append(Say(message))

    def note(self, text: str, *, warning: bool = False) -> None:
        self.effects.append(Note(text, warning))

    def fail(self, error: str, text: str) -> None:
        self.enter(Phase.FAILED, failure=Failure(error, text))


def _heard(turn: _Turn, message: CoordinatorMessage) -> None:
    turn.update(heard_s=turn.now_s)
    match message:
        case Alive():
            pass
        case AllComputed(quorum_id, number):
            turn.update(all_computed=(quorum_id, number))
        case Pin(heal_id, number, log_only):
            turn.update(pins=turn.replica.pins | {heal_id})
            turn.effects.append(PinState(heal_id, number, log_only))
            if not log_only:
                turn.update(digests_due={**turn.replica.digests_due, heal_id: number})
                _answer_pins(turn)
        case Release(heal_id):
            turn.update(pins=turn.replica.pins - {heal_id})
            turn.update(digests_due=_without(turn.replica.digests_due, heal_id))
            turn.effects.append(ReleasePin(heal_id))
        case Evicted(reason, may_return, aside):
            _evicted(turn, reason, may_return=may_return, aside=aside)
        case Goodbye():
            turn.enter(Phase.LEFT)
        case Halted(reason, kind):
            _halted(turn, reason, kind)
        case _ if turn.replica.phase in _DONE:
            pass  # it was said before it was known that this group goes
        case Commit():
            _commit(turn, message)
        case NewQuorum():
            _new_quorum(turn, message)
        case Welcome():
            _welcome(turn, message)
        case Refused():
            _refused(turn, message)
        case Heal():
            _heal(turn, message)
        case FrontierMoved(number):
            turn.update(frontier_step=number)
        case Waiting(reason, held):
            if turn.replica.frontier_held and not held:
                turn.update(since_s=turn.now_s)  # only now is there nobody to heal from
            turn.update(waiting=reason, frontier_held=held)
            turn.note(f"waiting: {reason}")
        case Finished(number):
            turn.enter(Phase.FINISHED, finished=number)
        case _:
            assert_never(message)


def _connected(turn: _Turn) -> None:
    replica, me = turn.replica, turn.replica.identity
    if replica.phase is not Phase.OFFLINE:
        return  # it has left meanwhile
    turn.enter(Phase.GREETING)
    turn.say(
        Hello(
            me.job,
            me.group,
            me.incarnation,
            me.address,
            term=replica.term,
            step=replica.step,
            history=replica.history,
        )
    )


def _welcome(turn: _Turn, message: Welcome) -> None:
    if message.term < turn.replica.term:
        reason = f"a coordinator of term {message.term} answers, but one of term {turn.replica.term} has taken over"
        turn.note(f"{reason}; looks for that one", warning=True)
        turn.effects.append(HangUp(reason))
        return
    interval_s = message.heartbeat_interval_ms / 1000
    turn.update(
        heartbeat_interval_s=interval_s,
        next_heartbeat_s=turn.now_s + interval_s,
        dials=0,
        term=message.term,
        offline_since_s=None,
        frontier_step=message.frontier_step,
        frontier_held=message.frontier_held,
    )
    vote = turn.replica.vote
    committed = (message.frontier_step, message.frontier_quorum_id)
    if vote is not None and vote.ok and committed == (vote.step + 1, vote.quorum_id):
        turn.update(commit_heard=True)
    if turn.replica.commit_heard:
        turn.enter(Phase.APPLYING)
        return
    _join_or_wait(turn)


def _join_or_wait(turn: _Turn) -> None:
    replica = turn.replica
    prepared = replica.prepared
    if prepared is None or replica.busy:
        turn.enter(Phase.PRESENT)
        return
    if not replica.digest_taken:
        turn.enter(Phase.PRESENT)
        return  # `directive` asks for it
    if prepared.heals_only and not replica.frontier_step:
        turn.enter(Phase.PRESENT)
        _read_after_all(turn, "the coordinator no longer knows the job")
        return
    turn.enter(Phase.JOINING, joined=True, vote=None)
    turn.say(
        Join(
            replica.step,
            "" if replica.digest is None else f"{replica.digest:016x}",
            prepared.settings,
            replica.last_quorum_id,
            prepared.min_replicas,
            replica.history,
            prepared.spare,
            replica.last_members,
        )
    )


def _prepared(turn: _Turn, prepared: Prepared) -> None:
    turn.update(prepared=prepared, step=prepared.step, history=prepared.history, reads=False)
    turn.update(digest=prepared.digest, digest_taken=True)
    if turn.replica.phase is Phase.PRESENT:
        _join_or_wait(turn)
    elif turn.replica.phase is Phase.JOINING and prepared.heals_only:
        turn.enter(Phase.JOINING)  # others have read it meanwhile, and are given as long again
    elif turn.replica.phase is Phase.JOINING:
        turn.update(joined=False)
        turn.effects.append(HangUp("joins again, with the state of a checkpoint"))


def _read_after_all(turn: _Turn, why: str) -> None:
    if not turn.replica.reads:
        turn.update(reads=True)
        turn.note(f"had left the checkpoint to other groups, and reads it after all: {why}", warning=True)


def _new_quorum(turn: _Turn, quorum: NewQuorum) -> None:
    replica = turn.replica
    if quorum.quorum_id <= replica.last_quorum_id:
        return
    if replica.phase in _DONE:
        return
    before = replica.last_quorum_id
    if replica.frontier_step is not None and quorum.step < replica.frontier_step:
        turn.note(_resume_line(replica.frontier_step, quorum.step), warning=True)
    turn.update(
        quorum=quorum,
        last_quorum_id=quorum.quorum_id,
        last_members=len(quorum.members),
        frontier_step=quorum.step,
        job_history=quorum.history,
    )
    turn.note(_quorum_line(before, quorum, retried=replica.phase in (Phase.WORKING, Phase.VOTED)))
    if replica.phase is Phase.APPLYING or quorum.step > replica.step:
        return  # it takes part as soon as it holds the state
    turn.enter(Phase.WORKING, vote=None)


def _cast(turn: _Turn, vote: Vote) -> None:
    replica = turn.replica
    if replica.phase is not Phase.WORKING or replica.quorum is None:
        return
    if (vote.quorum_id, vote.step) != (replica.quorum.quorum_id, replica.step):
        return  # of an attempt that is over
    turn.enter(Phase.VOTED, vote=vote)
    turn.say(vote)


def _commit(turn: _Turn, commit: Commit) -> None:
    vote = turn.replica.vote
    if turn.replica.phase is not Phase.VOTED or vote is None or not vote.ok:
        return
    if (commit.quorum_id, commit.step) != (vote.quorum_id, vote.step):
        return
    turn.enter(Phase.APPLYING, commit_heard=True)
    if commit.next is not None:
        _new_quorum(turn, commit.next)


def _applied(turn: _Turn, number: Step) -> None:
    replica = turn.replica
    history = replica.job_history or replica.history
    turn.update(step=number, digest=None, digest_taken=False, vote=None, commit_heard=False, history=history)
    if replica.phase is not Phase.APPLYING:
        return
    # Relieved by others with this step; if it has been called up again since, that may be for a later one.
    lacks_more = replica.quorum is None or replica.quorum.step > number
    if replica.joined and lacks_more and replica.heal is not None:
        turn.enter(Phase.FOLLOWING)
    elif replica.joined:
        turn.enter(Phase.WORKING)
    else:
        _join_or_wait(turn)


def _digested(turn: _Turn, number: Step, digest: int | None) -> None:
    """The training thread knows the digest of state `number`, or knows that it cannot be taken."""
    replica = turn.replica
    if number == replica.step:
        turn.update(digest=digest, digest_taken=True)
    due = [heal_id for heal_id, of in replica.digests_due.items() if of == number]
    turn.update(digests_due={heal_id: of for heal_id, of in replica.digests_due.items() if of != number})
    for heal_id in sorted(due):
        turn.say(Pinned(heal_id, digest))
    if turn.replica.phase is Phase.PRESENT:
        _join_or_wait(turn)


def _answer_pins(turn: _Turn) -> None:
    """Say at once what is known already."""
    replica = turn.replica
    if replica.digest_taken and replica.step in replica.digests_due.values():
        _digested(turn, replica.step, replica.digest)


def _without(due: Mapping[HealId, Step], heal_id: HealId) -> dict[HealId, Step]:
    return {other: number for other, number in due.items() if other != heal_id}


def _caught_up_to(turn: _Turn, heal_id: HealId, number: Step) -> None:
    """The training thread holds state `number`, through heal `heal_id`."""
    assert turn.replica.prepared is not None
    history = turn.replica.job_history or turn.replica.history
    prepared = replace(turn.replica.prepared, heals_only=False)
    turn.update(step=number, prepared=prepared, digest=None, digest_taken=False, history=history)
    _no_longer_busy(turn)
    replica = turn.replica
    if replica.heal is None or replica.heal.heal_id != heal_id or replica.phase not in _CATCHES_UP:
        return  # that heal was given up meanwhile; the state is good all the same
    if replica.phase is Phase.HEALING:
        turn.enter(Phase.FOLLOWING)
    if replica.quorum is not None and replica.quorum.step == number:
        turn.enter(Phase.WORKING)
    if replica.frontier_step is not None and number >= replica.frontier_step:
        turn.say(Ready(heal_id, number))


def _no_longer_busy(turn: _Turn) -> None:
    """The training thread has ended what was under way when the stream ended: it can take part, and says where."""
    if not turn.replica.busy:
        return
    turn.update(busy=False)
    if turn.replica.phase is Phase.PRESENT:
        _join_or_wait(turn)


def _heal_broke(turn: _Turn, heal_id: HealId, reason: str) -> None:
    _no_longer_busy(turn)
    heal = turn.replica.heal
    if heal is None or heal.heal_id != heal_id or turn.replica.phase not in _CATCHES_UP:
        return
    turn.note(f"heal failed: {reason}; asks for other donors", warning=True)
    turn.say(HealFailed(heal.heal_id, reason, turn.replica.step, turn.replica.history))
    turn.enter(Phase.JOINING, heal=None, quorum=None)


def _heal(turn: _Turn, heal: Heal) -> None:
    turn.update(job_history=heal.history)
    if heal.step < turn.replica.step and heal.history == turn.replica.history:
        turn.note(_back_line(turn.replica.step, heal.step), warning=True)
    if not heal.log_only:
        turn.enter(Phase.HEALING, heal=heal, quorum=None, frontier_step=heal.step)
    elif turn.replica.phase is Phase.APPLYING:
        turn.update(heal=heal, quorum=None, frontier_step=heal.step)  # follows once it holds that state
    else:
        turn.enter(Phase.FOLLOWING, heal=heal, quorum=None, frontier_step=heal.step)


# What a halt of each kind means to people: the error, and what to do.
_HALTS = {
    HaltKind.DIVERGED: (
        "Diverged",
        "Memory or a device has corrupted a state, or the groups' programs are not deterministic. Start the groups "
        "again: they resume from the newest checkpoint; without one, start a new run under another job name.",
    ),
    HaltKind.NONFINITE: (
        "NonFinite",
        "Nothing of that step has been applied. Look at the learning rate and the data of that step; then go on from "
        'a checkpoint under another job name, with other settings or with nonfinite="skip" (docs/guarantees.md).',
    ),
    HaltKind.FAILED: (
        "JobHalted",
        "Start the groups again: they resume from the newest checkpoint.",
    ),
}


def _halted(turn: _Turn, reason: str, kind: HaltKind) -> None:
    if turn.replica.phase in _DONE:
        turn.enter(Phase.LEFT)
        return
    error, advice = _HALTS[kind]
    me = turn.replica.identity
    turn.fail(error, f"the coordinator {me.coordinator} has stopped job {me.job!r}: {reason}. {advice}")


def _evicted(turn: _Turn, reason: str, *, may_return: bool, aside: bool) -> None:
    if turn.replica.phase in _DONE:
        turn.enter(Phase.LEFT)
        return
    if aside:
        turn.note(f"the job goes on without this group: {reason}")
        turn.update(joined=False)  # the stream ends next, as it should
        return
    if may_return:
        turn.note(f"evicted: {reason}; comes back as a joiner", warning=True)
        return  # the stream ends next, and `_disconnected` dials again
    me = turn.replica.identity
    turn.fail(
        "Evicted",
        f"group {me.group!r} of job {me.job!r} was put out by the coordinator {me.coordinator}: {reason}. "
        "Each group of a job needs a name of its own; is an older process of this group still running?",
    )


def _refused(turn: _Turn, message: Refused) -> None:
    me = turn.replica.identity
    lines = [f"the coordinator {me.coordinator} refused group {me.group!r}: {message.reason}."]
    lines += [
        f"  {difference.name}: the job has {difference.job!r}, this group {difference.group!r}"
        for difference in message.differences
    ]
    if message.differences:
        lines.append(
            "Start every group of a job with the same program and settings, or use another job name."
        )
    turn.fail("JoinRefused", "\n".join(lines))


def _disconnected(turn: _Turn, reason: str, *, busy: bool) -> None:
    replica = turn.replica
    turn.effects += [ReleasePin(heal_id) for heal_id in sorted(replica.pins)]
    turn.update(pins=frozenset(), digests_due={})
    if replica.phase in _DONE:
        if replica.phase in (Phase.LEAVING, Phase.FINISHED):
            turn.enter(Phase.LEFT)
        return
    since_s = replica.offline_since_s
    if since_s is None:
        since_s = turn.now_s
        if replica.joined:
            turn.note(
                f"lost the coordinator {replica.identity.coordinator} ({reason}); dials again", warning=True
            )
    addresses = replica.identity.coordinators
    # One that had welcomed this group may be back at once; else the next one is tried.
    welcome = replica.phase not in (Phase.OFFLINE, Phase.GREETING)
    place = replica.place if welcome else (replica.place + 1) % len(addresses)
    delay_s = _redial_delay_s(replica.identity.incarnation, replica.dials, len(addresses))
    turn.enter(
        Phase.OFFLINE,
        joined=False,
        quorum=None,
        heal=None,
        busy=busy or replica.busy,
        offline_since_s=since_s,
        offline_reason=reason,
        dials=replica.dials + 1,
        place=place,
    )
    turn.effects.append(Dial(delay_s, addresses[place]))


def _redial_delay_s(incarnation: int, dials: int, addresses: int) -> float:
    """Doubles with each round over the addresses; less by up to a half, so that not all groups dial at one moment."""
    longest_s = min(FIRST_REDIAL_S * 2.0 ** min(dials // addresses, 10), LAST_REDIAL_S)  # 2.0**1024 overflows
    seed = f"{incarnation} {dials}".encode()
    part = int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "big") / (1 << 32)
    return longest_s * (1.0 - part / 2)


def _leave(turn: _Turn, *, finished: bool) -> None:
    if turn.replica.phase in (Phase.OFFLINE, Phase.GREETING, Phase.LEFT, Phase.FAILED):
        turn.enter(Phase.LEFT)
        return
    turn.enter(Phase.LEAVING)
    turn.say(Leave(finished))


def _tick(turn: _Turn, tick: Tick) -> None:
    replica = turn.replica
    online = replica.phase not in (Phase.OFFLINE, Phase.GREETING, Phase.LEFT, Phase.FAILED)
    if online and turn.now_s >= replica.next_heartbeat_s:
        turn.update(next_heartbeat_s=turn.now_s + replica.heartbeat_interval_s, progress=tick.progress)
        turn.say(Heartbeat(*tick.computed, tick.away, tick.progress != replica.progress))
    silent_s = turn.now_s - replica.heard_s
    timeout_s = replica.heartbeat_interval_s * HEARTBEATS_UNANSWERED
    # If this process itself stood still, what the coordinator said meanwhile may still have to be read.
    if turn.now_s - replica.last_tick_s > timeout_s / 2:
        turn.update(heard_s=turn.now_s)
    elif online and silent_s > timeout_s:
        turn.update(heard_s=turn.now_s)
        if replica.phase not in _DONE:
            # No more welcome there: of several coordinators, another is dialled next.
            turn.enter(Phase.GREETING)
        turn.effects.append(HangUp(f"no word from it for {silent_s:.1f} s"))
    turn.update(last_tick_s=turn.now_s)
    _check_deadlines(turn)


def _check_deadlines(turn: _Turn) -> None:
    replica, me = turn.replica, turn.replica.identity
    timeout_s = replica.failure_timeout_s
    if replica.offline_since_s is not None and turn.now_s - replica.offline_since_s > timeout_s:
        if replica.phase not in (*_DONE, Phase.FAILED):
            turn.fail(
                "CoordinatorUnreachable",
                f"no answer from the coordinator {me.coordinator} for {timeout_s:g} s "
                f"(last: {replica.offline_reason}). Is it running, and is the address right? "
                "`jaxft-coordinator --help` tells how to start one.",
            )
        return
    waited_s = turn.now_s - replica.since_s
    if replica.phase is Phase.GREETING and waited_s > min(GREETING_TIMEOUT_S, timeout_s / 4):
        turn.enter(Phase.GREETING)
        turn.effects.append(HangUp(f"no answer to our greeting for {waited_s:.1f} s"))
    behind = replica.frontier_step is not None and replica.step != replica.frontier_step
    # With a state of the job's history it can be part of a resumption, and may wait for the others to come.
    alone = not replica.history and not replica.frontier_held
    if replica.phase is Phase.JOINING and behind and alone and waited_s > timeout_s:
        if replica.prepared is not None and replica.prepared.heals_only:
            _read_after_all(turn, f"for {timeout_s:g} s no group that holds the job's state was there")
            return
        turn.fail(
            "CannotHeal",
            f"group {me.group!r} holds step {replica.step} of job {me.job!r}, whose last committed step is "
            f"{replica.frontier_step}, and for {timeout_s:g} s no group that holds it was there "
            f"({replica.waiting or 'no reason given'}). A fresh state never replaces a committed one: bring a "
            "group that holds it back, or start a new run under another job name.",
        )
    elif replica.phase is Phase.LEAVING and waited_s > timeout_s:
        turn.note(f"leaves after {timeout_s:g} s although a joiner may still need it", warning=True)
        turn.enter(Phase.LEFT)


def _whom(replica: Replica) -> str:
    """Whom a waiting group waits for, for people."""
    me = replica.identity
    if replica.waiting:
        return replica.waiting
    match replica.phase:
        case Phase.OFFLINE | Phase.GREETING:
            return f"the coordinator {me.coordinator} ({replica.offline_reason or 'connecting'})"
        case Phase.VOTED if replica.quorum is not None:
            others = ", ".join(member.group for member in replica.quorum.members if member.group != me.group)
            return f"the decision on step {replica.step}: the votes of {others or 'nobody else'}"
        case Phase.FOLLOWING if replica.prepared is not None and replica.prepared.spare:
            return f"the commit of step {replica.step}, as a spare"
        case Phase.FOLLOWING:
            return f"the boundary after step {replica.step}, to enter the quorum"
        case Phase.LEAVING:
            return "joiners that still fetch this group's state"
        case _:
            return "the coordinator's next word"


def _back_line(held: Step, step: Step) -> str:
    return (
        f"this group goes back from step {held} to step {step}: the job resumed from an older state while this group "
        f"was away; {done_again(held - step)}"
    )


def _resume_line(frontier: Step, resumed: Step) -> str:
    return (
        f"the job resumes at step {resumed}: all groups that held step {frontier} are gone; "
        f"{done_again(frontier - resumed)}"
    )


def _quorum_line(before: QuorumId, quorum: NewQuorum, *, retried: bool) -> str:
    left = "; ".join(f"lost {change.group} ({change.reason})" for change in quorum.left)
    joined = ", ".join(change.group for change in quorum.joined)
    what = "; ".join(text for text in (left, f"joined {joined}" if joined else "") if text)
    names = ", ".join(member.group for member in quorum.members)
    then = f"step {quorum.step} is tried again" if retried else f"from step {quorum.step}"
    return f"quorum {before} -> {quorum.quorum_id}: {what or 'shards dealt anew'}; now {names}; {then}"
