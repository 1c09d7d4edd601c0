"""Founding a job, forming quorums, counting votes.

The rule for counting (`settle`), with "living" = members of the quorum not lost since it was formed:

* every living member voted ok  -> COMMIT. Each of them holds the complete sum, so it does not matter that a
  member died after its contribution had reached everyone.
* a member is lost and nobody has voted ok yet -> the step is tried again at once under a new quorum.
* a member is lost or a vote failed, and somebody has voted ok -> the exchange is in its last milliseconds:
  wait for the other votes, at most `vote_grace_s`, for they may still make a COMMIT.
* all living members have voted, or the grace is over -> those who are accused and silent are evicted, and the
  step is tried again. If the same members have failed the same step once already, the most accused goes
  (of two that accuse each other: the later by name), so that a dead link between two healthy groups costs one
  of them its place and not the job its progress.
"""

from collections import Counter
from dataclasses import replace

from jaxft_coordinator.core import assign
from jaxft_coordinator.core.job import Ballot, Failure, Frontier, Group, Phase
from jaxft_coordinator.core.messages import (
    Change,
    Commit,
    FrontierMoved,
    GroupName,
    NewQuorum,
    QuorumId,
    Step,
    Vote,
)
from jaxft_coordinator.core.names import natural_key
from jaxft_coordinator.core.turn import Turn, as_member

# How often the same members may fail the same step before one of them must go.
RETRIES_WITH_SAME_MEMBERS = 1


def found(turn: Turn) -> None:
    """Choose the job's first state: the highest step, then the lowest name; all who hold it are founders."""
    job = turn.job
    if job.frontier is not None or job.first_join_s is None:
        return
    joined = turn.select(lambda group: group.phase is Phase.STALE)
    compiling = turn.select(lambda group: group.phase is Phase.PRESENT)
    timed_out = turn.now_s - job.first_join_s >= job.options.join_timeout_s
    if not joined or len(joined) < job.min_replicas or (compiling and not timed_out):
        turn.wait_for(_founding_text(joined, compiling, job.min_replicas))
        return
    truth = min(joined, key=lambda group: (-group.step, natural_key(group.name)))
    founders = [group for group in joined if group is truth or (group.step, group.digest) == _state(truth)]
    turn.update(
        frontier=Frontier(
            truth.step, QuorumId(0), truth.digest, frozenset(group.holder for group in founders)
        )
    )
    for group in founders:
        turn.put(group, phase=Phase.MEMBER)
    turn.report(f"founded at step {truth.step} by {_names(founders)}")


def form(turn: Turn) -> None:
    """Form a quorum where there is none and enough groups stand at the frontier."""
    job = turn.job
    if job.frontier is None or job.quorum is not None or job.finished is not None:
        return
    members = _candidates(turn, job.frontier.step)
    if len(members) < max(1, job.min_replicas):
        if job.groups:
            turn.wait_for(_quorum_text(turn, members))
        return
    turn.update(ballot=Ballot())
    _install(turn, members, again=True, announce=True)


def vote(turn: Turn, group: Group, vote: Vote) -> None:
    job = turn.job
    if job.quorum is None or job.frontier is None:
        return
    if (vote.quorum_id, vote.step) != (job.quorum.quorum_id, job.frontier.step):
        return  # a vote on an attempt that is over
    bit = _bit(turn, group.name)
    if not bit or bit & job.ballot.lost:
        return
    if vote.ok:
        turn.update(ballot=replace(job.ballot, ok=job.ballot.ok | bit))
    elif group.name not in {failure.voter for failure in job.ballot.failures}:
        failure = Failure(group.name, vote.accused, vote.reason)
        turn.update(ballot=replace(job.ballot, failures=(*job.ballot.failures, failure)))
        turn.report(f"{group.name} failed step {vote.step}: {vote.reason}")
    settle(turn)


def lose(turn: Turn, name: GroupName) -> None:
    """A member is gone from the quorum in force."""
    job = turn.job
    if job.quorum is None:
        return
    bit = _bit(turn, name)
    if not bit or bit & job.ballot.lost:
        return
    turn.update(ballot=replace(job.ballot, lost=job.ballot.lost | bit, ok=job.ballot.ok & ~bit))
    settle(turn)


def settle(turn: Turn) -> None:
    quorum, ballot = turn.job.quorum, turn.job.ballot
    if quorum is None:
        return
    everyone = (1 << len(quorum.members)) - 1
    living = everyone & ~ballot.lost
    if living and ballot.ok == living:
        commit(turn, quorum)
        return
    if not ballot.lost and not ballot.failures:
        return
    voted = ballot.ok
    for failure in ballot.failures:
        voted |= _bit(turn, failure.voter)
    if (not ballot.ok and not ballot.failures) or voted & living == living:
        retry(turn, quorum, silent=0)
        return
    if ballot.deadline_s is None:
        turn.update(ballot=replace(ballot, deadline_s=turn.now_s + turn.job.options.vote_grace_s))
        return
    if turn.now_s >= ballot.deadline_s:
        retry(turn, quorum, silent=living & ~voted)


def commit(turn: Turn, quorum: NewQuorum) -> None:
    """The step counts: move the frontier, tell the members, let those in who are ready."""
    frontier = turn.job.frontier
    assert frontier is not None
    ballot = turn.job.ballot
    living = [turn.job.groups[m.group] for i, m in enumerate(quorum.members) if not ballot.lost >> i & 1]
    held = frozenset(group.holder for group in living)
    frontier = Frontier(Step(frontier.step + 1), quorum.quorum_id, "", held)
    turn.update(frontier=frontier, ballot=Ballot())
    for group in living:
        turn.release_heal(group)  # it has come in with this commit: nobody needs to keep anything for it
    for group in turn.job.groups.values():
        if group.phase in (Phase.HEALING, Phase.READY, Phase.STALE):
            turn.send(group, FrontierMoved(frontier.step))
    # A joiner that lacks only the sum of this very step has it as soon as its donors have.
    members = _candidates(turn, Step(frontier.step - 1))
    following = None
    if len(members) >= turn.job.min_replicas and _differs(turn, quorum, members):
        following = _install(turn, members, again=False, announce=False)
    elif len(members) < turn.job.min_replicas:
        turn.update(quorum=None)
    message = Commit(quorum.quorum_id, Step(frontier.step - 1), following)
    for group in living:
        turn.send(group, message)
    if following is None:
        return
    for group in members:
        if group.holder not in held:
            turn.send(group, following)


def retry(turn: Turn, quorum: NewQuorum, silent: int) -> None:
    """Try the step again under a new quorum, without those who must go.

    Bit i of `silent` is set for a living member that has not voted.
    """
    ballot = turn.job.ballot
    failures = ballot.failures
    accused = Counter(name for failure in failures for name in failure.accused)
    out = [m.group for i, m in enumerate(quorum.members) if silent >> i & 1 and accused[m.group]]
    retries = 0 if out or ballot.lost else ballot.retries + 1
    if retries > RETRIES_WITH_SAME_MEMBERS:
        out = [_most_accused(quorum, failures, accused)]
        retries = 0
    turn.update(quorum=None)
    for name in out:
        group = turn.job.groups.get(name)
        if group is not None:  # it may have died meanwhile
            turn.expel(group, _why(name, failures), may_return=True)
    assert turn.job.frontier is not None
    members = _candidates(turn, turn.job.frontier.step)
    if len(members) < max(1, turn.job.min_replicas):
        return  # `form` goes on when there are enough
    turn.update(ballot=Ballot(retries=retries))
    _install(turn, members, again=True, announce=True)


def _install(turn: Turn, members: list[Group], *, again: bool, announce: bool) -> NewQuorum:
    """Put a quorum of `members` in force; `again` if its first step may have been tried before."""
    job = turn.job
    assert job.frontier is not None
    total = job.total_shards
    names = [group.name for group in members]
    if total is None:
        shards = {name: (position,) for position, name in enumerate(names)}
        total = len(names)
    elif again and job.held:
        shards = assign.after_loss(total, names, {str(name): value for name, value in job.held.items()})
    else:
        shards = assign.at_boundary(total, names)
    quorum = NewQuorum(
        QuorumId(job.last_quorum_id + 1),
        job.frontier.step,
        total,
        tuple(as_member(group, shards[group.name]) for group in members),
        joined=tuple(Change(name) for name in names if name not in job.seats),
        left=job.left,
    )
    for group in members:
        turn.put(turn.job.groups[group.name], phase=Phase.MEMBER)
    seats = {name: position for position, name in enumerate(names)}
    held = {member.group: member.shards for member in quorum.members}
    turn.update(quorum=quorum, seats=seats, held=held, last_quorum_id=quorum.quorum_id, left=())
    turn.wait_for("")
    turn.report(_quorum_line(quorum))
    if announce:
        for group in members:
            turn.send(group, quorum)
    return quorum


def _candidates(turn: Turn, ready_from: Step) -> list[Group]:
    """Members, and joiners that have caught up to state `ready_from`."""
    return turn.select(
        lambda group: group.phase is Phase.MEMBER or (group.phase is Phase.READY and group.step >= ready_from)
    )


def _differs(turn: Turn, quorum: NewQuorum, members: list[Group]) -> bool:
    """Whether the next quorum must be another: other members, or shards not dealt as at a boundary."""
    if tuple(member.group for member in quorum.members) != tuple(group.name for group in members):
        return True
    total = turn.job.total_shards
    if total is None:
        return False
    dealt = assign.at_boundary(total, [group.name for group in members])
    return any(member.shards != dealt[member.group] for member in quorum.members)


def _bit(turn: Turn, name: GroupName) -> int:
    position = turn.job.seats.get(name)
    return 0 if position is None else 1 << position


def _most_accused(quorum: NewQuorum, failures: tuple[Failure, ...], accused: Counter[GroupName]) -> GroupName:
    """Who goes when the same members keep failing; without any accusation, a failed voter."""
    names = [member.group for member in quorum.members]
    blamed = [name for name in names if accused[name]] or [failure.voter for failure in failures]
    return max(blamed, key=lambda name: (accused[name], natural_key(name)))


def _why(name: GroupName, failures: tuple[Failure, ...]) -> str:
    accusers = [failure for failure in failures if name in failure.accused]
    if not accusers:
        return "its exchange keeps failing"
    return "; ".join(f"{failure.voter} says: {failure.reason}" for failure in accusers)


def _state(group: Group) -> tuple[Step, str]:
    """What founders must share; a group that computed no digest shares its state with nobody."""
    return (group.step, group.digest or f"unknown state of {group.name}")


def _names(groups: list[Group]) -> str:
    return ", ".join(group.name for group in groups) or "nobody"


def _quorum_line(quorum: NewQuorum) -> str:
    members = ", ".join(member.group for member in quorum.members)
    gone = "; ".join(f"lost {change.group} ({change.reason})" for change in quorum.left)
    came = ", ".join(change.group for change in quorum.joined)
    details = "".join([f"; {gone}" if gone else "", f"; joined {came}" if came else ""])
    return f"quorum {quorum.quorum_id} from step {quorum.step}: {members}{details}"


def _founding_text(joined: list[Group], compiling: list[Group], min_replicas: int) -> str:
    still = f"; present but not ready yet: {_names(compiling)}" if compiling else ""
    return f"{len(joined)} of at least {max(1, min_replicas)} groups have joined ({_names(joined)}){still}"


def _quorum_text(turn: Turn, members: list[Group]) -> str:
    job = turn.job
    assert job.frontier is not None
    others = turn.select(lambda group: group not in members and group.phase is not Phase.LEAVING)
    coming = ", ".join(f"{group.name} ({group.phase.value})" for group in others) or "nobody else is present"
    wanted = max(1, job.min_replicas)
    lost = ", ".join(f"{change.group} ({change.reason})" for change in job.left)
    gone = f"; lost: {lost}" if lost else ""
    return (
        f"step {job.frontier.step} needs {wanted} groups that hold it, and {len(members)} do "
        f"({_names(members)}); {coming}{gone}"
    )
