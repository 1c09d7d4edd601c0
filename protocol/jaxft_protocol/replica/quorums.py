"""Quorums, votes and commits."""

from jaxft_protocol.messages import NewQuorum, QuorumId, Step, Vote
from jaxft_protocol.names import LEFT, done_again, gone_text
from jaxft_protocol.replica import sessions
from jaxft_protocol.replica.draft import Turn
from jaxft_protocol.replica.state import Phase


def new_quorum(turn: Turn, quorum: NewQuorum) -> None:
    replica = turn.replica
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
        return  # it takes part once it holds the state
    turn.enter(Phase.WORKING, vote=None)


def cast(turn: Turn, vote: Vote) -> None:
    turn.enter(Phase.VOTED, vote=vote)
    turn.say(vote)


def raised(turn: Turn, number: Step, reason: str, shard: int | None) -> None:
    """Leave the quorum, also if it has replaced that of the attempt: the training thread is no longer in the step."""
    quorum = turn.replica.quorum
    assert quorum is not None
    cast(turn, Vote(quorum.quorum_id, number, ok=False, reason=reason, raised=True, shard=shard))


def commit(turn: Turn, following: NewQuorum | None) -> None:
    turn.enter(Phase.APPLYING, commit_heard=True)
    if following is not None:
        new_quorum(turn, following)


def applied(turn: Turn, number: Step) -> None:
    replica = turn.replica
    history = replica.job_history or replica.history
    turn.update(step=number, digest=None, digest_taken=False, vote=None, commit_heard=False, history=history)
    if replica.phase is not Phase.APPLYING:
        return
    # Other groups have replaced this spare with this step. If it is a member again, that may be from a later step on.
    lacks_more = replica.quorum is None or replica.quorum.step > number
    if replica.joined and lacks_more and replica.heal is not None:
        turn.enter(Phase.FOLLOWING)
    elif replica.joined:
        turn.enter(Phase.WORKING)
    else:
        sessions.join_or_wait(turn)


def _resume_line(frontier: Step, resumed: Step) -> str:
    return (
        f"the job resumes at step {resumed}: all groups that held step {frontier} are gone; "
        f"{done_again(frontier - resumed)}"
    )


def _quorum_line(before: QuorumId, quorum: NewQuorum, *, retried: bool) -> str:
    left = "; ".join(gone_text(change.group, change.reason) for change in quorum.left)
    joined = ", ".join(change.group for change in quorum.joined)
    what = "; ".join(text for text in (left, f"joined {joined}" if joined else "") if text)
    names = ", ".join(member.group for member in quorum.members)
    # At the end of a run, groups leave one after the other, and nothing failed.
    ending = bool(quorum.left) and all(change.reason == LEFT for change in quorum.left)
    again = "goes on with" if ending else "retries"
    then = f"{again} step {quorum.step}" if retried else f"from step {quorum.step}"
    return f"quorum {before} -> {quorum.quorum_id}: {what or 'shards reassigned'}; now {names}; {then}"
