"""The settings of a job: all its groups have the same.

The first group to join brings them, unless a group comes with a committed state, and the present groups have only
fresh states, or older states of the same history. As after a restart of a coordinator that has forgotten the job: a
group with a changed program, started over and over by a supervisor, may be quicker than the groups that train. These
would be refused, and the job's state would be lost. For the same reason a group that trains does not give way to a
group that has only restored a checkpoint.
"""

from jaxft_protocol.coordinator import founding
from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Group, Job
from jaxft_protocol.messages import Difference, Join
from jaxft_protocol.names import one_line, shards_text


def differences(job: Job, message: Join) -> tuple[Difference, ...]:
    """Return the settings in which a group differs from the job."""
    if job.settings is None:
        return ()
    ours = {**job.settings, **_said_of(job.min_replicas, job.total_shards)}
    asked = message.min_replicas or job.min_replicas
    theirs = {**message.settings, **_said_of(asked, message.total_shards)}
    return tuple(
        Difference(name, ours.get(name, "-"), theirs.get(name, "-"))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )


def overrules(draft: Draft, message: Join) -> bool:
    """Return whether a group brings a committed state, and the others fresh ones, or older ones of its history."""
    if not (message.step and message.history):
        return False
    if draft.job.frontier is not None:
        return founding.gives_way_to(draft, message)
    committed = draft.select(lambda group: founding.has_joined(group) and bool(group.step and group.history))
    return all(_gives_way(group, message) for group in committed)


def _gives_way(group: Group, message: Join) -> bool:
    """Return whether a group has an older state of a comer's history.

    A group that trains may not have heard yet of the commit after which another has saved a checkpoint.
    """
    if group.members and not message.members:
        return False  # it trains, and the other has only restored
    return group.history == message.history and group.step < message.step


def give_way(draft: Draft, differing: tuple[Difference, ...]) -> None:
    """Refuse the groups that have joined, because one with other settings brings a committed or newer state."""
    if draft.job.frontier is not None:
        founding.give_way(draft)
    swapped = tuple(Difference(each.name, each.group, each.job) for each in differing)
    for group in draft.select(founding.has_joined):
        reason = (
            f"{reason_of(draft.job, group, swapped)}, as another group has it, which brings a newer state"
        )
        draft.refuse(group, reason, swapped)
    founding.forget_settings(draft)


def reason_of(job: Job, group: Group, differing: tuple[Difference, ...]) -> str:
    """Name the settings in which a group differs from the job."""
    names = one_line(", ".join(difference.name for difference in differing))
    return f"group {group.name!r} differs from job {job.name!r} in: {names}"


def _said_of(min_replicas: int, total_shards: int | None) -> dict[str, str]:
    """Return typed values as text, to compare and show them like settings."""
    return {"min_replicas": str(min_replicas), "shards": shards_text(total_shards)}
