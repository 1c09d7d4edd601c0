"""The part of a job that must survive the coordinator, as records. A change is durable before it is announced.

Groups remember the states they hold. The coordinator must remember who holds the frontier, which incarnations are
proven, and which quorum ids were used. Sessions, phases, heals and votes are not recorded: after a restart the groups
reconnect and report where they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxft_protocol.coordinator.job import (
    Forgotten,
    Frontier,
    Holder,
    Job,
    Moved,
    Options,
    Record,
    Saved,
)
from jaxft_protocol.messages import NewQuorum
from jaxft_protocol.values import changed

# Heal ids are never reused in another life of the coordinator: a joiner identifies its heals by them.
HEALS_PER_LIFE_BITS = 32


def record_of(before: Job, after: Job) -> Record | None:
    """Return the record of a turn, or None if nothing durable has changed."""
    if after.empty:
        if not after.last_quorum_id:
            return None if before.empty else Forgotten(after.name)
        ids = saved(emptied(after))
        return None if before.empty and ids == saved(emptied(before)) else ids
    if _is_untouched(before, after):
        return None  # fast path: same result
    now = saved(after)
    then = saved(before)
    if now == then:
        return None
    frontier, quorum = after.frontier, after.quorum
    if frontier is None or quorum is None or before.frontier is None:
        return now
    moved = Moved(after.name, frontier.step, frontier.quorum_id)
    return moved if fold({after.name: then}, moved)[after.name] == now else now


def _is_untouched(before: Job, after: Job) -> bool:
    """Return whether nothing that `saved` takes from a job has been replaced."""
    return (
        after.frontier is before.frontier
        and after.quorum is before.quorum
        and after.proven is before.proven
        and after.held is before.held
        and after.distrusted is before.distrusted
        and after.settings is before.settings
        and after.last_quorum_id == before.last_quorum_id
        and after.history == before.history
        and after.places == before.places
        and after.finished == before.finished
        and after.idle_since == before.idle_since
        and after.min_replicas == before.min_replicas
        and after.total_shards == before.total_shards
        and after.paused == before.paused
        and after.drains == before.drains
    )


def saved(job: Job) -> Saved:
    """Return everything durable about `job`."""
    return Saved(
        job.name,
        job.last_quorum_id,
        job.settings,
        job.min_replicas,
        job.history,
        job.frontier,
        job.proven,
        job.distrusted,
        _holders(job.quorum),
        job.held,
        job.places,
        job.finished,
        job.idle_since,
        job.total_shards,
        job.paused,
        job.drains,
    )


def emptied(job: Job) -> Job:
    """Return the job that replaces an empty one: the next groups found it again, maybe with other settings.

    Ids keep growing. A group that lost its connection may still hold its vote in a quorum of the first founding, and
    must not mistake the commit of a later quorum for its own. It must also learn that the job has halted.
    """
    return Job(
        job.name,
        job.options,
        last_quorum_id=job.last_quorum_id,
        last_heal_id=job.last_heal_id,
        term=job.term,
        outdone_s=job.outdone_s,
        halted=job.halted,
        idle_since=job.idle_since,
        drains=job.drains,
    )


def new(name: str, options: Options) -> Job:
    """Return a job about which nothing is known."""
    return Job(name, options, last_heal_id=options.heals_from)


def begun_again(job: Job, now_s: float) -> Job:
    """Return the job as after a restart of the coordinator: no group is connected.

    This coordinator still knows which ids it has used.
    """
    known = restored(saved(job), job.options, now_s)
    return changed(known, last_heal_id=job.last_heal_id, term=job.term)


def may_forget(job: Job, unix_s: int, after_s: float) -> bool:
    """Return whether a job can be forgotten: it is idle, and has finished or never committed anything."""
    if job.groups or job.idle_since is None or unix_s - job.idle_since < after_s:
        return False
    return job.finished is not None or _holds_nothing(job)


def first_to_forget(jobs: Iterable[Job]) -> Job | None:
    """Return the job to forget first, if a coordinator has to forget one; None if all are in use.

    A job that never committed anything goes before a finished one, and a finished one before an abandoned one; among
    equals, the job that has been idle longest.
    """
    idle = [job for job in jobs if not job.groups and (job.idle_since is not None or job.empty)]
    return min(
        idle,
        key=lambda job: (not _holds_nothing(job), job.finished is None, job.idle_since or 0),
        default=None,
    )


def _holds_nothing(job: Job) -> bool:
    return job.frontier is None or job.frontier.fresh


def fold(known: Mapping[str, Saved], record: Record) -> dict[str, Saved]:
    """Return the known jobs after one more record.

    Raises:
        ValueError: a record moves the frontier of a job that has none.
    """
    match record:
        case Saved(name):
            return {**known, name: record}
        case Forgotten(name):
            return {other: value for other, value in known.items() if other != name}
        case Moved(name, step, quorum_id):
            before = known.get(name)
            if before is None or before.frontier is None:
                raise ValueError(f"job {name!r} moves to step {step}, but nothing is known of it")
            frontier = Frontier(step, quorum_id, None, frozenset(before.members))
            return {**known, name: replace(before, frontier=frontier)}


def restored(record: Saved, options: Options, now_s: float) -> Job:
    """Return the job as a coordinator restores it from `record`. No group is connected yet."""
    return Job(
        record.job,
        options,
        settings=record.settings,
        total_shards=record.total_shards,
        min_replicas=record.min_replicas,
        history=record.history,
        frontier=record.frontier,
        proven=record.proven,
        distrusted=record.distrusted,
        held=record.held,
        places=record.places,
        last_quorum_id=record.last_quorum_id,
        last_heal_id=options.heals_from,
        finished=record.finished,
        restored_s=now_s,
        idle_since=record.idle_since,
        paused=record.paused,
        drains=record.drains,
    )


def _holders(quorum: NewQuorum | None) -> tuple[Holder, ...]:
    return () if quorum is None else tuple((m.group, m.incarnation) for m in quorum.members)
