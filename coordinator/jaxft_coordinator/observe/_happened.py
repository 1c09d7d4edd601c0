"""The events of a job that people see, found by comparing two of its states.

docs/operate-api.md documents them. The comparison is pure. It runs once for each change of a job that the coordinator
announces, and not for votes and heartbeats, of which people see only whether a group is away.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxft_protocol.coordinator.job import Effect, Event, Group, GroupPhase, Job, Send, SessionClosed
from jaxft_protocol.messages import (
    Change,
    Drained,
    Evicted,
    Finished,
    Goodbye,
    GroupName,
    Halted,
    NewQuorum,
    Refused,
)
from jaxft_protocol.names import DRAINED, ENDED, LEFT

# A quorum may have a thousand members: an event lists at most this many names.
MAX_LISTED = 50


@dataclass(frozen=True, slots=True)
class Happened:
    """One event. Empty fields do not appear in its JSON form."""

    event: str
    group: str = ""
    step: int | None = None
    quorum_id: int | None = None
    reason: str = ""
    more: Mapping[str, object] = field(default_factory=dict[str, object])


def happened(
    before: Job | None, after: Job, event: Event | None, effects: Sequence[Effect]
) -> Iterator[Happened]:
    """Yield the events between two states of a job, in an order that reads well."""
    groups = {} if before is None else before.groups
    if after.groups is not groups:
        yield from _departures(groups, after, event, effects)
        yield from _movements(groups, after)
    yield from _of_the_job(before, after)


def _of_the_job(before: Job | None, after: Job) -> Iterator[Happened]:
    step = None if after.frontier is None else int(after.frontier.step)
    was = None if before is None or before.frontier is None else int(before.frontier.step)
    if step is not None and (was is None or step < was):
        yield Happened("job_founded" if step == 0 else "job_resumed", step=step)
    quorum, earlier = after.quorum, None if before is None else before.quorum
    if after.paused != (before is not None and before.paused):
        yield Happened("job_paused" if after.paused else "job_unpaused", step=step)
    if quorum is not None and quorum is not earlier:
        if earlier is not None and was == step and not _ending(after, quorum):
            yield Happened(
                "step_retried", step=step, quorum_id=earlier.quorum_id, reason=_reason(quorum.left)
            )
        yield _quorum(quorum)
    elif quorum is None and earlier is not None:
        yield Happened("quorum_ended", step=step, quorum_id=earlier.quorum_id, reason=_reason(after.left))
    if after.waiting and (before is None or after.waiting != before.waiting):
        yield Happened("job_waiting", step=step, reason=after.waiting)
    halted = after.halted
    if halted is not None and (before is None or halted is not before.halted):
        yield Happened("job_halted", step=step, reason=halted.reason, more={"kind": halted.kind.name.lower()})
    if after.finished is not None and (before is None or before.finished is None):
        yield Happened("job_finished", step=int(after.finished))


def _ending(job: Job, quorum: NewQuorum) -> bool:
    """Return whether a quorum is new only because groups that have finished leave one after the other."""
    finished_here = job.frontier is not None and job.ended == job.frontier.step
    return (
        finished_here and bool(quorum.left) and all(change.reason in (ENDED, LEFT) for change in quorum.left)
    )


def _quorum(quorum: NewQuorum) -> Happened:
    more: dict[str, object] = {"members": len(quorum.members)}
    if quorum.joined:
        more["joined"] = [change.group for change in quorum.joined[:MAX_LISTED]]
    if quorum.left:
        more["left"] = [{"group": each.group, "reason": each.reason} for each in quorum.left[:MAX_LISTED]]
    return Happened("quorum_changed", step=int(quorum.step), quorum_id=int(quorum.quorum_id), more=more)


def _reason(left: Sequence[Change]) -> str:
    return "; ".join(f"{change.group}: {change.reason}" for change in left[:MAX_LISTED])


def _departures(
    groups: Mapping[GroupName, Group], after: Job, event: Event | None, effects: Sequence[Effect]
) -> Iterator[Happened]:
    for name, group in groups.items():
        now = after.groups.get(name)
        if now is None or now.session != group.session:
            what, reason = _why(group, event, effects)
            yield Happened(what, name, step=_step_of(group, after), reason=reason)


def _step_of(group: Group, job: Job) -> int:
    """Return the job's step for a group that heals, takes part or leaves; for others, the step of their state."""
    follows = group.phase in (GroupPhase.HEALING, GroupPhase.MEMBER, GroupPhase.LEAVING)
    return int(job.frontier.step if follows and job.frontier is not None else group.step)


def _why(group: Group, event: Event | None, effects: Sequence[Effect]) -> tuple[str, str]:
    """Return how a group went, and the reason."""
    for effect in effects:
        if isinstance(effect, Send) and effect.session == group.session:
            match effect.message:
                case Evicted(reason, _, aside):
                    return "group_set_aside" if aside else "group_evicted", reason
                case Refused(reason):
                    return "group_refused", reason
                case Halted(reason):
                    return "group_left", f"the job halts: {reason}"
                case Finished() | Goodbye():
                    return "group_left", DRAINED if group.draining else ""
                case Drained():
                    return "group_left", DRAINED
                case _:
                    pass
    if group.phase is GroupPhase.LEAVING:
        return "group_left", DRAINED if group.draining else ""
    if isinstance(event, SessionClosed) and event.session == group.session:
        return "group_lost", event.reason
    return "group_lost", "its connection was replaced"


_MOVES = {
    GroupPhase.STALE: "group_joined",
    GroupPhase.HEALING: "heal_began",
    GroupPhase.READY: "group_ready",
    GroupPhase.LEAVING: "group_leaves",
}


def _movements(groups: Mapping[GroupName, Group], after: Job) -> Iterator[Happened]:
    for name, group in after.groups.items():
        before = groups.get(name)
        if before is not None and before.session != group.session:
            before = None
        if before is group:
            continue
        if before is None:
            more: dict[str, object] = {"incarnation": f"{group.incarnation:016x}", "address": group.address}
            yield Happened("group_present", name, more=more)
        if group.draining and not (before is not None and before.draining):
            yield Happened("group_drains", name, step=_step_of(group, after))
        if before is not None and before.phase is group.phase:
            continue
        if (what := _MOVES.get(group.phase)) is None:
            continue
        if group.phase is GroupPhase.STALE and before is not None and before.phase is not GroupPhase.PRESENT:
            what = "group_stale"  # its heal has failed, or its state is not the job's
        heals = group.phase is GroupPhase.HEALING
        donors = {"donors": [donor for donor, _ in group.donors[:MAX_LISTED]]} if heals else {}
        yield Happened(what, name, step=_step_of(group, after), more=donors)
