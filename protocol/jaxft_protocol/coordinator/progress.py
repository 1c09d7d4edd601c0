"""Detect members that hang: a heartbeat shows that a process is alive, not that its training makes progress.

A heartbeat reports three things about the training thread: whether it has computed its shards of the attempt, so that
it now waits for its peers; whether it has made progress since the last heartbeat (it computed a shard, or bytes of an
exchange moved); and whether it is *away*: between two calls of the step, compiling, or saving a checkpoint.

The job waits for members that are behind: members that have not computed while others have, or have not voted while
others hold the sum. *Patience* is how long it waits:

* A member that is in the step and makes no progress for that long hangs. It is evicted and blamed. In its first step
  it has at least `join_timeout_s`.
* A member that is away has at least `join_timeout_s`, from the moment when the first other member waits. Then the job
  continues without it. It is set aside, not blamed, and comes back with its next call, as a joiner.
* If the job cannot continue without the members that are away, because fewer than `min_replicas` would be left, it
  waits for them without a limit, and names them.

If no member is ahead, no member is late: all may be in a long step, or evaluating. But a group that is ready to take
part counts as waiting, because it could continue alone.

Patience is derived from measurements: several times the duration of recent steps, and at least two heartbeat
timeouts. Time during which a member was away, the coordinator was suspended, or its store did not answer, is not part
of a step. The longest of many steps is ignored, so a single stall does not increase patience for long; two long steps
are considered normal. Until this coordinator has measured a step, patience is very long.

If steps suddenly become many times longer, the evicted members did not hang, and their replacements are not faster.
So patience doubles with each eviction since the last commit, until a step is committed and measured.

Every attempt ends. First case: a living member has not computed. Then another member is ahead, and the rule above
ends the wait; or no member is ahead, and none waits. Second case: all living members have computed. Then all of them
get `AllComputed`, and from that moment each counts the time in which its exchange moves no byte
(`jaxft/_exchange/_patience.py`). So each member gets the sum and votes, or votes that it failed, or hangs before its
vote. In the last case other members hold the sum and wait, or have accused it while it is silent, and it is evicted.
If several members of a large quorum are silent while others hold the sum, a single member may hold up its row. They
have `join_timeout_s` more than patience and half again, in which the exchange's deadlines tell which one it is.
Before that moment no exchange has a deadline, because a waiting member may be waiting for a member that computes. A
death is always noticed: the stream ends, or the heartbeats stop. When a quorum ends without a successor, its members
also get `AllComputed` (`tell_over`), because there is no member to wait for.

A group that is evicted repeatedly, because its peers accused it or because it hung, is readmitted later each time, so
that one bad link does not slow the job down much. While nothing is committed, the delay applies from the first
eviction on and is several times the patience, so that groups that hang cannot replace each other forever.
"""

from dataclasses import dataclass

from jaxft_protocol.coordinator.assign import LEAST_MEMBERS
from jaxft_protocol.coordinator.draft import Draft, names_text
from jaxft_protocol.coordinator.job import Ballot, Group, GroupPhase, Job
from jaxft_protocol.messages import AllComputed, GroupName, Heartbeat, NewQuorum
from jaxft_protocol.values import changed

STEPS_OF_PATIENCE = 8
# Patience with the last round of an exchange in rows and columns, in patiences with the first.
LATER_ROUNDS = 1.5
# In units of the heartbeat timeout: a stall of this length is never a fault, however fast the steps are.
LEAST_PATIENCE = 2
# Patience doubles at most this often: 1024 times eight steps is long enough for any job.
MOST_DOUBLINGS = 10
# In units of `join_timeout_s`, until a step has been measured: the first step may load, compile and tune.
UNMEASURED_PATIENCE = 10
# How many step times are kept. An occasional slow step, say at the end of a file, occurs twice among this many.
REMEMBERED_STEPS = 128
# From this many steps on, the longest one is ignored: it may be a single stall.
ENOUGH_STEPS = 8
# In units of the heartbeat timeout: the longest readmission delay, and the time without blame that resets it.
MOST_HELD_BACK = 12
CLEARED_AFTER = 24
# The same in units of patience, while nothing is committed: otherwise groups that hang could take turns forever.
HELD_BACK_WHILE_STANDING = 4
CLEARED_WHILE_STANDING = 16

_FRESH_BALLOT = Ballot()


@dataclass(frozen=True, slots=True)
class Late:
    """A member that others have waited for too long. `needed`: the job cannot go on without it."""

    group: Group
    reason: str
    away: bool
    needed: bool


def patience_s(job: Job) -> float | None:
    """Return how long members wait for others, or None if no step has been measured."""
    slow_s = slow_step_s(job)
    if slow_s is None:
        return None
    return max(LEAST_PATIENCE * job.options.heartbeat_timeout_s, STEPS_OF_PATIENCE * slow_s) * _growth(job)


def slow_step_s(job: Job) -> float | None:
    """Return the duration of a slow step, from recent steps. None if none was measured."""
    if not job.recent_s:
        return None
    ordered = sorted(job.recent_s)
    return ordered[-2] if len(ordered) >= ENOUGH_STEPS else ordered[-1]


def suspended(draft: Draft, seconds: float) -> None:
    """Note that the coordinator was suspended.

    The groups' messages of that time are only read now, so that time is not part of the attempt, nor of the time that
    members wait for others, or the job for groups that may come back.
    """
    job, now_s = draft.job, draft.now_s
    draft.update(
        suspended_s=now_s,
        ballot=_later(job.ballot, seconds, now_s),
        orphaned_s=_moved(job.orphaned_s, seconds, now_s),
        restored_s=_moved(job.restored_s, seconds, now_s),
        first_join_s=_moved(job.first_join_s, seconds, now_s),
        committed_seen_s=_moved(job.committed_seen_s, seconds, now_s),
    )
    for group in job.groups.values():
        draft.put(
            group,
            came_s=min(now_s, group.came_s + seconds),
            joined_s=min(now_s, group.joined_s + seconds),
            pinned_s=min(now_s, group.pinned_s + seconds),
        )


def stalled(draft: Draft, seconds: float) -> None:
    """Note that there was no tick for some seconds, as while the store does not answer.

    Messages were read, so members are judged as ever. But the job's decisions of that time left only now: the next
    attempt begins now, and donors are asked now.
    """
    now_s, ballot = draft.now_s, draft.job.ballot
    draft.update(suspended_s=now_s, ballot=changed(ballot, began_s=min(now_s, ballot.began_s + seconds)))
    for group in draft.job.groups.values():
        draft.put(group, pinned_s=min(now_s, group.pinned_s + seconds))


def without_tick_s(job: Job, now_s: float) -> float:
    """Return for how long there was no tick, if the job did not work as usual in that time; or else 0."""
    if job.last_tick_s is None:
        return 0.0
    seconds = now_s - max(job.last_tick_s, job.suspended_s)
    return seconds if seconds > job.options.heartbeat_timeout_s / 2 else 0.0


def measure(draft: Draft) -> None:
    """Note how long the last attempt of a committed step took, up to the last ok vote.

    Without the time in which a member was away, the coordinator was suspended, or its store did not answer. The
    commit may have come later, because of a member that hung before its vote: this is not part of a step.
    """
    ballot = draft.job.ballot
    began_s = ballot.began_s + without_tick_s(draft.job, draft.now_s)
    took_s = max(0.0, ballot.last_voted_s - max(began_s, ballot.away_s))
    draft.update(recent_s=(*draft.job.recent_s, took_s)[-REMEMBERED_STEPS:], hung=0)


def heard(draft: Draft, group: Group, message: Heartbeat) -> None:
    """Note a heartbeat's report on a group's training thread."""
    returned = group.away and not message.away
    if message.moves or returned:
        draft.put(group, away=message.away, moved_s=draft.now_s)
    elif message.away is not group.away:
        draft.put(group, away=message.away)
    if message.away and group.phase is GroupPhase.MEMBER:
        draft.update(ballot=changed(draft.job.ballot, away_s=draft.now_s))
    _computed(draft, group, message)


def _computed(draft: Draft, group: Group, message: Heartbeat) -> None:
    """Note that a member has computed and waits for the others."""
    job = draft.job
    position = job.positions.get(group.name)
    if job.quorum is None or job.frontier is None or position is None:
        return
    if (message.computed_quorum_id, message.computed_step) != (job.quorum.quorum_id, job.frontier.step):
        return
    ballot, bit = job.ballot, 1 << position
    if not ballot.computed & bit:
        ahead_s = draft.now_s if ballot.ahead_s is None else ballot.ahead_s
        draft.update(ballot=changed(ballot, computed=ballot.computed | bit, ahead_s=ahead_s))
        _tell_if_all_have(draft, job.quorum)


def _tell_if_all_have(draft: Draft, quorum: NewQuorum) -> None:
    """Send AllComputed once the last member has computed, to all members at once, so that their timeouts agree.

    A step that is shorter than a heartbeat is over before this.
    """
    ballot = draft.job.ballot
    if ballot.announced or _living(quorum, ballot) & ~(ballot.computed | ballot.ok | ballot.failed):
        return
    draft.update(ballot=changed(ballot, announced=True))
    message = AllComputed(
        quorum.quorum_id, quorum.step if draft.job.frontier is None else draft.job.frontier.step
    )
    for group in _seated(draft, quorum, _living(quorum, ballot)):
        draft.send(group, message)


def tell_over(draft: Draft, quorum: NewQuorum) -> None:
    """Tell the members of a quorum that ended without a successor not to wait for each other any longer.

    Their training threads are then free for other directives.
    """
    assert draft.job.frontier is not None
    message = AllComputed(quorum.quorum_id, draft.job.frontier.step)
    for group in _seated(draft, quorum, (1 << len(quorum.members)) - 1):
        if group.phase is GroupPhase.MEMBER:
            draft.send(group, message)


def late(draft: Draft) -> list[Late]:
    """Return the members that others have waited for too long."""
    job, ballot = draft.job, draft.job.ballot
    if job.quorum is None or job.frontier is None:
        return []
    longest = _unmeasured_s(job)
    patience = patience_s(job) or longest
    living = _living(job.quorum, ballot)
    voted = ballot.ok | ballot.failed
    joiner_s = _waiting_joiner_s(draft)
    computing = living & ~(ballot.computed | voted)
    none_ahead_s = None if ballot.computed else joiner_s
    # Members that have computed wait for the exchange, which has its own deadlines; a single member has no peers to
    # wait for. If several members are all behind, they are probably in a long step and do not hang.
    alone = living.bit_count() == 1
    for_joiner = patience if alone else max(patience, longest)
    # A single member of several without the sum may hold up its row. Their exchange's deadline shows which.
    in_row = len(job.quorum.members) >= LEAST_MEMBERS and (living & ~voted).bit_count() > 1
    for_sum = LATER_ROUNDS * patience + job.options.join_timeout_s if in_row else patience
    waits = (
        (computing, ballot.ahead_s, patience, "computed its shards"),
        (living & ~voted, ballot.voted_s, for_sum, "voted"),
        (computing, none_ahead_s, for_joiner, "computed its shards"),
        (0 if computing else living & ~voted, joiner_s, for_joiner, "voted"),
    )
    for behind, since_s, most_s, lacks in waits:
        if behind and since_s is not None and draft.now_s - since_s > most_s:
            found = [
                one
                for group in _seated(draft, job.quorum, behind)
                if (one := _judged(draft, group, since_s, most_s, lacks)) is not None
            ]
            if found:
                return _spared(draft, found, living.bit_count())
    return []


def waits_for(draft: Draft, late: list[Late]) -> str:
    """Say which members are away although the job cannot continue without them; "" if none is."""
    needed = [each.group for each in late if each.needed]
    if not needed or draft.job.frontier is None:
        return ""
    return (
        f"step {draft.job.frontier.step} waits for {names_text(needed)}, away from training: outside the step, "
        f"compiling, or saving. The job needs {max(1, draft.job.min_replicas)} groups, and cannot continue without "
        "them"
    )


def blame(draft: Draft, name: GroupName) -> None:
    """Remember that a group was evicted because it disturbed the others."""
    job = draft.job
    count, last_s = job.blamed.get(name, (0, 0.0))
    cleared_s = max(CLEARED_AFTER * job.options.heartbeat_timeout_s, _standing_s(job, CLEARED_WHILE_STANDING))
    cleared = draft.now_s - last_s > cleared_s
    draft.update(blamed={**job.blamed, name: (1 if cleared else count + 1, draft.now_s)})


def held_back(draft: Draft, group: Group) -> bool:
    """Return whether it is too early to readmit a group that was evicted several times, or since the last commit."""
    count, last_s = draft.job.blamed.get(group.name, (0, 0.0))
    if not count or group.phase is GroupPhase.MEMBER or (count == 1 and not draft.job.hung):
        return False
    held_s = draft.job.options.heartbeat_timeout_s * min(2.0 ** (count - 2), MOST_HELD_BACK)
    return draft.now_s - last_s < max(held_s, _standing_s(draft.job, HELD_BACK_WHILE_STANDING))


def fresh_ballot(draft: Draft, retries: int = 0) -> Ballot:
    """Return the ballot of an attempt that begins now."""
    return changed(_FRESH_BALLOT, retries=retries, began_s=draft.now_s)


def _later(ballot: Ballot, by_s: float, now_s: float) -> Ballot:
    """Return the ballot with its times moved by `by_s`; past times stay in the past."""
    return changed(
        ballot,
        began_s=min(now_s, ballot.began_s + by_s),
        away_s=min(now_s, ballot.away_s + by_s),
        ahead_s=_moved(ballot.ahead_s, by_s, now_s),
        voted_s=_moved(ballot.voted_s, by_s, now_s),
        last_voted_s=min(now_s, ballot.last_voted_s + by_s),
        deadline_s=None if ballot.deadline_s is None else ballot.deadline_s + by_s,
        gather_until_s=None if ballot.gather_until_s is None else ballot.gather_until_s + by_s,
    )


def _moved(at_s: float | None, by_s: float, now_s: float) -> float | None:
    return None if at_s is None else min(now_s, at_s + by_s)


def _judged(draft: Draft, group: Group, since_s: float, most_s: float, lacks: str) -> Late | None:
    """Judge a member for which others have waited since `since_s`; return None if it has time left."""
    job, waited_s = draft.job, draft.now_s - since_s
    assert job.frontier is not None
    if group.away:
        if waited_s <= max(most_s, job.options.join_timeout_s):
            return None
        text = (
            f"it is away from training (outside the step, compiling, or saving), and others have waited for it in "
            f"step {job.frontier.step} for {waited_s:.0f} s; its next call of the step brings it back"
        )
        return Late(group, text, away=True, needed=False)
    most_s = max(most_s, job.options.join_timeout_s) if _is_new(job, group) else most_s
    if draft.now_s - max(since_s, group.moved_s) <= most_s:
        return None
    slow_s = slow_step_s(job)
    slow = "" if slow_s is None else f" (recently a slow step took {slow_s:.2f} s)"
    text = (
        f"it hangs: it has not {lacks} of step {job.frontier.step}, and others have waited for it for "
        f"{waited_s:.1f} s{slow}"
    )
    return Late(group, text, away=False, needed=False)


def _is_new(job: Job, group: Group) -> bool:
    """Return whether this is its first step in the quorum, which may load, compile and tune."""
    quorum, frontier = job.quorum, job.frontier
    if quorum is None or frontier is None or quorum.step != frontier.step:
        return False
    return any(change.group == group.name for change in quorum.joined)


def _spared(draft: Draft, found: list[Late], living: int) -> list[Late]:
    """Keep members that are away if the job needs them to continue: evicting them would only prolong the wait."""
    away = [each for each in found if each.away]
    if living - len(found) + len(_ready(draft)) >= max(1, draft.job.min_replicas):
        return found
    kept = [Late(each.group, each.reason, away=True, needed=True) for each in away]
    return [*(each for each in found if not each.away), *kept]


def _standing_s(job: Job, patiences: int) -> float:
    """Return `patiences` times the job's patience if a member was evicted since the last commit; otherwise 0."""
    return patiences * (patience_s(job) or _unmeasured_s(job)) if job.hung else 0.0


def _unmeasured_s(job: Job) -> float:
    return UNMEASURED_PATIENCE * job.options.join_timeout_s * _growth(job)


def _growth(job: Job) -> float:
    return 2.0 ** min(job.hung, MOST_DOUBLINGS)


def _waiting_joiner_s(draft: Draft) -> float | None:
    """Return since when a group that could continue alone has waited for members, if none of them has voted ok."""
    if draft.job.frontier is None or draft.job.ballot.ok:
        return None
    ready = [group for group in _ready(draft) if not group.spare]
    job = draft.job
    return max(job.ballot.began_s, job.suspended_s, min(group.ready_s for group in ready)) if ready else None


def _ready(draft: Draft) -> list[Group]:
    """Return the groups at the frontier that could take part at once."""
    frontier = draft.job.frontier
    step = None if frontier is None else frontier.step
    return draft.select(lambda group: group.phase is GroupPhase.READY and group.step == step)


def _living(quorum: NewQuorum, ballot: Ballot) -> int:
    return (1 << len(quorum.members)) - 1 & ~ballot.lost


def _seated(draft: Draft, quorum: NewQuorum, mask: int) -> list[Group]:
    members = [member for position, member in enumerate(quorum.members) if mask >> position & 1]
    return [draft.job.groups[member.group] for member in members if member.group in draft.job.groups]
