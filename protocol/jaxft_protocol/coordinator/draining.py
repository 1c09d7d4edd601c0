"""Drains and pauses of groups and jobs take effect at a step boundary, so that no step is retried.

A drain is asked for by the group, whose process got SIGTERM, or by an operator. The group takes part in the step that
is under way. The commit of that step leaves it out of the next quorum: a spare takes its place, or the others divide
its shards. It is then LEAVING, still a donor, and gets `Drained`; `Leave` follows when its training thread has ended,
and `Goodbye` when no joiner needs it any more. A group that is in no step goes at once. A drain is always obeyed,
also if fewer than `min_replicas` groups remain: the machine of the group is about to go anyway. It is recorded, so it
outlives the group's stream and the coordinator: a drained group that comes back is drained again at once.

A pause ends the quorum at the same place. Its members get `Paused` before the commit, so that they do not begin the
next step under it, and keep their states. Groups still heal, stand by, are drained, and die meanwhile.
"""

from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Close, Group, GroupPhase
from jaxft_protocol.messages import Drained, GroupName, Paused
from jaxft_protocol.names import DRAINED

# Remembered drains of groups that may come back; a newer process of a group counts as another.
MAX_REMEMBERED = 100
# It holds no state that another group could need from it.
_GOES_AT_ONCE = (GroupPhase.PRESENT, GroupPhase.STALE, GroupPhase.HEALING)


def ask(draft: Draft, name: GroupName, reason: str) -> None:
    """Drain a group. The second time changes nothing."""
    group = draft.job.groups.get(name)
    if group is None or group.draining or group.phase is GroupPhase.LEAVING:
        return
    draft.log(f"drains {name}: {reason}")
    draft.put(group, draining=True)
    others = (holder for holder in draft.job.drains if holder[0] != name)
    draft.update(drains=(*others, group.holder)[-MAX_REMEMBERED:])


def release(draft: Draft) -> None:
    """Let drained groups go that are in no step."""
    if not any(group.draining for group in draft.job.groups.values()):
        return
    for group in draft.select(lambda group: group.draining and group.phase is not GroupPhase.LEAVING):
        if group.phase is GroupPhase.MEMBER and draft.job.quorum is not None:
            continue  # at the boundary
        if group.phase not in _GOES_AT_ONCE:
            _step_down(draft, group)
        elif not _may_hold_frontier(draft, group):
            draft.send(group, Drained())
            draft.effects.append(Close(group.session))
            draft.forget(group, DRAINED)


def step_down(draft: Draft) -> None:
    """At a boundary: take all drained members out of the job. Their `Drained` must follow the commit."""
    for group in draft.select(lambda group: group.draining and group.phase is GroupPhase.MEMBER):
        _leave_quorum(draft, group)


def tell_before(draft: Draft, members: list[Group]) -> None:
    """Before the commit is sent to `members`: if the job is paused, tell them, so that none begins the next step."""
    if draft.job.paused:
        for member in members:
            if not member.draining:
                draft.send(member, Paused())


def tell_after(draft: Draft, members: list[Group]) -> None:
    """After the commit was sent to `members`: tell the drained members."""
    for member in members:
        if member.draining:
            draft.send(member, Drained())


def pause(draft: Draft, *, paused: bool) -> None:
    if draft.job.paused == paused:
        return
    # If the job has other reasons to wait, the next tick reports them; without groups no group receives them.
    draft.update(paused=paused, waiting=draft.job.waiting if paused else "")
    draft.log("pauses after the current step, as an operator asks" if paused else "is resumed by an operator")


def _may_hold_frontier(draft: Draft, group: Group) -> bool:
    """Return whether a group that has just come back may hold the frontier: it joins first, and can donate then."""
    frontier = draft.job.frontier
    return group.phase is GroupPhase.PRESENT and frontier is not None and group.holder in frontier.holders


def _step_down(draft: Draft, group: Group) -> None:
    _leave_quorum(draft, group)
    draft.send(group, Drained())


def _leave_quorum(draft: Draft, group: Group) -> None:
    if group.phase is GroupPhase.MEMBER:
        draft.note_left(group.name, DRAINED)
    draft.put(draft.release_heal(group), phase=GroupPhase.LEAVING)
