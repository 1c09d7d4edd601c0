"""The coordinator's protocol: one pure function per job, `step(job, event, now_s) -> (job, effects)`.

Theory of operation
===================

A group's life, as its job sees it (`Phase`):

    Hello -> PRESENT -> Join -> MEMBER                      if it holds the frontier and there is no quorum
                             -> READY                       if it holds the frontier: a spare for this step
                             -> STALE -> HEALING -> READY   if it does not
                                                 -> MEMBER  at the next boundary
    MEMBER -> LEAVING -> (Goodbye)                          leaves on purpose
    any    -> (gone)                                        stream closed, no heartbeat, evicted

A job advances in three ways only: it is *founded* (`founding.py` chooses its first state, or the state from which it
resumes after all holders of the frontier are gone), a *quorum* is formed, and a quorum's step is *committed*
(`quorums.py`, with the rule for counting votes).

What holds after every event:

1. `last_quorum_id` never decreases, and no two quorums share an id.
2. The frontier advances by one step at a time, and only by the votes of a quorum formed at it: each living member
   holds the complete sum, and no two members reported different states. One event makes one decision for all of them.
   The frontier goes back only when no group is left that holds it, and only to a committed state of the same history.
3. Only groups in `frontier.holders` donate: they were sent the commit that made the frontier, or founded it, or
   healed to exactly that state, or came back with it. An equal step number alone proves nothing.
4. A quorum has at least `min_replicas` members when it is formed.
5. In a quorum each shard has exactly one owner; when a step is retried, living owners keep theirs.
6. A change that must survive the coordinator is emitted as a `Persist`, before the effects that announce it
   (`durable.py`).
7. A record that becomes an effect can be encoded and decoded again (`bounds.py`).
8. The stream to each group is ordered. So a Pin of state s, sent while the frontier is s, arrives before the
   Commit that would overwrite state s; nothing waits for a joiner.

Deliberately not here: sockets, clocks (time is an argument), files, groups of several ranks.
"""

from typing import assert_never

from jaxft_protocol.coordinator import bounds, durable, founding, progress, quorums, raising, sessions
from jaxft_protocol.coordinator.draft import Turn
from jaxft_protocol.coordinator.job import (
    Effect,
    Event,
    Group,
    GroupSaid,
    Job,
    Persist,
    Phase,
    SessionClosed,
    SessionId,
    Tick,
)
from jaxft_protocol.messages import (
    GroupMessage,
    HealFailed,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Pinned,
    Ready,
    Vote,
)


class IllegalEvent(Exception):
    """A group broke the protocol. The job is unchanged; the shell ends that group's session."""


class Unwritable(IllegalEvent):
    """The record that this event requires cannot be encoded. The job is unchanged."""


def step(job: Job, event: Event, now_s: float) -> tuple[Job, tuple[Effect, ...]]:
    """Return the job after `event` at time `now_s` (monotonic seconds), and what must be done.

    Raises:
        IllegalEvent: if the event's sender may not send it now; or, as `Unwritable`, if the record that it requires
            cannot be encoded.
    """
    turn = Turn(job, now_s)
    match event:
        case GroupSaid(session, Hello() as message):
            if session in job.sessions:
                raise IllegalEvent("a session sends Hello only once")
            sessions.hello(turn, session, message)
        case GroupSaid(session, message):
            if not _said(turn, _speaker(job, session), message):
                return turn.job, tuple(turn.effects)  # nothing durable has changed
        case SessionClosed(session, reason):
            group = _group_of(job, session)
            if group is None:
                return job, ()
            sessions.closed(turn, group, reason)
        case Tick(unix_s):
            _tick(turn)
            _note_idle(turn, unix_s)
        case _:
            assert_never(event)
    _advance(turn)
    if isinstance(event, Tick):
        # Not at each event: a thousand new groups would change the text a thousand times.
        quorums.explain(turn)
    if _remembers_more(job, turn.job):
        turn.job = bounds.forget(turn.job)
    record = durable.record_of(job, turn.job)
    if record is None:
        return turn.job, tuple(turn.effects)
    if problem := bounds.problem(record):
        raise Unwritable(f"the record of job {job.name!r} cannot be encoded: {problem}")
    return turn.job, (Persist(record), *turn.effects)


def _remembers_more(before: Job, after: Job) -> bool:
    """Return whether the record has a new group; a commit, at every step, adds none."""
    if after.proven is not before.proven or after.distrusted is not before.distrusted:
        return True
    old, new = before.frontier, after.frontier
    return old is not None and new is not None and new is not old and new.step == old.step


def _said(turn: Turn, group: Group, message: GroupMessage) -> bool:
    """Handle `message`; return whether anything else may follow from it immediately."""
    match message:
        case Heartbeat():
            progress.heard(turn, group, message)
            quorum = turn.job.quorum
            quorums.end_gathering(turn)
            return turn.job.quorum is not quorum
        case Vote():
            frontier, quorum = turn.job.frontier, turn.job.quorum
            if message.raised:
                raising.raised(turn, group, message)
            else:
                quorums.vote(turn, group, message)
            return turn.job.frontier is not frontier or turn.job.quorum is not quorum
        case Hello():
            raise IllegalEvent("a session sends Hello only once")
        case Join() if group.phase is not Phase.PRESENT:
            raise IllegalEvent(f"group {group.name!r} joined twice")
        case _:
            _said_rarely(turn, turn.put(group, last_heard_s=turn.now_s), message)
    return True


def _said_rarely(turn: Turn, group: Group, message: Join | Pinned | Ready | HealFailed | Leave) -> None:
    match message:
        case Join():
            sessions.join(turn, group, message)
        case Pinned():
            sessions.pinned(turn, group, message)
        case Ready():
            sessions.ready(turn, group, message)
        case HealFailed():
            sessions.heal_failed(turn, group, message)
        case Leave():
            sessions.leave(turn, group, message)
        case _:
            assert_never(message)


def _advance(turn: Turn) -> None:
    """Do everything that can happen now without another event."""
    founding.found(turn)
    sessions.plan_heals(turn)
    quorums.form(turn)
    sessions.plan_following(turn)
    sessions.finish(turn)


def _last_heard_s(job: Job, group: Group) -> float:
    """Return when a group was last known to be alive. The commit notes the votes, for all members at once."""
    voted = job.frontier is not None and group.holder in job.frontier.holders
    return max(group.last_heard_s, job.voted_s) if voted else group.last_heard_s


def _tick(turn: Turn) -> None:
    job, now_s = turn.job, turn.now_s
    timeout_s = job.options.heartbeat_timeout_s
    # If the coordinator itself was suspended, no group is to blame for the silence.
    last_tick_s = now_s if job.last_tick_s is None else job.last_tick_s
    turn.update(last_tick_s=now_s)
    if now_s - last_tick_s > timeout_s / 2:
        turn.put_all(job.groups.values(), last_heard_s=now_s)
        return
    silent = turn.select(lambda group: now_s - _last_heard_s(turn.job, group) > timeout_s)
    for group in silent:
        turn.expel(group, f"no heartbeat for {now_s - _last_heard_s(turn.job, group):.1f} s", may_return=True)
    quorums.lose(turn, *(group.name for group in silent))
    quorums.end_gathering(turn)
    quorums.end_grace(turn, last_tick_s)
    _go_on_without_the_late(turn)
    founding.end_reunion(turn)


def _note_idle(turn: Turn, unix_s: int) -> None:
    job = turn.job
    if not job.groups and job.restored_s is None and job.idle_since is None:
        turn.update(idle_since=unix_s)


def _go_on_without_the_late(turn: Turn) -> None:
    late = progress.late(turn)
    if turn.job.quorum is not None:
        turn.wait_for(progress.waits_for(turn, late))
    out = [each for each in late if not each.needed]
    if not out:
        return
    turn.update(hung=turn.job.hung + 1)
    for each in out:
        turn.expel(each.group, each.reason, may_return=True, aside=each.away)
        if not each.away:
            progress.blame(turn, each.group.name)
    quorums.lose(turn, *(each.group.name for each in out))


def _speaker(job: Job, session: SessionId) -> Group:
    group = _group_of(job, session)
    if group is None:
        raise IllegalEvent("the first message of a session must be Hello")
    return group


def _group_of(job: Job, session: SessionId) -> Group | None:
    name = job.sessions.get(session)
    return None if name is None else job.groups[name]
