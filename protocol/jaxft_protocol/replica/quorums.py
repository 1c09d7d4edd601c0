"""Quorums, votes and commits."""

from jaxft_protocol.messages import NewQuorum, QuorumId, Step, Vote
from jaxft_protocol.names import ENDED, LEFT, done_again, gone_text, listed
from jaxft_protocol.replica import sessions
from jaxft_protocol.replica.draft import Draft
from jaxft_protocol.replica.state import Phase


def new_quorum(draft: Draft, quorum: NewQuorum) -> None:
    replica = draft.replica
    before = replica.last_quorum_id
    if replica.frontier_step is not None and quorum.step < replica.frontier_step:
        draft.log(_resume_line(replica.frontier_step, quorum.step), warning=True)
    draft.update(
        quorum=quorum,
        last_quorum_id=quorum.quorum_id,
        last_members=len(quorum.members),
        frontier_step=quorum.step,
        job_history=quorum.history,
        paused=False,
    )
    in_step = replica.phase in (Phase.WORKING, Phase.VOTED) and not replica.paused
    draft.log(_quorum_line(before, quorum, retried=in_step))
    if replica.phase is Phase.APPLYING or quorum.step > replica.step:
        return  # it takes part once it holds the state
    draft.enter(Phase.WORKING, vote=None)


def cast(draft: Draft, vote: Vote) -> None:
    draft.enter(Phase.VOTED, vote=vote)
    draft.send(vote)


def raised(draft: Draft, number: Step, reason: str, shard: int | None) -> None:
    """Leave the quorum, also if it has replaced the attempt's: the training thread is no longer in the step."""
    quorum = draft.replica.quorum
    assert quorum is not None
    cast(draft, Vote(quorum.quorum_id, number, ok=False, reason=reason, raised=True, shard=shard))


def commit(draft: Draft, following: NewQuorum | None) -> None:
    draft.enter(Phase.APPLYING, commit_heard=True)
    if following is not None:
        new_quorum(draft, following)


def applied(draft: Draft, number: Step) -> None:
    replica = draft.replica
    history = replica.job_history or replica.history
    draft.update(step=number, digest=None, digest_taken=False, vote=None, commit_heard=False, history=history)
    if replica.phase is not Phase.APPLYING:
        return
    if replica.drained:
        draft.enter(Phase.DRAINED)
        return
    # Other groups took this spare's place when this step was committed. If a newer quorum has it again, that quorum
    # may begin at a later step.
    lacks_more = replica.quorum is None or replica.quorum.step > number
    if replica.joined and lacks_more and replica.heal is not None:
        draft.enter(Phase.FOLLOWING if replica.heal.log_only else Phase.HEALING)
    elif replica.joined:
        draft.enter(Phase.WORKING)
    else:
        sessions.join_or_wait(draft)


def _resume_line(frontier: Step, resumed: Step) -> str:
    return (
        f"the job resumes at step {resumed}: all groups that held step {frontier} are gone; "
        f"{done_again(frontier - resumed)}"
    )


def _quorum_line(before: QuorumId, quorum: NewQuorum, *, retried: bool) -> str:
    left = listed([gone_text(change.group, change.reason) for change in quorum.left], "; ")
    joined = listed([change.group for change in quorum.joined])
    what = "; ".join(text for text in (left, f"joined {joined}" if joined else "") if text)
    names = listed([member.group for member in quorum.members])
    # At the end of a run, groups leave one after the other, and nothing failed.
    ending = bool(quorum.left) and all(change.reason in (ENDED, LEFT) for change in quorum.left)
    again = "goes on with" if ending else "retries"
    then = f"{again} step {quorum.step}" if retried else f"from step {quorum.step}"
    return f"quorum {before} -> {quorum.quorum_id}: {what or 'shards reassigned'}; now {names}; {then}"
