"""The keys under which stores keep records: converts records to keys and values, and back.

leader        who leads, or led last, and under which term
saved/JOB     the last `Saved` of a job
moved/JOB     the last `Moved` since then, if there is one
"""

from collections.abc import Iterable, Mapping, Sequence

from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import Forgotten, Moved, Record, Saved

from jaxft_coordinator.stores import records
from jaxft_coordinator.stores._store import StoreDamaged

# Jobs are independent of each other, so records of many jobs are split over several transactions if they exceed
# etcd's limits for one, which are 128 operations and 1.5 MB.
_PART_OPERATIONS = 100
_PART_BYTES = 1_000_000


def parts(new: Sequence[Record]) -> list[dict[str, bytes | None]]:
    """Return the values to write (None: delete the key), one mapping per transaction, in order.

    All keys of a job are in the same part.

    Raises:
        RecordError: a record cannot be encoded.
    """
    by_job: dict[str, dict[str, bytes | None]] = {}
    for record in new:
        by_job[record.job] = by_job.get(record.job, {}) | values_of(record)
    found: list[dict[str, bytes | None]] = []
    for values in by_job.values():
        together = size(values) + (size(found[-1]) if found else 0)
        if not found or len(found[-1]) + len(values) > _PART_OPERATIONS or together > _PART_BYTES:
            found.append({})
        found[-1] |= values
    return found


def values_of(record: Record) -> dict[str, bytes | None]:
    """Return the changes that a record makes (None: delete the key). Raises RecordError."""
    saved, moved = f"saved/{record.job}", f"moved/{record.job}"
    match record:
        case Saved():
            return {saved: records.encode(record), moved: None}
        case Moved():
            return {moved: records.encode(record)}
        case Forgotten():
            return {saved: None, moved: None}


def size(values: Mapping[str, bytes | None]) -> int:
    """Return roughly how many bytes `values` take in a request."""
    return sum(len(name) + len(value or b"") for name, value in values.items())


def led_in(value: bytes, where: str) -> records.Led:
    """Decode the leader, or the last one, from its value.

    Raises:
        StoreDamaged: the value is something else.
    """
    try:
        led = records.decode(value)
    except records.RecordError as error:
        raise _damage(where, str(error)) from error
    if not isinstance(led, records.Led):
        raise _damage(where, f"it is {led!r:.80}, not the record of a leader")
    return led


def jobs_in(entries: Iterable[tuple[str, bytes]], where: str) -> tuple[dict[str, Saved], dict[str, str]]:
    """Return the stored jobs, and why others cannot be read."""
    jobs: dict[str, Saved] = {}
    unreadable: dict[str, str] = {}
    for key, value in entries:
        name = key.partition("/")[2]
        try:
            jobs = _folded(jobs, value, name)
        except ValueError as error:
            jobs.pop(name, None)
            unreadable.setdefault(name, str(_damage(f"{where}{key}", str(error))))
    return jobs, unreadable


def _folded(jobs: dict[str, Saved], value: bytes, name: str) -> dict[str, Saved]:
    record = records.decode(value)
    if isinstance(record, records.Led) or record.job != name:
        raise ValueError(f"it is {record!r:.80}, which does not belong under this key")
    return durable.fold(jobs, record)


def _damage(where: str, what: str) -> StoreDamaged:
    return StoreDamaged(
        f"the record {where!r} cannot be read: {what}. Another program or a newer coordinator may have written it: "
        "run the newer version, or name another store"
    )
