"""Exceptions of the user's code in a step: whose failure is it?

A group whose code raises leaves the quorum at once, and the others try the step without it: they compute its shards.

* If they commit the step, the failure was the group's: its disk, its memory, its user who pressed Ctrl-C. It gets
  FrontierMoved, and its user the exception.
* If the exception comes in one group after the other until none is left, the failure is the data's or the program's,
  and the job halts once, with the step, the shard and the text.

A group alone is not halted: its user has the exception, and its next call of the step tries again.

If fewer than `min_replicas` groups are left, they still try, in a quorum that never commits: a *trial*. Otherwise
the job would wait for the group that raised, and raise again with it. Either the trial fails in the next group, or
all its members vote, and the job waits as usual for the group whose own failure it was.
"""

from collections.abc import Mapping

from jaxft_protocol.coordinator import halting, quorums
from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Group, GroupPhase, Raise
from jaxft_protocol.messages import GroupName, HaltKind, Step, Vote
from jaxft_protocol.names import MAX_LISTED, listed

# The texts of this many groups are kept; more than two prove nothing new.
MAX_KEPT = MAX_LISTED


def raised(draft: Draft, group: Group, vote: Vote) -> None:
    """Go on without `group`, or halt if no other group can compute the step.

    The vote may be for a quorum that has been replaced for the same step: the group is out of the step all the same.
    """
    job = draft.job
    if job.frontier is None or vote.step != job.frontier.step or not quorums.is_member(group):
        return
    failure = Raise(vote.shard, vote.reason[: quorums.MAX_REASON_LENGTH])
    if group.name in job.raised or len(job.raised) < MAX_KEPT:
        others = {name: other for name, other in job.raised.items() if name != group.name}
        draft.update(raised={**others, group.name: failure}, tried=False)
    if len(draft.job.raised) > 1 and not _may_compute(draft, group):
        halting.halt(draft, HaltKind.RAISED, _halt_text(draft, vote.step))
        return
    draft.expel(
        group, f"its code raised {failure.text} ({_where(failure, vote.step)})", may_return=True, aside=True
    )
    quorums.lose(draft, group.name)


def _may_compute(draft: Draft, group: Group) -> bool:
    """Return whether another group can try the step now."""
    able = (GroupPhase.MEMBER, GroupPhase.READY)
    return any(other.phase in able for other in draft.job.groups.values() if other.name != group.name)


def _where(failure: Raise, step: Step) -> str:
    return f"step {step}" if failure.shard is None else f"step {step}, shard {failure.shard}"


def _halt_text(draft: Draft, step: Step) -> str:
    known = draft.job.raised
    shards = {failure.shard for failure in known.values()}
    what = (
        f"shard {shards.pop()} of step {step}" if len(shards) == 1 and None not in shards else f"step {step}"
    )
    return f"{what} of job {draft.job.name!r} fails in every group: {_texts(known)}"


def _texts(known: Mapping[GroupName, Raise]) -> str:
    """The same text is listed once, with the groups that reported it."""
    by_text: dict[str, list[str]] = {}
    for name, failure in known.items():
        by_text.setdefault(failure.text, []).append(name)
    return listed([f"{', '.join(names)}: {text}" for text, names in by_text.items()], "; ")
