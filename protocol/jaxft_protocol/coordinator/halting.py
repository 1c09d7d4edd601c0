"""Stopping a job for all its groups, where going on would make a false state."""

from dataclasses import replace

from jaxft_protocol.coordinator import digests
from jaxft_protocol.coordinator.draft import Turn
from jaxft_protocol.coordinator.job import Ballot, Close, Group, Halt, Holder
from jaxft_protocol.messages import Halted, HaltKind


def halt(turn: Turn, kind: HaltKind, reason: str) -> None:
    """Stop the job for all its groups. It can resume from a checkpoint, as after the loss of all of them."""
    turn.report(f"halts: {reason}")
    frontier = turn.job.frontier
    held = frozenset[Holder]() if frontier is None else frontier.holders
    halted = Halt(kind, reason, held | {group.holder for group in turn.job.groups.values()})
    for group in turn.select(lambda group: True):
        _stop(turn, group, kind, reason)
    turn.update(quorum=None, ballot=Ballot(), halted=halted)


def diverge(turn: Turn, differing: str) -> None:
    """Halt because no majority says whose state is right: what the groups hold counts for nothing from here on."""
    frontier = turn.job.frontier
    assert frontier is not None
    halt(turn, HaltKind.DIVERGED, f"{_differ_text(turn)} ({differing})")
    # One whose stream broke just now has not heard of it, and may come back with what it holds; nor has anybody, if
    # this coordinator dies before it tells them. See `stop_late`.
    distrusted = turn.job.distrusted | frontier.holders
    none: frozenset[Holder] = frozenset()
    turn.update(
        proven={},
        distrusted=distrusted,
        frontier=replace(frontier, holders=none, digest=None, disputed=True),
    )


def stop_late(turn: Turn, group: Group) -> bool:
    """Stop a group that took part in a job that has halted, and has not heard of it; return whether it is one.

    Else it would wait for others, who have ended, or for somebody who holds the job's state, and all who could bring
    a checkpoint as well.
    """
    job = turn.job
    if job.halted is not None and group.holder in job.halted.holders:
        kind, reason = job.halted.kind, job.halted.reason
    elif job.frontier is not None and job.frontier.disputed and group.holder in job.distrusted:
        kind, reason = HaltKind.DIVERGED, _differ_text(turn)  # which a coordinator before this one has found
    else:
        return False
    turn.report(f"{group.name} is told that the job has halted")
    _stop(turn, group, kind, f"{reason} (found while {group.name!r} was not connected)")
    return True


def no_majority(turn: Turn, candidates: list[Group]) -> None:
    """Halt because the states from which the job could begin or resume differ, and no majority is for one of them."""
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
