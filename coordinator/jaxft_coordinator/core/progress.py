"""Telling who hangs from who waits: a heartbeat shows that a process lives, not that its training moves.

A member says with its heartbeat when it has computed its shards of the attempt; from then on it waits for its peers.
Once somebody has waited for longer than the job's *patience*, the members that are behind are evicted: those that
have not computed while others have, or have not voted while others hold the whole sum. If no member is ahead, a group
that stands ready to take part counts as one that waits: it holds the frontier, and can go on alone.

Patience derives from what was measured: so many times the slowest step of late. Until this coordinator has measured a
step it is very long. The exchange has deadlines of its own, and its failures name the one that does not come; but a
group that hangs between the exchange and its vote is found out by nothing else.

Where steps suddenly take many times longer than ever before, those who are put out did not hang, nor will those who
take their places be quicker. So each time that somebody is put out without a commit since the last, patience doubles:
in the end a step is waited for, counts, and is measured.

A group that was put out again and again, because its peers accused it or because it hung, is let in again later each
time, so that one bad link costs the job little of its speed.
"""

from jaxft_coordinator.core.job import Ballot, Group, Job, Phase, changed
from jaxft_coordinator.core.messages import GroupName, Heartbeat, NewQuorum
from jaxft_coordinator.core.turn import Turn

STEPS_OF_PATIENCE = 8
# Of the heartbeat timeout: no step is so fast that a hiccup of this length is a fault.
LEAST_PATIENCE = 2
# How often patience doubles at most: 1024 times eight steps are longer than anybody can wait.
MOST_DOUBLINGS = 10
# Of `join_timeout_s`, while no step has been measured: a first step may load, compile and tune what later ones have.
UNMEASURED_PATIENCE = 10
# The slowest step fades by half in about a thousand: an evaluation now and then stays in memory.
FADING = 0.9993
# In units of the heartbeat timeout: the longest time that a group is held back, and the quiet that clears its name.
MOST_HELD_BACK = 12
CLEARED_AFTER = 24


def patience_s(job: Job) -> float | None:
    """How long one may wait for others, or None while no step has been measured."""
    if job.slowest_s is None:
        return None
    measured_s = max(LEAST_PATIENCE * job.options.heartbeat_timeout_s, STEPS_OF_PATIENCE * job.slowest_s)
    return measured_s * _growth(job)


def measure(turn: Turn) -> None:
    """A step counts: note how long its last attempt took."""
    job = turn.job
    took_s = turn.now_s - job.ballot.began_s
    turn.update(slowest_s=max(took_s, FADING * (job.slowest_s or 0.0)), hung=0)


def computed(turn: Turn, group: Group, message: Heartbeat) -> None:
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


def hung(turn: Turn) -> list[tuple[Group, str]]:
    """Return the members that others have waited for in vain, each with the reason in words."""
    job, ballot = turn.job, turn.job.ballot
    if job.quorum is None or job.frontier is None:
        return []
    longest = UNMEASURED_PATIENCE * job.options.join_timeout_s * _growth(job)
    patience = patience_s(job) or longest
    living = (1 << len(job.quorum.members)) - 1 & ~ballot.lost
    voted = ballot.ok | ballot.failed
    joiner_s = _waiting_joiner_s(turn)
    nobody_ahead_s = None if ballot.computed else joiner_s
    # Who has computed waits for the exchange, which has deadlines of its own; one that is alone waits for nobody.
    alone = living.bit_count() == 1
    waits = (
        (living & ~(ballot.computed | voted), ballot.ahead_s, patience, "computed its shards"),
        (living & ~voted, ballot.voted_s, patience, "voted"),
        (living & ~(ballot.computed | voted), nobody_ahead_s, patience, "computed its shards"),
        (living & ~voted, joiner_s, patience if alone else max(patience, longest), "voted"),
    )
    for behind, since_s, most_s, lacks in waits:
        if behind and since_s is not None and turn.now_s - since_s > most_s:
            slowest = (
                "" if job.slowest_s is None else f" (the slowest step of late took {job.slowest_s:.2f} s)"
            )
            text = (
                f"it hangs: it has not {lacks} of step {job.frontier.step}, and others have waited for it for "
                f"{turn.now_s - since_s:.1f} s{slowest}"
            )
            return [(group, text) for group in _seated(turn, job.quorum, behind)]
    return []


def blame(turn: Turn, name: GroupName) -> None:
    """Remember that a group was put out because it disturbed the others."""
    job = turn.job
    count, last_s = job.blamed.get(name, (0, 0.0))
    cleared = turn.now_s - last_s > CLEARED_AFTER * job.options.heartbeat_timeout_s
    turn.update(blamed={**job.blamed, name: (1 if cleared else count + 1, turn.now_s)})


def held_back(turn: Turn, group: Group) -> bool:
    """Whether it is too early to let a group in again that was put out several times."""
    count, last_s = turn.job.blamed.get(group.name, (0, 0.0))
    if count < 2 or group.phase is Phase.MEMBER:
        return False
    timeout_s = turn.job.options.heartbeat_timeout_s
    return turn.now_s - last_s < timeout_s * min(2.0 ** (count - 2), MOST_HELD_BACK)


def fresh_ballot(turn: Turn, retries: int = 0) -> Ballot:
    """The ballot of an attempt that begins now."""
    return Ballot(retries=retries, began_s=turn.now_s)


def _growth(job: Job) -> float:
    return 2.0 ** min(job.hung, MOST_DOUBLINGS)


def _waiting_joiner_s(turn: Turn) -> float | None:
    """Since when somebody who could go on without them has waited for members none of whom has voted."""
    job = turn.job
    if job.frontier is None or job.ballot.ok:
        return None
    step = job.frontier.step
    ready = turn.select(lambda group: group.phase is Phase.READY and group.step == step and not group.spare)
    return max(job.ballot.began_s, min(group.ready_s for group in ready)) if ready else None


def _seated(turn: Turn, quorum: NewQuorum, mask: int) -> list[Group]:
    members = [member for place, member in enumerate(quorum.members) if mask >> place & 1]
    return [turn.job.groups[member.group] for member in members if member.group in turn.job.groups]
