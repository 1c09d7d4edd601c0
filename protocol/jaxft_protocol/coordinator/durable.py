"""What of a job must survive the coordinator, as records: each says what has changed, and is durable before anybody
hears of it.

Groups remember what they hold; what the coordinator must not forget is who holds the truth: the frontier and its
holders, which incarnations are proven, which quorum ids were given out. Sessions, phases, heals and votes are not
remembered: after a restart the groups dial anew and say where they stand.
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

# Heal ids of one life of the coordinator are never those of another: a joiner tells its heals apart by them.
HEALS_PER_LIFE_BITS = 32


def record_of(before: Job, after: Job) -> Record | None:
    """Return what must be written down of a turn, or None if nothing that must be remembered has changed."""
    if after.empty:
        if not after.last_quorum_id:
            return None if before.empty else Forgotten(after.name)
        ids = saved(anew(after))
        return None if before.empty and ids == saved(anew(before)) else ids
    now = saved(after)
    then = saved(before)
    if now == then:
        return None
    frontier, quorum = after.frontier, after.quorum
    if frontier is None or quorum is None or before.frontier is None:
        return now
    moved = Moved(after.name, frontier.step, frontier.quorum_id)
    return moved if fold({after.name: then}, moved)[after.name] == now else now


def saved(job: Job) -> Saved:
    """Return all that must be remembered of `job`."""
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
    )


def anew(job: Job) -> Job:
    """Return the job that takes the place of an empty one: whoever comes founds it, with other settings if need be.

    Ids go on growing. A group that lost its connection may still hold its vote in a quorum of the first founding, and
    must not take the commit of a later one for its own. Nor must it wait for others if the job has halted.
    """
    return Job(
        job.name,
        job.options,
        last_quorum_id=job.last_quorum_id,
        last_heal_id=job.last_heal_id,
        term=job.term,
        halted=job.halted,
        idle_since=job.idle_since,
    )


def new(name: str, options: Options) -> Job:
    """Return a job of which nothing is known."""
    return Job(name, options, last_heal_id=options.heals_from)


def begun_again(job: Job, now_s: float) -> Job:
    """Return the job as a coordinator would begin with it now that has just started: no group is there.

    This one still knows which ids it has given out.
    """
    known = restored(saved(job), job.options, now_s)
    return changed(known, last_heal_id=job.last_heal_id, term=job.term)


def may_forget(job: Job, unix_s: int, after_s: float) -> bool:
    """Whether a job need not be remembered any longer: it has finished, or nothing was committed, a while ago."""
    if job.groups or job.idle_since is None or unix_s - job.idle_since < after_s:
        return False
    return job.finished is not None or _holds_nothing(job)


def first_to_forget(jobs: Iterable[Job]) -> Job | None:
    """Return the job that is missed least, if a coordinator has to forget one; None if all are in use.

    One on which nothing was committed rather than a finished one, and that rather than one that was given up; of each
    kind the one that was left first.
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
    """Return what is remembered after one more record.

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
    """Return the job as a coordinator begins with it that remembers `record`. Nobody is there yet."""
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
    )


def _holders(quorum: NewQuorum | None) -> tuple[Holder, ...]:
    return () if quorum is None else tuple((m.group, m.incarnation) for m in quorum.members)
