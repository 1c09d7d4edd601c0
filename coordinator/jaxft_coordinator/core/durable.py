"""What of a job must survive the coordinator, as records: each says what has changed, and is durable before anybody
hears of it.

Groups remember what they hold; what the coordinator must not forget is who holds the truth: the frontier and its
holders, which incarnations are proven, which quorum ids were given out. Sessions, phases, heals and votes are not
remembered: after a restart the groups dial anew and say where they stand.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxft_coordinator.core.job import (
    Forgotten,
    Frontier,
    Holder,
    Job,
    Moved,
    Options,
    Record,
    Saved,
)
from jaxft_coordinator.core.messages import HealId, NewQuorum

# Heal ids of one life of the coordinator are never those of another: a joiner tells its heals apart by them.
_HEALS_PER_TERM_BITS = 32


def record_of(before: Job, after: Job) -> Record | None:
    """Return what must be written down of a turn, or None if nothing that must be remembered has changed."""
    if after.empty:
        if before.empty:
            return None
        return saved(anew(after)) if after.last_quorum_id else Forgotten(after.name)
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
    )


def anew(job: Job) -> Job:
    """Return the job that takes the place of an empty one: whoever comes founds it, with other settings if need be.

    Ids go on growing. A group that lost its connection may still hold its vote in a quorum of the first founding, and
    must not take the commit of a later one for its own.
    """
    return Job(job.name, job.options, last_quorum_id=job.last_quorum_id, last_heal_id=job.last_heal_id)


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
            frontier = Frontier(step, quorum_id, "", frozenset(before.members))
            return {**known, name: replace(before, frontier=frontier)}


def restored(record: Saved, options: Options, now_s: float) -> Job:
    """Return the job as a coordinator begins with it that remembers `record`. Nobody is there yet."""
    return Job(
        record.job,
        options,
        settings=record.settings,
        min_replicas=record.min_replicas,
        history=record.history,
        frontier=record.frontier,
        proven=record.proven,
        distrusted=record.distrusted,
        held=record.held,
        places=record.places,
        last_quorum_id=record.last_quorum_id,
        last_heal_id=HealId(options.term << _HEALS_PER_TERM_BITS),
        finished=record.finished,
        restored_s=now_s,
    )


def _holders(quorum: NewQuorum | None) -> tuple[Holder, ...]:
    return () if quorum is None else tuple((m.group, m.incarnation) for m in quorum.members)
