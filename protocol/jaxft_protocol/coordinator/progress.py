"""Telling who hangs from who waits: a heartbeat shows that a process lives, not that its training moves.

A heartbeat says three things of the training thread: whether it has computed its shards of the attempt, and so
waits for its peers; whether it has got on with the step since the last one (it computed a shard, or bytes of an
exchange moved); and whether it is *away*: between two calls of the step, or compiling, or saving a checkpoint.

The job waits for members that are behind: that have not computed while others have, or have not voted while others
hold the whole sum. How long is its *patience*:

* A member that is in the step and does not get on for that long hangs. It is evicted, and blamed. In its first step
  it is given `join_timeout_s` at least.
* A member that is away is waited for at least `join_timeout_s`, counted from when the first of the others waits. Then
  the job goes on without it. It is stood aside and not blamed: it comes back with its next call, as a joiner.
* If the job cannot go on without those that are away, because fewer than `min_replicas` would be left, it waits for
  them as long as it takes, and says for whom.

If no member is ahead, nobody is late: all of them may be in a long step, or evaluate at once. But a group that stands
ready to take part counts as one that waits, for it could go on alone.

Patience derives from what was measured: several times what steps took of late, and never less than two heartbeat
timeouts. Time during which a member was away is not part of a step. The longest step of many is left out, so one
stall does not make the job patient for long; two are taken for what steps are like. Until this coordinator has
measured a step, patience is very long.

Where steps suddenly take many times longer than ever before, those who are put out did not hang, nor will those who
take their places be quicker. So each time that somebody is put out without a commit since the last, patience doubles:
in the end a step is waited for, counts, and is measured.

Every attempt ends. Either a living member has not computed: then somebody is ahead, and the rule above ends the wait;
or nobody is ahead, and nobody waits. Or all living members have computed: then all are told so (`AllComputed`), and
from that moment each of them counts the time in which no byte moves in its exchange (`jaxft/_exchange/_patience.py`).
So each gets the sum and votes, or votes that it failed, or hangs before its vote; then others hold the sum and wait,
or have accused it and it is silent, and it goes. Before that moment no exchange has a deadline: whoever waits there
may be waiting for one that computes. A death shows all the while: its stream ends, or its heartbeats stop. Members
of a quorum that ends without another are told the same (`tell_over`): there is nobody to wait for.

A group that was put out again and again, because its peers accused it or because it hung, is let in again later each
time, so that one bad link costs the job little of its speed. While nothing is committed that is several times the
patience, so that two that hang cannot take each other's place for ever.
"""

from dataclasses import dataclass

from jaxft_protocol.coordinator.draft import Turn, names_text
from jaxft_protocol.coordinator.job import Ballot, Group, Job, Phase
from jaxft_protocol.messages import AllComputed, GroupName, Heartbeat, NewQuorum
from jaxft_protocol.values import changed

STEPS_OF_PATIENCE = 8
# Of the heartbeat timeout: no step is so fast that a hiccup of this length is a fault.
LEAST_PATIENCE = 2
# How often patience doubles at most: 1024 times eight steps are longer than anybody can wait.
MOST_DOUBLINGS = 10
# Of `join_timeout_s`, while no step has been measured: a first step may load, compile and tune what later ones have.
UNMEASURED_PATIENCE = 10
# So many steps are remembered. A step that is slow now and then, say when a file ends, comes twice in as many.
REMEMBERED_STEPS = 128
# With so many of them the longest is left out: one stall says nothing.
ENOUGH_STEPS = 8
# In units of the heartbeat timeout: the longest time that a group is held back, and the quiet that clears its name.
MOST_HELD_BACK = 12
CLEARED_AFTER = 24
# In units of patience, likewise, while nothing is committed: else groups that hang could take turns for ever.
HELD_BACK_WHILE_STANDING = 4
CLEARED_WHILE_STANDING = 16


@dataclass(frozen=True, slots=True)
class Late:
    """A member that others have waited for too long. `needed`: the job cannot go on without it."""

    group: Group
    reason: str
    away: bool
    needed: bool


def patience_s(job: Job) -> float | None:
    """How long one may wait for others, or None while no step has been measured."""
    slow_s = slow_step_s(job)
    if slow_s is None:
        return None
    return max(LEAST_PATIENCE * job.options.heartbeat_timeout_s, STEPS_OF_PATIENCE * slow_s) * _growth(job)


def slow_step_s(job: Job) -> float | None:
    """What a slow step takes, by the last ones. None if none was measured."""
    if not job.recent_s:
        return None
    ordered = sorted(job.recent_s)
    return ordered[-2] if len(ordered) >= ENOUGH_STEPS else ordered[-1]


def measure(turn: Turn) -> None:
    """A step counts: note how long its last attempt took those who hold its sum, with all members in it.

    That it counted no earlier may be due to one that hung before its vote: this is no part of what steps take.
    """
    ballot = turn.job.ballot
    took_s = max(0.0, ballot.last_voted_s - max(ballot.began_s, ballot.away_s))
    turn.update(recent_s=(*turn.job.recent_s, took_s)[-REMEMBERED_STEPS:], hung=0)


def heard(turn: Turn, group: Group, message: Heartbeat) -> None:
    """Note what a heartbeat says of a group's training thread."""
    returned = group.away and not message.away
    moved_s = turn.now_s if message.moves or returned else group.moved_s
    stored = turn.put(group, last_heard_s=turn.now_s, away=message.away, moved_s=moved_s)
    if message.away and group.phase is Phase.MEMBER:
        turn.update(ballot=changed(turn.job.ballot, away_s=turn.now_s))
    _computed(turn, stored, message)


def _computed(turn: Turn, group: Group, message: Heartbeat) -> None:
    """Note that a member waits for the others."""
    job = turn.job
    place = job.seats.get(group.name)
    if job.quorum is None or job.frontier is None or place is None:
        return
    if (message.computed_quorum_id, message.computed_step) != (job.quorum.quorum_id, job.frontier.step):
        return
    ballot, bit = job.ballot, 1 << place
    if not ballot.computed & bit:
        ahead_s = turn.now_s if ballot.ahead_s is None else ballot.ahead_s
        turn.update(ballot=changed(ballot, computed=ballot.computed | bit, ahead_s=ahead_s))
        _tell_if_all_have(turn, job.quorum)


def _tell_if_all_have(turn: Turn, quorum: NewQuorum) -> None:
    """The last member has computed: all hear of it, at once and at the same time, so that they fail together.

    A step that is quicker than a heartbeat is over before it comes to this.
    """
    ballot = turn.job.ballot
    if ballot.told or _living(quorum, ballot) & ~(ballot.computed | ballot.ok | ballot.failed):
        return
    turn.update(ballot=changed(ballot, told=True))
    told = AllComputed(quorum.quorum_id, quorum.step if turn.job.frontier is None else turn.job.frontier.step)
    for group in _seated(turn, quorum, _living(quorum, ballot)):
        turn.send(group, told)


def tell_over(turn: Turn, quorum: NewQuorum) -> None:
    """A quorum has ended, and there is no other: let its members wait no longer for those who will not come.

    Their training threads are then free for what else is asked of them.
    """
    assert turn.job.frontier is not None
    told = AllComputed(quorum.quorum_id, turn.job.frontier.step)
    for group in _seated(turn, quorum, (1 << len(quorum.members)) - 1):
        if group.phase is Phase.MEMBER:
            turn.send(group, told)


def late(turn: Turn) -> list[Late]:
    """Return the members that others have waited for too long."""
    job, ballot = turn.job, turn.job.ballot
    if job.quorum is None or job.frontier is None:
        return []
    longest = _unmeasured_s(job)
    patience = patience_s(job) or longest
    living = _living(job.quorum, ballot)
    voted = ballot.ok | ballot.failed
    joiner_s = _waiting_joiner_s(turn)
    computing = living & ~(ballot.computed | voted)
    nobody_ahead_s = None if ballot.computed else joiner_s
    # Who has computed waits for the exchange, which has deadlines of its own; one that is alone waits for nobody.
    # Several that are all behind are in a long step, rather than that all of them hang.
    alone = living.bit_count() == 1
    for_joiner = patience if alone else max(patience, longest)
    waits = (
        (computing, ballot.ahead_s, patience, "computed its shards"),
        (living & ~voted, ballot.voted_s, patience, "voted"),
        (computing, nobody_ahead_s, for_joiner, "computed its shards"),
        (0 if computing else living & ~voted, joiner_s, for_joiner, "voted"),
    )
    for behind, since_s, most_s, lacks in waits:
        if behind and since_s is not None and turn.now_s - since_s > most_s:
            found = [
                one
                for group in _seated(turn, job.quorum, behind)
                if (one := _judged(turn, group, since_s, most_s, lacks)) is not None
            ]
            if found:
                return _spared(turn, found, living.bit_count())
    return []


def waits_for(turn: Turn, late: list[Late]) -> str:
    """For people: who is away though the job cannot go on without; "" if nobody is."""
    needed = [each.group for each in late if each.needed]
    if not needed or turn.job.frontier is None:
        return ""
    return (
        f"step {turn.job.frontier.step} waits for {names_text(needed)}, away from training: outside the step, "
        f"compiling, or saving. The job needs {max(1, turn.job.min_replicas)} groups, and cannot go on without"
    )


def blame(turn: Turn, name: GroupName) -> None:
    """Remember that a group was put out because it disturbed the others."""
    job = turn.job
    count, last_s = job.blamed.get(name, (0, 0.0))
    cleared_s = max(CLEARED_AFTER * job.options.heartbeat_timeout_s, _standing_s(job, CLEARED_WHILE_STANDING))
    cleared = turn.now_s - last_s > cleared_s
    turn.update(blamed={**job.blamed, name: (1 if cleared else count + 1, turn.now_s)})


def held_back(turn: Turn, group: Group) -> bool:
    """Whether it is too early to let a group in again that was put out several times."""
    count, last_s = turn.job.blamed.get(group.name, (0, 0.0))
    if count < 2 or group.phase is Phase.MEMBER:
        return False
    held_s = turn.job.options.heartbeat_timeout_s * min(2.0 ** (count - 2), MOST_HELD_BACK)
    return turn.now_s - last_s < max(held_s, _standing_s(turn.job, HELD_BACK_WHILE_STANDING))


def fresh_ballot(turn: Turn, retries: int = 0) -> Ballot:
    """The ballot of an attempt that begins now."""
    return Ballot(retries=retries, began_s=turn.now_s)


def _judged(turn: Turn, group: Group, since_s: float, most_s: float, lacks: str) -> Late | None:
    """Whether a member that is behind, and waited for since `since_s`, is late; None if it has time left."""
    job, waited_s = turn.job, turn.now_s - since_s
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
    if turn.now_s - max(since_s, group.moved_s) <= most_s:
        return None
    slow_s = slow_step_s(job)
    slow = "" if slow_s is None else f" (of late a slow step took {slow_s:.2f} s)"
    text = (
        f"it hangs: it has not {lacks} of step {job.frontier.step}, and others have waited for it for "
        f"{waited_s:.1f} s{slow}"
    )
    return Late(group, text, away=False, needed=False)


def _is_new(job: Job, group: Group) -> bool:
    """Whether it is in its first step here, which may load and tune what later ones have."""
    quorum, frontier = job.quorum, job.frontier
    if quorum is None or frontier is None or quorum.step != frontier.step:
        return False
    return any(change.group == group.name for change in quorum.joined)


def _spared(turn: Turn, found: list[Late], living: int) -> list[Late]:
    """Those that are away stay where the job cannot go on without them: it would only stand still for longer."""
    away = [each for each in found if each.away]
    if living - len(found) + len(_ready(turn)) >= max(1, turn.job.min_replicas):
        return found
    kept = [Late(each.group, each.reason, away=True, needed=True) for each in away]
    return [*(each for each in found if not each.away), *kept]


def _standing_s(job: Job, patiences: int) -> float:
    """So many times the patience of a job in which somebody was put out since the last commit; else 0."""
    return patiences * (patience_s(job) or _unmeasured_s(job)) if job.hung else 0.0


def _unmeasured_s(job: Job) -> float:
    return UNMEASURED_PATIENCE * job.options.join_timeout_s * _growth(job)


def _growth(job: Job) -> float:
    return 2.0 ** min(job.hung, MOST_DOUBLINGS)


def _waiting_joiner_s(turn: Turn) -> float | None:
    """Since when somebody who could go on without them has waited for members none of whom has voted."""
    if turn.job.frontier is None or turn.job.ballot.ok:
        return None
    ready = [group for group in _ready(turn) if not group.spare]
    return max(turn.job.ballot.began_s, min(group.ready_s for group in ready)) if ready else None


def _ready(turn: Turn) -> list[Group]:
    """Those that stand at the frontier and could take part at once."""
    frontier = turn.job.frontier
    step = None if frontier is None else frontier.step
    return turn.select(lambda group: group.phase is Phase.READY and group.step == step)


def _living(quorum: NewQuorum, ballot: Ballot) -> int:
    return (1 << len(quorum.members)) - 1 & ~ballot.lost


def _seated(turn: Turn, quorum: NewQuorum, mask: int) -> list[Group]:
    members = [member for place, member in enumerate(quorum.members) if mask >> place & 1]
    return [turn.job.groups[member.group] for member in members if member.group in turn.job.groups]
