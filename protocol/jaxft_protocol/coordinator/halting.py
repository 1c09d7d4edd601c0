"""Stop a job for all its groups, if continuing would give a wrong state."""

from dataclasses import replace

from jaxft_protocol.coordinator import digests
from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Ballot, Close, Group, Halt, Holder
from jaxft_protocol.messages import Halted, HaltKind


def halt(draft: Draft, kind: HaltKind, reason: str) -> None:
    """Stop the job for all its groups. It can resume from a checkpoint, as after the loss of all groups."""
    draft.log(f"halts: {reason}")
    frontier = draft.job.frontier
    held = frozenset[Holder]() if frontier is None else frontier.holders
    halted = Halt(kind, reason, held | {group.holder for group in draft.job.groups.values()})
    for group in draft.select(lambda _: True):
        _stop(draft, group, kind, reason)
    draft.update(quorum=None, ballot=Ballot(), halted=halted)


def diverge(draft: Draft, differing: str) -> None:
    """Halt because there is no majority for one state. From now on the groups' states are not trusted."""
    frontier = draft.job.frontier
    assert frontier is not None
    halt(draft, HaltKind.DIVERGED, f"{_differ_text(draft)} ({differing})")
    # A group whose stream has just ended does not get Halted, and may come back with its state. No group gets it if
    # this coordinator dies before it has sent it. See `stop_late`.
    distrusted = draft.job.distrusted | frontier.holders
    none: frozenset[Holder] = frozenset()
    draft.update(
        proven={},
        distrusted=distrusted,
        frontier=replace(frontier, holders=none, digest=None, disputed=True),
    )


def stop_late(draft: Draft, group: Group) -> bool:
    """Stop a group that took part in the job but missed its halt; return whether it is such a group.

    Otherwise it would wait for groups that have ended, or for a holder of the job's state, and so would groups that
    could bring a checkpoint.
    """
    job = draft.job
    if job.halted is not None and group.holder in job.halted.holders:
        kind, reason = job.halted.kind, job.halted.reason
    elif job.frontier is not None and job.frontier.disputed and group.holder in job.distrusted:
        kind, reason = HaltKind.DIVERGED, _differ_text(draft)  # an earlier coordinator has found this
    else:
        return False
    draft.log(f"notifies {group.name} that the job has halted")
    _stop(draft, group, kind, f"{reason} (found while {group.name!r} was not connected)")
    return True


def no_majority(draft: Draft, candidates: list[Group]) -> None:
    """Halt because the job could start or resume from different states, and none has a majority."""
    step = candidates[0].step
    given = {group.name: group.digest for group in candidates}
    halt(
        draft,
        HaltKind.DIVERGED,
        f"the groups of job {draft.job.name!r} bring different states {step}, and no majority shows which is right "
        f"({digests.listed(given)}). Start only the groups whose state you trust; the others heal from them later",
    )


def _stop(draft: Draft, group: Group, kind: HaltKind, reason: str) -> None:
    draft.send(group, Halted(reason, kind))
    draft.effects.append(Close(group.session))
    draft.remove(group)


def _differ_text(draft: Draft) -> str:
    assert draft.job.frontier is not None
    return (
        f"the groups of job {draft.job.name!r} hold different states {draft.job.frontier.step}, and no majority "
        "shows which is right"
    )
