"""Counts the rare paths that a turn of the coordinator has taken (`sometimes.py` lists them)."""

from collections import Counter
from typing import TYPE_CHECKING

from jaxft_protocol.coordinator.job import Event, GroupPhase, Job, Tick

if TYPE_CHECKING:
    from .coordinator import Life


def note_rare(life: "Life", before: Job, event: Event) -> None:  # noqa: C901 (a look for each path)
    """Count the rare paths that this turn has taken."""
    after, note = life.job, life.world.sometimes.note
    if after.term > max(before.term, life.term):
        note("term learned")
    if len(after.proven) < len(before.proven) and after.proven:
        note("forgotten")
    if after.quorum is not before.quorum:
        _note_quorum(life, before, event)
    if after.ballot.announced and not before.ballot.announced:
        note("all computed")
    if after.blamed is not before.blamed and type(event) is Tick and before.quorum is not None:
        if before.ballot.deadline_s is None:
            note("evicted by progress")
    if type(event) is Tick:
        if after.frontier is not None and after.quorum is None and after.groups:
            note("below min_replicas")
        for name, (times, _) in after.blamed.items():
            if times > 1 and name in after.groups and after.groups[name].phase is GroupPhase.READY:
                note("held back")
    if len(after.distrusted) > len(before.distrusted) and not life.world.halted:
        note("odd one out")


def _note_quorum(life: "Life", before: Job, event: Event) -> None:
    after, note = life.job, life.world.sometimes.note
    quorum, old = after.quorum, before.quorum
    spares = life.world.setting.spares
    if quorum is None:
        return
    frontier = after.frontier
    again = old is not None and old.step == quorum.step and before.frontier is frontier
    failures = before.ballot.failures
    if again and any(failure.accused for failure in failures):
        note("retry after accusations")
        blames = Counter((failure.voter, name) for failure in failures for name in failure.accused)
        if any((name, voter) in blames for voter, name in blames) and after.blamed is not before.blamed:
            note("mutual accusation")
    if again and type(event) is Tick and before.ballot.deadline_s is not None:
        note("grace ended by a tick")
    if any(member.group in spares for member in quorum.members):
        note("spare called up")
    for group in after.groups.values():
        was = before.groups.get(group.name)
        if (
            group.spare
            and was is not None
            and was.phase is GroupPhase.MEMBER
            and group.phase is GroupPhase.READY
        ):
            note("spare relieved")
        if (
            group.phase is GroupPhase.MEMBER
            and was is not None
            and was.phase is GroupPhase.READY
            and frontier is not None
            and group.step < frontier.step
        ):
            note("nearly there")
