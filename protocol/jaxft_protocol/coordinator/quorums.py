"""Form quorums and count votes.

The rule for counting (`settle`), where "living" members are those not lost since the quorum was formed:

* all living members voted ok -> COMMIT. Each of them holds the complete sum, so it does not matter if a member died
  after sending its contribution to all others.
* ... but their states differ -> the members that differ from the majority are evicted, and the step is retried
  without their contributions, so their error does not spread. Without a majority the job halts, because there is no
  way to tell which state is right.
* ... but there are fewer of them than `min_replicas`, because a group raised an exception and the others only try the
  step (`raising.py`) -> no COMMIT: the job waits for enough groups.
* ... but the means are not finite, and the job's policy is to stop then -> the job halts with nothing applied. All
  members compute this from the same bits, so one such vote is enough, also from a member that was lost.
* a member is lost, and no vote is ok yet -> the step is retried at once under a new quorum. In a job of a hundred
  groups or more, it is retried after some milliseconds, in which related losses are collected.
* a member is lost after an ok vote, or a vote failed -> the exchange is almost done: wait for the other votes, for at
  most `vote_grace_s`. They may still allow a COMMIT, or identify the faulty member.
* all living members have voted -> the step is retried.
* the grace period is over -> members that have computed, are accused, and have not voted are evicted, and the step is
  retried.
* the same members have already failed the same step once -> the most accused member is evicted (if two accuse each
  other, the member whose name sorts last; a member that accuses others, none of whom accuse it, has only closed its
  connections). So a dead link between two healthy groups evicts one group and does not stop the job.

Only a tick ends the grace period, and only if the tick before it also found it over: if the coordinator itself was
suspended, the votes that arrived meanwhile are counted first.
"""

from collections import Counter
from collections.abc import Mapping

from jaxft_protocol.coordinator import assign, digests, draining, founding, halting, progress
from jaxft_protocol.coordinator.draft import Draft, as_member, names_text
from jaxft_protocol.coordinator.job import Ballot, FailedVote, Frontier, Group, GroupPhase, Holder, Job
from jaxft_protocol.messages import (
    Change,
    Commit,
    FrontierMoved,
    GroupName,
    HaltKind,
    NewQuorum,
    QuorumId,
    Step,
    Vote,
)
from jaxft_protocol.names import ANY_MESHES, MESHES, gone_text, listed, natural_key
from jaxft_protocol.values import changed

# How often the same members may retry the same step before a member is evicted.
RETRIES_WITH_SAME_MEMBERS = 1

MAX_REASON_LENGTH = 300


def form(draft: Draft) -> None:
    """Form a quorum if there is none and enough groups are at the frontier."""
    job = draft.job
    if job.frontier is None or job.quorum is not None or job.finished is not None or job.paused:
        return
    members = _candidates(draft)
    enough = len(members) >= max(1, job.min_replicas)
    if not (enough or _may_try(draft, members)) or founding.reunites(draft):
        return
    draft.update(ballot=progress.fresh_ballot(draft))
    _install(draft, members, again=True, announce=True)


def _may_try(draft: Draft, members: list[Group]) -> bool:
    """Return whether too few members can show if the exception of another group comes in them too (`raising.py`).

    With fixed shards only: otherwise each group computes its own.
    """
    job = draft.job
    if not job.raised or job.tried or job.total_shards is None:
        return False
    last = list(job.raised)[-1]
    return any(member.name != last for member in members)


def is_trial(job: Job) -> bool:
    """Return whether the current quorum may never commit."""
    return job.quorum is not None and len(job.quorum.members) < job.min_replicas


def _end_trial(draft: Draft, quorum: NewQuorum) -> None:
    """All members could do the step. It waits for enough groups, which may then keep their work."""
    draft.update(quorum=None, tried=True)
    progress.tell_over(draft, quorum)


def explain(draft: Draft) -> None:
    """Tell all groups why the job is waiting, if it is."""
    job = draft.job
    if not job.groups or job.quorum is not None or job.finished is not None:
        return
    if job.frontier is not None:
        draft.wait_for(_paused_text(job) if job.paused else _quorum_text(draft, _candidates(draft)))
    elif job.first_join_s is not None:
        joined, compiling = draft.select(founding.has_joined), draft.select(founding.compiles)
        newer = bool(joined) and founding.newer_may_come(draft, joined)
        holding = founding.hold_committed(draft)
        draft.wait_for(_founding_text(joined, compiling, holding, job.min_replicas, newer=newer))


def vote(draft: Draft, group: Group, vote: Vote) -> None:
    job = draft.job
    if job.quorum is None or job.frontier is None:
        return
    if (vote.quorum_id, vote.step) != (job.quorum.quorum_id, job.frontier.step):
        return  # a vote on an attempt that is over
    # `computed` does not matter for counting: see progress.py.
    bit = _bit(draft, group.name)
    if not bit or bit & (job.ballot.lost | job.ballot.ok | job.ballot.failed):
        return  # not a member, or it has already voted
    if vote.ok:
        known = job.ballot.digests
        given = known if vote.digest is None else {**known, group.name: vote.digest}
        edits = {**job.ballot.edits, group.name: vote.edit} if vote.edit else job.ballot.edits
        ahead_s = draft.now_s if job.ballot.ahead_s is None else job.ballot.ahead_s
        voted_s = draft.now_s if job.ballot.voted_s is None else job.ballot.voted_s
        nonfinite = job.ballot.nonfinite or vote.nonfinite[:MAX_REASON_LENGTH]
        ballot = changed(
            job.ballot,
            ok=job.ballot.ok | bit,
            digests=given,
            edits=edits,
            nonfinite=nonfinite,
            ahead_s=ahead_s,
            voted_s=voted_s,
            last_voted_s=draft.now_s,
        )
        draft.update(ballot=ballot)
    else:
        failure = FailedVote(group.name, vote.accused, vote.reason[:MAX_REASON_LENGTH])
        failures = (*job.ballot.failures, failure)
        draft.update(ballot=changed(job.ballot, failed=job.ballot.failed | bit, failures=failures))
        draft.log(f"{group.name} failed step {vote.step}: {failure.reason}")
    settle(draft)


def lose(draft: Draft, *names: GroupName) -> None:
    """Mark the members among `names` as lost from the current quorum, and act on it."""
    mark_lost(draft, *names)
    settle(draft)


def mark_lost(draft: Draft, *names: GroupName) -> None:
    """Like `lose`, but act on it only at the next vote, loss or tick."""
    if draft.job.quorum is None:
        return
    lost = draft.job.ballot.lost
    for name in names:
        lost |= _bit(draft, name)
    draft.update(ballot=changed(draft.job.ballot, lost=lost))


def settle(draft: Draft) -> None:
    """Act on the votes and losses so far."""
    quorum, ballot = draft.job.quorum, draft.job.ballot
    if quorum is None:
        return
    living = _living(quorum, ballot)
    if living and ballot.ok & living == living:
        _compare(draft, quorum)
    elif not ballot.lost and not ballot.failed:
        pass
    elif not _silent(quorum, ballot):
        retry(draft, quorum, silent=0)
    elif ballot.lost and not ballot.ok:
        if _has_gathered(draft, quorum):
            retry(draft, quorum, silent=0)
    elif ballot.deadline_s is None:
        draft.update(ballot=changed(ballot, deadline_s=draft.now_s + draft.job.options.vote_grace_s))


def _has_gathered(draft: Draft, quorum: NewQuorum) -> bool:
    """Return whether related losses have been collected: a rack that loses power is a hundred losses in a row."""
    ballot = draft.job.ballot
    wait_s = draft.job.options.gather_s(len(quorum.members))
    if not wait_s:
        return True
    if ballot.gather_until_s is None:
        draft.update(ballot=changed(ballot, gather_until_s=draft.now_s + wait_s))
        return False
    return draft.now_s >= ballot.gather_until_s


def end_gathering(draft: Draft) -> None:
    """Retry the step if the time to wait for further lost members is over."""
    until_s = draft.job.ballot.gather_until_s
    if until_s is not None and draft.now_s >= until_s:
        settle(draft)


def _compare(draft: Draft, quorum: NewQuorum) -> None:
    """All living members hold the sum: commit it if all contributions with a known digest are from the same state."""
    given = draft.job.ballot.digests
    odd = digests.odd_ones(given)
    unknown = _without_fingerprint(draft, quorum)
    if odd is None:
        halting.diverge(draft, digests.listed(given))
    elif odd or unknown:
        retry(draft, quorum, silent=0, odd=(*odd, *unknown))
    elif draft.job.ballot.edits and not _edited_alike(draft, quorum):
        pass  # only now: an edit depends on the state, and a corrupt one must not be blamed on the program
    elif draft.job.ballot.nonfinite:
        _stop_at_nonfinite(draft)
    elif is_trial(draft.job):
        _end_trial(draft, quorum)
    else:
        commit(draft, quorum)


def _edited_alike(draft: Draft, quorum: NewQuorum) -> bool:
    """Return whether all voters have made the same edit of the state, or none has; act on it if not.

    An edit is the whole job's. A group that edits otherwise than the majority runs another program or loop. It would
    do so again after a heal, so it may not return.
    """
    ballot, job = draft.job.ballot, draft.job
    made = {name: ballot.edits.get(name, 0) for name in _voters(quorum, ballot)}
    odd = digests.odd_ones(made)
    if odd == ():
        return True
    assert job.frontier is not None
    editors = listed([name for name, edit in made.items() if edit])
    others = listed([name for name, edit in made.items() if not edit])
    how = (
        f"not edited by {others}"
        if others
        else f"and the edits have different digests, {digests.listed(made)}"
    )
    reason = (
        f"the groups did not make the same edit of state {job.frontier.step} of job {job.name!r}: edited by "
        f"{editors}; {how}. Whether a group calls `step.edit` at a step, and what its function "
        "does, may depend only on the number of the step and on the state"
    )
    if odd is None:
        halting.halt(draft, HaltKind.FAILED, reason)
        return False
    for name in odd:
        if (group := job.groups.get(name)) is not None:  # it may have left since it voted
            draft.expel(group, reason, may_return=False)
    mark_lost(draft, *odd)
    retry(draft, quorum, silent=0)
    return False


def _voters(quorum: NewQuorum, ballot: Ballot) -> list[GroupName]:
    """The members that voted ok."""
    return [member.group for position, member in enumerate(quorum.members) if ballot.ok >> position & 1]


def _without_fingerprint(draft: Draft, quorum: NewQuorum) -> tuple[GroupName, ...]:
    """Return the voters that sent no digest in the first step of a quorum, if others did."""
    ballot, frontier = draft.job.ballot, draft.job.frontier
    if not ballot.digests or frontier is None or quorum.step != frontier.step:
        return ()
    return tuple(name for name in _voters(quorum, ballot) if name not in ballot.digests)


def _stop_at_nonfinite(draft: Draft) -> None:
    """Halt without committing the step. Its members still hold the frontier, from which the job may resume."""
    job = draft.job
    assert job.frontier is not None
    reason = (
        f"the means of step {job.frontier.step} of job {job.name!r} are not finite: {job.ballot.nonfinite}"
    )
    halting.halt(draft, HaltKind.NONFINITE, reason)


def end_grace(draft: Draft, last_tick_s: float) -> None:
    """Stop waiting for votes that were already overdue at `last_tick_s`."""
    quorum, ballot = draft.job.quorum, draft.job.ballot
    if quorum is not None and ballot.deadline_s is not None and last_tick_s >= ballot.deadline_s:
        retry(draft, quorum, silent=_silent(quorum, ballot))


def commit(draft: Draft, quorum: NewQuorum) -> None:
    """Commit the step: advance the frontier, tell the members, and admit groups that are ready."""
    frontier = draft.job.frontier
    assert frontier is not None
    ballot = draft.job.ballot
    living = [draft.job.groups[m.group] for i, m in enumerate(quorum.members) if not ballot.lost >> i & 1]
    held = frozenset(group.holder for group in living)
    frontier = Frontier(Step(frontier.step + 1), quorum.quorum_id, None, held)
    progress.measure(draft)
    tried = draft.job.raised
    fresh = progress.fresh_ballot(draft)
    draft.update(frontier=frontier, ballot=fresh, raised={}, tried=False)
    for group in living:
        draft.release_heal(group)  # a member since this step: donors no longer need to keep anything for it
    for group in draft.job.groups.values():
        waits = group.phase is GroupPhase.PRESENT and group.name in tried
        if waits or group.phase in (GroupPhase.HEALING, GroupPhase.READY, GroupPhase.STALE):
            draft.send(group, FrontierMoved(frontier.step))
    # A ready group without a donor cannot fetch the sum of this step.
    alone = draft.select(lambda group: group.phase is GroupPhase.READY and group.heal_id is None)
    draft.put_all(alone, phase=GroupPhase.STALE)
    draining.step_down(draft)
    members = _candidates(draft)
    staying = {group.name for group in members}
    following = ended = None
    goes_on = len(members) >= max(1, draft.job.min_replicas) and not draft.job.paused
    # If a lost member is already back, the members are the same, but it must learn that it is a member.
    if goes_on and (ballot.lost or _differs(draft, quorum, members)):
        following = _install(draft, members, again=False, announce=False)
    elif not goes_on:
        draft.update(quorum=None)
        ended = quorum
    step = Step(frontier.step - 1)
    message, last = Commit(quorum.quorum_id, step, following), Commit(quorum.quorum_id, step)
    draining.tell_before(draft, living)
    for group in living:
        draft.send(group, message if group.name in staying else last)
    draining.tell_after(draft, living)
    if ended is not None:
        progress.tell_over(draft, ended)
    if following is not None:
        _tell_newcomers(draft, following, living, members)


def _tell_newcomers(draft: Draft, following: NewQuorum, living: list[Group], members: list[Group]) -> None:
    informed = {group.name for group in living}
    for group in members:
        if group.name not in informed:
            draft.send(group, following)


def retry(draft: Draft, quorum: NewQuorum, silent: int, odd: tuple[GroupName, ...] = ()) -> None:
    """Retry the step under a new quorum, without the members that must be evicted.

    Bit i of `silent` is set for a living member that has not voted. The `odd` members hold another state than the
    majority.
    """
    ballot = draft.job.ballot
    failures = ballot.failures
    accused = Counter(name for failure in failures for name in dict.fromkeys(failure.accused))
    # A member that still computes has not started its exchange; progress.py decides whether it hangs.
    mute = silent & ballot.computed
    out = [m.group for i, m in enumerate(quorum.members) if mute >> i & 1 and accused[m.group]]
    retries = 0 if out or odd or ballot.lost else ballot.retries + 1
    if retries > RETRIES_WITH_SAME_MEMBERS:
        out = [_most_accused(quorum, failures, accused)]
        retries = 0
    draft.update(quorum=None)
    for name in out:
        group = draft.job.groups.get(name)
        if group is not None:  # it may be gone already
            draft.expel(group, _why(name, failures), may_return=True)
            progress.blame(draft, name)
    for member in quorum.members:
        if member.group in odd:
            put_out_odd(draft, (member.group, member.incarnation), ballot.digests)
    assert draft.job.frontier is not None
    members = _candidates(draft)
    if len(members) < max(1, draft.job.min_replicas):
        progress.tell_over(draft, quorum)
        return  # `form` continues when there are enough
    draft.update(ballot=progress.fresh_ballot(draft, retries))
    _install(draft, members, again=True, announce=True)


def put_out_odd(draft: Draft, holder: Holder, given: Mapping[GroupName, int]) -> None:
    """Evict a group whose state is not the majority's, and distrust its state and the states of joiners it fed."""
    draft.distrust(*holder)
    group = draft.job.groups.get(holder[0])
    if group is not None and group.holder == holder:  # it may have left since it sent its digest
        reason = f"its state is not the majority's: {digests.listed(given)}"
        if (draft.job.settings or {}).get(MESHES) == ANY_MESHES:
            reason += "; different meshes may be the cause (docs/meshes.md)"
        if group.name not in given:
            reason = "it sent no digest of its state in the first step of a quorum, where all are compared"
        draft.expel(group, reason, may_return=True)


def _install(draft: Draft, members: list[Group], *, again: bool, announce: bool) -> NewQuorum:
    """Make a quorum of `members` the current one; `again` if its first step may have been tried before."""
    job = draft.job
    assert job.frontier is not None
    total = job.total_shards
    names = [group.name for group in members]
    weights = _weights(members)
    left = {change.group: change for change in job.left if change.group in job.positions}
    if total is None:
        shards = {name: (position,) for position, name in enumerate(names)}
        total = len(names)
    elif again and any(name in job.held for name in names):
        shards = assign.after_loss(total, weights, {str(name): value for name, value in job.held.items()})
    else:
        shards = assign.at_boundary(total, weights)
    quorum = NewQuorum(
        QuorumId(job.last_quorum_id + 1),
        job.frontier.step,
        total,
        tuple(as_member(group, shards[group.name]) for group in members),
        joined=tuple(Change(name) for name in names if name not in job.positions or name in left),
        left=tuple(left.values()),
        history=job.history,
    )
    _relieve(draft, quorum)
    draft.put_all(members, phase=GroupPhase.MEMBER)
    positions = {name: position for position, name in enumerate(names)}
    held = {member.group: member.shards for member in quorum.members}
    places = max(job.places, sum(not group.spare for group in members))
    draft.update(
        quorum=quorum,
        positions=positions,
        held=held,
        places=places,
        last_quorum_id=quorum.quorum_id,
        left=job.left
        if len(members) < job.min_replicas
        else (),  # after a trial the job still waits for them
        restored_s=None,
        halted=None,
    )
    draft.wait_for("")
    trial = " (too few to commit; do they fail too?)" if is_trial(draft.job) else ""
    draft.log(f"{_quorum_line(quorum)}{trial}")
    if announce:
        for group in members:
            draft.send(group, quorum)
    return quorum


def _relieve(draft: Draft, quorum: NewQuorum) -> None:
    """Make spares that are no longer needed stand by; `sessions.plan_following` lets them follow."""
    frontier = draft.job.frontier
    assert frontier is not None
    staying = {member.group for member in quorum.members}
    for group in draft.select(lambda group: is_member(group) and group.name not in staying):
        group = draft.release_heal(group)
        if group.holder in frontier.holders:
            # It holds the job's state, even if it joined with a fresh one: if all others die, the job can resume.
            # The digest that it joined with is an older state's.
            digest = group.digest if group.step == frontier.step else None
            draft.put(
                group, phase=GroupPhase.READY, step=frontier.step, history=draft.job.history, digest=digest
            )
        else:
            draft.put(group, phase=GroupPhase.STALE)


def is_member(group: Group) -> bool:
    return group.phase is GroupPhase.MEMBER


def _candidates(draft: Draft) -> list[Group]:
    """Return the next quorum: members, joiners that have caught up, and spares in place of missing groups.

    A joiner that lacks only the sum of the last step counts too, because it can fetch that once its donors have it.
    """
    frontier = draft.job.frontier
    assert frontier is not None
    if all(group.phase is GroupPhase.MEMBER and not group.spare for group in draft.job.groups.values()):
        return draft.select(is_member)  # fast path: same result without joiners or spares
    standing = draft.select(
        lambda group: is_member(group) or (group.phase is GroupPhase.READY and group.step >= frontier.step)
    )
    if not standing:
        return []  # without a donor, no group can fetch that sum
    nearly = draft.select(
        lambda group: (
            group.phase is GroupPhase.READY and group.heal_id is not None and group.step == frontier.step - 1
        )
    )
    able = [*standing, *nearly]
    admitted = [group for group in able if not progress.held_back(draft, group)]
    if len(admitted) >= max(1, draft.job.min_replicas):
        able = admitted
    regular = [group for group in able if not group.spare]
    wanted = max(1, draft.job.places, draft.job.min_replicas)
    # A spare that is a member already goes before the others.
    spares = sorted((group for group in able if group.spare), key=lambda group: not is_member(group))
    chosen = [*regular, *spares[: max(0, wanted - len(regular))]]
    return sorted(chosen, key=lambda group: natural_key(group.name))


def _differs(draft: Draft, quorum: NewQuorum, members: list[Group]) -> bool:
    """Return whether the quorum must change: other members, or shards not assigned as at a boundary."""
    if [(m.group, m.incarnation) for m in quorum.members] != [group.holder for group in members]:
        return True
    total = draft.job.total_shards
    if total is None:
        return False
    dealt = assign.at_boundary(total, _weights(members))
    return any(member.shards != dealt[member.group] for member in quorum.members)


def _weights(members: list[Group]) -> dict[str, int]:
    return {group.name: group.weight for group in members}


def _living(quorum: NewQuorum, ballot: Ballot) -> int:
    return (1 << len(quorum.members)) - 1 & ~ballot.lost


def _silent(quorum: NewQuorum, ballot: Ballot) -> int:
    """Return the living members that have not voted."""
    return _living(quorum, ballot) & ~(ballot.ok | ballot.failed)


def _bit(draft: Draft, name: GroupName) -> int:
    position = draft.job.positions.get(name)
    return 0 if position is None else 1 << position


def _most_accused(
    quorum: NewQuorum, failures: tuple[FailedVote, ...], accused: Counter[GroupName]
) -> GroupName:
    """Return the member to evict when the same members keep failing; without any accusation, a failed voter.

    A member closes its connections when it fails, and is accused by those who only see that. So a member that
    accuses others, none of whom accuse it, has passed a failure on: it is evicted only if there is no other.
    """
    accuses = {failure.voter: failure.accused for failure in failures}
    blamed = [member.group for member in quorum.members if accused[member.group]]
    first = [
        name
        for name in blamed
        if not accuses.get(name) or any(name in accuses.get(other, ()) for other in accuses[name])
    ]
    return max(
        first or blamed or [failure.voter for failure in failures],
        key=lambda name: (accused[name], natural_key(name)),
    )


def _why(name: GroupName, failures: tuple[FailedVote, ...]) -> str:
    accusers = [failure for failure in failures if name in failure.accused]
    if not accusers:
        return "its exchange keeps failing"
    return listed([f"{failure.voter} says: {failure.reason}" for failure in accusers], "; ")


def _quorum_line(quorum: NewQuorum) -> str:
    members = listed([member.group for member in quorum.members])
    gone = listed([gone_text(change.group, change.reason) for change in quorum.left], "; ")
    came = listed([change.group for change in quorum.joined])
    details = "".join([f"; {gone}" if gone else "", f"; joined {came}" if came else ""])
    return f"quorum {quorum.quorum_id} from step {quorum.step}: {members}{details}"


def _founding_text(
    joined: list[Group], compiling: list[Group], holding: list[Group], min_replicas: int, *, newer: bool
) -> str:
    still = f"; present but not ready yet: {names_text(compiling)}" if compiling else ""
    others = "; waiting a moment for groups that may bring a newer state" if newer else ""
    held = "; ".join(
        f"{group.name} holds step {group.step} of a run that must not be lost" for group in holding
    )
    count = f"{len(joined)} of at least {min_replicas}" if len(joined) < min_replicas else str(len(joined))
    have = "group has" if count == "1" else "groups have"
    return f"{count} {have} joined ({names_text(joined)}){still}{others}{held and '; ' + held}"


def _quorum_text(draft: Draft, members: list[Group]) -> str:
    job = draft.job
    assert job.frontier is not None
    held = {group.name for group in members}
    others = draft.select(lambda group: group.name not in held and group.phase is not GroupPhase.LEAVING)
    coming = (
        listed([f"{group.name} ({group.phase.value})" for group in others]) or "no other group is present"
    )
    wanted = max(1, job.min_replicas)
    lost = listed([f"{change.group} ({change.reason})" for change in job.left])
    gone = f"; lost: {lost}" if lost else ""
    return (
        f"step {job.frontier.step} needs {wanted} groups that hold it, and {len(members)} do "
        f"({names_text(members)}); {coming}{gone}{_orphaned_text(draft)}{_reunion_text(draft)}"
    )


def _paused_text(job: Job) -> str:
    assert job.frontier is not None
    return f"an operator has paused the job before step {job.frontier.step}; resume the job to continue"


def _reunion_text(draft: Draft) -> str:
    if not founding.reunites(draft):
        return ""
    return "; the coordinator has just restarted, and waits a moment for earlier members to come back"


def _orphaned_text(draft: Draft) -> str:
    job = draft.job
    if job.orphaned_s is None:
        return ""
    candidates = draft.select(lambda group: founding.has_joined(group) and group.history == job.history != 0)
    if candidates:
        how = f"waits a moment for one, then resumes from the newest state of {names_text(candidates)}"
    else:
        how = "resumes when a group brings a checkpoint of it"
    return f"; no group is left that holds the job's state: the job {how}"
