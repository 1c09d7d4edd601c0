"""The coordinator's protocol: one pure function per job, `step(job, event, now_s) -> (job, effects)`.

Theory of operation
===================

A group's life, as its job sees it (`Phase`):

    Hello -> PRESENT -> Join -> MEMBER                      if it holds the frontier and there is no quorum
                             -> READY                       if it holds the frontier: a spare for this step
                             -> STALE -> HEALING -> READY   if it does not
                                                 -> MEMBER  at the next boundary
    MEMBER -> LEAVING -> (Goodbye)                          leaves on purpose, or is drained (`draining.py`)
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
4. A quorum has at least `min_replicas` members when it is formed, or is a trial and commits nothing (`raising.py`).
5. In a quorum each shard has exactly one owner; when a step is retried, living owners keep theirs.
6. A change that must survive the coordinator is emitted as a `Persist`, before the effects that announce it
   (`durable.py`).
7. A record that becomes an effect can be encoded and decoded again (`bounds.py`).
8. The stream to each group is ordered. So a Pin of state s, sent while the frontier is s, arrives before the
   Commit that would overwrite state s; nothing waits for a joiner.

Deliberately not here: sockets, clocks (time is an argument), files, groups of several ranks.
"""

from collections.abc import Mapping
from typing import assert_never

from jaxft_protocol.coordinator import (
    bounds,
    draining,
    durable,
    founding,
    progress,
    quorums,
    raising,
    sessions,
)
from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import (
    DrainAsked,
    Effect,
    Event,
    Group,
    GroupPhase,
    Job,
    PauseAsked,
    Persist,
    Received,
    SessionClosed,
    SessionId,
    Suspended,
    Tick,
)
from jaxft_protocol.messages import (
    Drain,
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


def step(job: Job, event: Event, now_s: float) -> tuple[Job, tuple[Effect, ...]]:  # noqa: C901 (a case for each event)
    """Return the job after `event` at time `now_s` (monotonic seconds), and what must be done.

    Raises:
        IllegalEvent: if the event's sender may not send it now; or, as `Unwritable`, if the record that it requires
            cannot be encoded.
    """
    draft = Draft(job, now_s)
    match event:
        case Received(session, Hello() as message):
            if session in job.sessions:
                raise IllegalEvent("a session sends Hello only once")
            sessions.hello(draft, session, message)
        case Received(session, message):
            if not _said(draft, _speaker(job, session), message):
                return draft.job, tuple(draft.effects)  # nothing durable has changed
        case SessionClosed(session, reason):
            group = _group_of(job, session)
            if group is None:
                return job, ()
            sessions.closed(draft, group, reason)
        case Tick(heard_s, unix_s):
            if not _tick(draft, heard_s):
                return draft.job, ()
            _note_idle(draft, unix_s)
        case Suspended(seconds):
            progress.suspended(draft, seconds)
            return draft.job, ()
        case DrainAsked(name, reason):
            draining.ask(draft, name, reason)
        case PauseAsked(paused):
            draining.pause(draft, paused=paused)
        case _:
            assert_never(event)
    _advance(draft)
    if isinstance(event, Tick):
        # Not at each event: a thousand new groups would change the text a thousand times.
        quorums.explain(draft)
    if _remembers_more(job, draft.job):
        draft.job = bounds.forget(draft.job)
    record = durable.record_of(job, draft.job)
    if record is None:
        return draft.job, tuple(draft.effects)
    if problem := bounds.problem(record):
        raise Unwritable(f"the record of job {job.name!r} cannot be encoded: {problem}")
    return draft.job, (Persist(record), *draft.effects)


def _remembers_more(before: Job, after: Job) -> bool:
    """Return whether the record has a new group; a commit, at every step, adds none."""
    if after.proven is not before.proven or after.distrusted is not before.distrusted:
        return True
    old, new = before.frontier, after.frontier
    return old is not None and new is not None and new is not old and new.step == old.step


def _said(draft: Draft, group: Group, message: GroupMessage) -> bool:
    """Handle `message`; return whether anything else may follow from it immediately."""
    match message:
        case Heartbeat():
            progress.heard(draft, group, message)
            quorum = draft.job.quorum
            quorums.end_gathering(draft)
            return draft.job.quorum is not quorum
        case Vote():
            frontier, quorum = draft.job.frontier, draft.job.quorum
            if message.raised:
                raising.raised(draft, group, message)
            else:
                quorums.vote(draft, group, message)
            return draft.job.frontier is not frontier or draft.job.quorum is not quorum
        case Hello():
            raise IllegalEvent("a session sends Hello only once")
        case Join() if group.phase is not GroupPhase.PRESENT:
            raise IllegalEvent(f"group {group.name!r} joined twice")
        case _:
            _said_rarely(draft, group, message)
    return True


def _said_rarely(
    draft: Draft, group: Group, message: Join | Pinned | Ready | HealFailed | Leave | Drain
) -> None:
    match message:
        case Join():
            sessions.join(draft, group, message)
        case Pinned():
            sessions.pinned(draft, group, message)
        case Ready():
            sessions.ready(draft, group, message)
        case HealFailed():
            sessions.heal_failed(draft, group, message)
        case Leave():
            sessions.leave(draft, group, message)
        case Drain():
            draining.ask(draft, group.name, "its process was asked to end")
        case _:
            assert_never(message)


def _advance(draft: Draft) -> None:
    """Do everything that can happen now without another event."""
    if _is_steady(draft.job):
        return  # fast path: same result
    draining.release(draft)
    founding.found(draft)
    sessions.plan_heals(draft)
    quorums.form(draft)
    sessions.plan_following(draft)
    sessions.finish(draft)


def _is_steady(job: Job) -> bool:
    """Return whether all groups train in one quorum, and nothing else is under way."""
    if job.quorum is None or job.frontier is None or job.orphaned_s is not None or job.finished is not None:
        return False
    return all(
        group.phase is GroupPhase.MEMBER and group.pinned_step is None and not group.draining
        for group in job.groups.values()
    )


def _tick(draft: Draft, heard_s: Mapping[SessionId, float]) -> bool:
    """Judge by the time; return whether that was possible.

    After a suspension, or without ticks for long, no group is to blame for its silence, and messages may be unread.
    """
    job, now_s = draft.job, draft.now_s
    timeout_s = job.options.heartbeat_timeout_s
    last_tick_s = now_s if job.last_tick_s is None else job.last_tick_s
    draft.update(last_tick_s=now_s)
    if now_s - last_tick_s > timeout_s / 2:
        progress.stalled(draft, progress.without_tick_s(job, now_s))
        return False
    silent: list[Group] = []
    if now_s - job.suspended_s > timeout_s:
        silent = draft.select(lambda group: now_s - heard_s.get(group.session, group.came_s) > timeout_s)
    for group in silent:
        silent_s = now_s - max(job.suspended_s, heard_s.get(group.session, group.came_s))
        draft.expel(group, f"no heartbeat for {silent_s:.1f} s", may_return=True)
    quorums.lose(draft, *(group.name for group in silent))
    quorums.end_gathering(draft)
    quorums.end_grace(draft, last_tick_s)
    _go_on_without_the_late(draft)
    founding.end_reunion(draft)
    return True


def _note_idle(draft: Draft, unix_s: int) -> None:
    job = draft.job
    if not job.groups and job.restored_s is None and job.idle_since is None:
        draft.update(idle_since=unix_s)


def _go_on_without_the_late(draft: Draft) -> None:
    late = progress.late(draft)
    if draft.job.quorum is not None:
        draft.wait_for(progress.waits_for(draft, late))
    out = [each for each in late if not each.needed]
    if not out:
        return
    draft.update(hung=draft.job.hung + 1)
    for each in out:
        draft.expel(each.group, each.reason, may_return=True, aside=each.away)
        if not each.away:
            progress.blame(draft, each.group.name)
    quorums.lose(draft, *(each.group.name for each in out))


def _speaker(job: Job, session: SessionId) -> Group:
    group = _group_of(job, session)
    if group is None:
        raise IllegalEvent("the first message of a session must be Hello")
    return group


def _group_of(job: Job, session: SessionId) -> Group | None:
    name = job.sessions.get(session)
    return None if name is None else job.groups[name]
