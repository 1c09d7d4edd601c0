"""Stop a job for all its groups, if continuing would give a wrong state."""

from dataclasses import replace

from jaxft_protocol.coordinator import digests
from jaxft_protocol.coordinator.draft import Turn
from jaxft_protocol.coordinator.job import Ballot, Close, Group, Halt, Holder
from jaxft_protocol.messages import Halted, HaltKind


def halt(turn: Turn, kind: HaltKind, reason: str) -> None:
    """Stop the job for all its groups. It can resume from a checkpoint, as after the loss of all groups."""
    turn.report(f"halts: {reason}")
    frontier = turn.job.frontier
    held = frozenset[Holder]() if frontier is None else frontier.holders
    halted = Halt(kind, reason, held | {group.holder for group in turn.job.groups.values()})
    for group in turn.select(lambda group: True):
        _stop(turn, group, kind, reason)
    turn.update(quorum=None, ballot=Ballot(), halted=halted)


def diverge(turn: Turn, differing: str) -> None:
    """Halt because there is no majority for one state. From now on the groups' states are not trusted."""
    frontier = turn.job.frontier
    assert frontier is not None
    halt(turn, HaltKind.DIVERGED, f"{_differ_text(turn)} ({differing})")
    # A group whose stream has just ended does not get Halted, and may come back with its state. No group gets it if
    # this coordinator dies before it has sent it. See `stop_late`.
    distrusted = turn.job.distrusted | frontier.holders
    none: frozenset[Holder] = frozenset()
    turn.update(
        proven={},
        distrusted=distrusted,
        frontier=replace(frontier, holders=none, digest=None, disputed=True),
    )


def stop_late(turn: Turn, group: Group) -> bool:
    """Stop a group that took part in the job but missed its halt; return whether it is such a group.

    Otherwise it would wait for groups that have ended, or for a holder of the job's state, and so would groups that
    could bring a checkpoint.
    """
    job = turn.job
    if job.halted is not None and group.holder in job.halted.holders:
        kind, reason = job.halted.kind, job.halted.reason
    elif job.frontier is not None and job.frontier.disputed and group.holder in job.distrusted:
        kind, reason = HaltKind.DIVERGED, _differ_text(turn)  # an earlier coordinator has found this
    else:
        return False
    turn.report(f"notifies {group.name} that the job has halted")
    _stop(turn, group, kind, f"{reason} (found while {group.name!r} was not connected)")
    return True


def no_majority(turn: Turn, candidates: list[Group]) -> None:
    """Halt because the job could start or resume from different states, and none has a majority."""
    step = candidates[0].step
    given = {group.name: group.digest for group in candidates}
    halt(
        turn,
        HaltKind.DIVERGED,
        f"the groups of job {turn.job.name!r} bring different states {step}, and no majority says which is right "
        f"({digests.listed(given)}). Start only the groups whose state you trust; the others heal from them later",
    )


def _stop(turn: Turn, group: Group, kind: HaltKind, reason: str) -> None:
    turn.send(group, Halted(reason, kind))
    turn.effects.append(Close(group.session))
    turn.remove(group)


def _differ_text(turn: Turn) -> str:
    assert turn.job.frontier is not None
    return (
        f"the groups of job {turn.job.name!r} hold different states {turn.job.frontier.step}, and no majority says "
        "which is right"
    )
