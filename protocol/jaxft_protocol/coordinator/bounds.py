"""Limits on a job's durable record: its size and its numbers.

A record that a store refuses would stop its job permanently, and a record that cannot be encoded would stop the
process. So both are checked here, before a record becomes an effect:

* `join_problem` refuses a group whose entry could make the record too long, with the reason;
* `forget` keeps the entries of groups that are gone within a budget;
* `problem` is the last check: a turn whose record it refuses does not happen (`machine.step` raises).

Forgetting is safe. For a group that is gone we may forget, in this order:

1. that it was *proven*. When it comes back with a state of this history it heals again; or, if no group holds the
   frontier, the job resumes from its state by its history, as from a checkpoint: slower, but the same state;
2. that it is a *holder* of the frontier: the same;
3. that it is *distrusted*, and then also that it was proven. Incarnations that have been replaced by another process
   of the same name are forgotten first. If a forgotten group comes back anyway, it heals like any other. The job
   could resume from its state only if no group holds the frontier.

Connected groups and members of the current quorum are never forgotten.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from jaxft_protocol.coordinator.job import Holder, Job, Moved, Record, Saved
from jaxft_protocol.messages import GroupName, Incarnation, Join
from jaxft_protocol.values import changed

# The widest numbers of the protocol: steps, quorum ids and incarnations are 64 bits.
MAX_NUMBER = (1 << 64) - 1
# etcd takes 1.5 MiB in one request. A job of 2,048 groups with names of 20 characters and 65,536 shards has 0.9 MiB.
MAX_RECORD_BYTES = 1_400_000
# Of that: for connected groups, if each is in every list; and for groups that are gone.
MAX_LIVE_BYTES = 1 << 20
MAX_GONE_BYTES = 256 << 10
# Names and values together. Real settings are a few digests and short summaries.
MAX_SETTINGS_BYTES = 64 << 10
# A group may be in this many lists: proven, distrusted, members, held, and the holders of the frontier.
_LISTS = 5
# For an incarnation, quotes, brackets and commas.
_ENTRY_BYTES = 28
# The longest entry: a name of 200 characters of six bytes each.
_MOST_ENTRY_BYTES = 1230
# A shard number has at most five digits, and a comma.
_SHARD_BYTES = 6
# Field names, and numbers of 20 digits.
_FRAME_BYTES = 1000


def text_bytes(text: str) -> int:
    """Return how many bytes `text` takes in a record. Plain text, the usual case, is fast to measure."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return len(text) + 2
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def settings_bytes(settings: Mapping[str, str]) -> int:
    return sum(text_bytes(name) + text_bytes(value) + 2 for name, value in settings.items())


@functools.lru_cache(maxsize=65536)
def entry_bytes(name: GroupName) -> int:
    """Return how many bytes one group takes in one list of a record."""
    return text_bytes(name) + _ENTRY_BYTES


def join_problem(job: Job, name: GroupName, message: Join) -> str:
    """Return why the job's record would be too long with this group in it; "" if it would not."""
    given = settings_bytes(message.settings)
    if given > MAX_SETTINGS_BYTES:
        return (
            f"the settings of group {name!r} have {given} bytes, which exceeds the maximum of {MAX_SETTINGS_BYTES}: "
            "use digests instead of long texts"
        )
    names = {name, *job.groups}
    shards = (len(names) if message.total_shards is None else message.total_shards) * _SHARD_BYTES
    here = _FRAME_BYTES + given + shards + _LISTS * sum(map(entry_bytes, names))
    if here <= MAX_LIVE_BYTES:
        return ""
    return (
        f"with group {name!r} as number {len(names)}, the record of job {job.name!r} would need {here} bytes, which "
        f"exceeds the maximum of {MAX_LIVE_BYTES}: use shorter group names, or fewer groups"
    )


# ---- entries of groups that are gone ----


def forget(job: Job) -> Job:
    """Return `job` with its entries of groups that are gone limited to `MAX_GONE_BYTES`."""
    holders = job.frontier.holders if job.frontier is not None else frozenset[Holder]()
    if _MOST_ENTRY_BYTES * (len(job.proven) + len(holders) + len(job.distrusted)) <= MAX_GONE_BYTES:
        return job
    here = {group.holder for group in job.groups.values()}
    if job.quorum is not None:
        here |= {(member.group, member.incarnation) for member in job.quorum.members}
    gone = ({*job.proven.items()} - here, holders - here, job.distrusted - here)
    if sum(entry_bytes(name) for kind in gone for name, _ in kind) <= MAX_GONE_BYTES:
        return job
    distrusted, room = _newest(_by_age(job, gone[2]), MAX_GONE_BYTES)
    held, left = _newest(_by_age(job, gone[1]), room // 2)
    # A group whose distrust is forgotten must not be trusted either.
    unknown = (gone[0] & job.distrusted) - distrusted
    in_order = [holder for holder in job.proven.items() if holder in gone[0] and holder not in unknown]
    proven, _ = _newest(in_order, room - room // 2 + left)
    frontier, kept = job.frontier, here | proven
    return changed(
        job,
        proven={name: number for name, number in job.proven.items() if (name, number) in kept},
        distrusted=(job.distrusted & here) | distrusted,
        frontier=None if frontier is None else replace(frontier, holders=(holders & here) | held),
    )


def _by_age(job: Job, holders: AbstractSet[Holder]) -> list[Holder]:
    """In the order in which they may be forgotten: first the groups that another process has replaced."""
    return sorted(holders, key=lambda holder: (not _is_replaced(job, holder), holder))


def _is_replaced(job: Job, holder: Holder) -> bool:
    name, incarnation = holder
    group = job.groups.get(name)
    newest = job.proven.get(name) if group is None else group.incarnation
    return newest is not None and newest != incarnation


def _newest(holders: Sequence[Holder], room: int) -> tuple[frozenset[Holder], int]:
    """Return the holders to keep, from the last one backwards, and how much room is left."""
    kept: set[Holder] = set()
    for holder in reversed(holders):
        size = entry_bytes(holder[0])
        if size <= room:
            kept.add(holder)
            room -= size
    return frozenset(kept), room


# ---- the last check ----


def problem(record: Record) -> str:
    """Return why `record` cannot be encoded; "" if it can."""
    match record:
        case Saved():
            return _wrong_number(_numbers(record)) or _wrong_text(_texts(record)) or _too_long(record)
        case Moved(_, step, quorum_id):
            return _wrong_number({"step": step, "quorum_id": quorum_id}.items())
        case _:
            return ""


def _numbers(saved: Saved) -> Iterable[tuple[str, int | None]]:
    yield from {
        "last_quorum_id": saved.last_quorum_id,
        "total_shards": saved.total_shards,
        "min_replicas": saved.min_replicas,
        "history": saved.history,
        "places": saved.places,
        "finished": saved.finished,
        "idle_since": saved.idle_since,
    }.items()
    if saved.frontier is not None:
        frontier = saved.frontier
        numbers = {"step": frontier.step, "quorum_id": frontier.quorum_id, "digest": frontier.digest}
        yield from numbers.items()
    for name, incarnation in _holders(saved):
        yield name, incarnation
    for name, shards in saved.held.items():
        for shard in shards:
            yield name, shard


def _texts(saved: Saved) -> Iterable[str]:
    yield saved.job
    for name, value in (saved.settings or {}).items():
        yield name
        yield value
    for name, _ in _holders(saved):
        yield name
    yield from saved.held


def _holders(saved: Saved) -> Iterable[tuple[GroupName, Incarnation]]:
    yield from saved.proven.items()
    yield from saved.distrusted
    yield from saved.members
    yield from saved.drains
    if saved.frontier is not None:
        yield from saved.frontier.holders


def _wrong_number(numbers: Iterable[tuple[str, int | None]]) -> str:
    for name, number in numbers:
        # bool is a subclass of int, but not valid here.
        if number is not None and (type(number) is not int or not 0 <= number <= MAX_NUMBER):
            return f"{name} would be {number!r}, not a whole number of at most 64 bits"
    return ""


def _wrong_text(texts: Iterable[str]) -> str:
    for text in texts:
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            return f"{text!r:.80} cannot be encoded as UTF-8"
    return ""


def _too_long(saved: Saved) -> str:
    size = saved_bytes(saved)
    if size <= MAX_RECORD_BYTES:
        return ""
    return f"the record of the job would have {size} bytes, which exceeds the maximum of {MAX_RECORD_BYTES}"


def saved_bytes(saved: Saved) -> int:
    """Return an upper bound on the bytes that a record takes."""
    texts = text_bytes(saved.job) + settings_bytes(saved.settings or {})
    entries = sum(entry_bytes(name) for name, _ in _holders(saved)) + sum(map(entry_bytes, saved.held))
    shards = (len(str(shard)) + 1 for numbers in saved.held.values() for shard in numbers)
    return _FRAME_BYTES + texts + entries + sum(shards)
