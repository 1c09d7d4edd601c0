"""Encodes and decodes the records that must survive the coordinator.

A record is one line of JSON in UTF-8. Bytes that come back from a disk or from etcd are not trusted: they become a
frozen value whose every field has been checked, or a `RecordError` with the reason.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, assert_never, cast

from jaxft_protocol.coordinator.bounds import MAX_NUMBER
from jaxft_protocol.coordinator.job import Forgotten, Frontier, Holder, Moved, Record, Saved
from jaxft_protocol.messages import GroupName, HistoryId, Incarnation, QuorumId, Step

# Increase it when fields change.
FORMAT = 5

T = TypeVar("T")
_Object = dict[str, Any]


class RecordError(ValueError):
    """The bytes are not a record, or a field of it is invalid."""


@dataclass(frozen=True, slots=True)
class Led:
    """The coordinator at `address` started to lead under `term`."""

    term: int
    address: str


def encode(record: Record | Led) -> bytes:
    """Return `record` as one line of JSON, without the newline.

    Raises:
        RecordError: a field is out of range, so that `decode` would refuse it at the next start.
    """
    value = _to_object(record)
    if _from_object(value) != record:
        raise RecordError(f"the record does not decode to itself: {record!r:.500}")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def decode(data: bytes) -> Record | Led:
    """Return the record in `data`.

    Raises:
        RecordError: `data` is not what `encode` makes; the message names the field and its value.
    """
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{data[:80]!r} is not a record: it is not JSON ({error})") from error
    return _from_object(_mapping("a record", value))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid in JSON")


# ---- to JSON ----


def _to_object(record: Record | Led) -> _Object:
    match record:
        case Moved(job, step, quorum_id):
            return {"v": FORMAT, "kind": "moved", "job": job, "step": step, "quorum_id": quorum_id}
        case Forgotten(job):
            return {"v": FORMAT, "kind": "forgotten", "job": job}
        case Led(term, address):
            return {"v": FORMAT, "kind": "led", "term": term, "address": address}
        case Saved():
            return {
                "v": FORMAT,
                "kind": "saved",
                "job": record.job,
                "last_quorum_id": record.last_quorum_id,
                "settings": None if record.settings is None else dict(record.settings),
                "total_shards": record.total_shards,
                "min_replicas": record.min_replicas,
                "history": record.history,
                "frontier": None if record.frontier is None else _frontier_to_object(record.frontier),
                "proven": dict(record.proven),
                "distrusted": _sorted(record.distrusted),
                "members": [list(member) for member in record.members],
                "held": {name: list(shards) for name, shards in record.held.items()},
                "places": record.places,
                "finished": record.finished,
                "idle_since": record.idle_since,
                "paused": record.paused,
                "drains": [list(each) for each in record.drains],
            }
        case _:
            assert_never(record)


def _frontier_to_object(frontier: Frontier) -> _Object:
    return {
        "step": frontier.step,
        "quorum_id": frontier.quorum_id,
        "digest": frontier.digest,
        "holders": _sorted(frontier.holders),
        "fresh": frontier.fresh,
        "disputed": frontier.disputed,
    }


def _sorted(holders: frozenset[Holder]) -> list[list[Any]]:
    return sorted(list(holder) for holder in holders)


# ---- from JSON ----

_FIELDS = {
    "moved": {"v", "kind", "job", "step", "quorum_id"},
    "forgotten": {"v", "kind", "job"},
    "led": {"v", "kind", "term", "address"},
    "saved": {"v", "kind", "job", "last_quorum_id", "settings", "min_replicas", "history", "frontier"}
    | {"proven", "distrusted", "members", "held", "places", "finished", "idle_since", "total_shards"}
    | {"paused", "drains"},
    "frontier": {"step", "quorum_id", "digest", "holders", "fresh", "disputed"},
}


def _from_object(value: _Object) -> Record | Led:
    version = value.get("v")
    if type(version) is not int or version != FORMAT:
        raise RecordError(
            f"a record has format {version!r}, but this coordinator reads format {FORMAT}. Run the jaxft-coordinator "
            "that wrote it"
        )
    kind = value.get("kind")
    if kind == "frontier" or not isinstance(kind, str) or kind not in _FIELDS:
        raise RecordError(f"a record's kind is {kind!r:.80}, but must be moved, saved, forgotten or led")
    _check_fields(kind, value)
    if kind == "led":
        return Led(_whole("term", value["term"]), _text("address", value["address"]))
    job = _text("job", value["job"])
    if kind == "forgotten":
        return Forgotten(job)
    if kind == "moved":
        return Moved(
            job, Step(_whole("step", value["step"])), QuorumId(_whole("quorum_id", value["quorum_id"]))
        )
    return _saved(job, value)


def _saved(job: str, value: _Object) -> Saved:
    settings = _or_none(lambda name, got: _each(name, got, _text), "settings", value["settings"])
    proven = _each("proven", value["proven"], _whole)
    held = _each("held", value["held"], lambda name, got: tuple(_list(name, got, _whole)))
    return Saved(
        job,
        QuorumId(_whole("last_quorum_id", value["last_quorum_id"])),
        settings,
        _whole("min_replicas", value["min_replicas"]),
        HistoryId(_whole("history", value["history"])),
        _or_none(_frontier, "frontier", value["frontier"]),
        {GroupName(name): Incarnation(incarnation) for name, incarnation in proven.items()},
        frozenset(_list("distrusted", value["distrusted"], _holder)),
        tuple(_list("members", value["members"], _holder)),
        {GroupName(name): shards for name, shards in held.items()},
        _whole("places", value["places"]),
        _or_none(lambda name, got: Step(_whole(name, got)), "finished", value["finished"]),
        _or_none(_whole, "idle_since", value["idle_since"]),
        _or_none(_whole, "total_shards", value["total_shards"]),
        _flag("paused", value["paused"]),
        tuple(_list("drains", value["drains"], _holder)),
    )


def _frontier(name: str, value: object) -> Frontier:
    found = _mapping(name, value)
    _check_fields("frontier", found)
    return Frontier(
        Step(_whole("frontier.step", found["step"])),
        QuorumId(_whole("frontier.quorum_id", found["quorum_id"])),
        _or_none(_whole, "frontier.digest", found["digest"]),
        frozenset(_list("frontier.holders", found["holders"], _holder)),
        _flag("frontier.fresh", found["fresh"]),
        _flag("frontier.disputed", found["disputed"]),
    )


def _holder(name: str, value: object) -> Holder:
    if not isinstance(value, list) or len(pair := cast(list[object], value)) != 2:
        _refuse(name, value, "not a pair of group and incarnation")
    return GroupName(_text(name, pair[0])), Incarnation(_whole(name, pair[1]))


def _check_fields(kind: str, value: _Object) -> None:
    if value.keys() == _FIELDS[kind]:
        return
    missing = sorted(_FIELDS[kind] - value.keys())
    foreign = sorted(value.keys() - _FIELDS[kind])
    raise RecordError(
        f"a record of kind {kind!r} lacks the fields {missing} and has the unknown fields {foreign!r:.200}"
    )


def _or_none(read: Callable[[str, object], T], name: str, value: object) -> T | None:
    return None if value is None else read(name, value)


def _each(name: str, value: object, read: Callable[[str, object], T]) -> Mapping[str, T]:
    found = _mapping(name, value)
    return {_text(name, key): read(f"{name}[{key!r:.80}]", item) for key, item in found.items()}


def _list(name: str, value: object, read: Callable[[str, object], T]) -> list[T]:
    if not isinstance(value, list):
        _refuse(name, value, "not a list")
    return [read(name, item) for item in cast(list[object], value)]


def _mapping(name: str, value: object) -> _Object:
    if not isinstance(value, dict):
        _refuse(name, value, "not an object")
    return cast(_Object, value)


def _whole(name: str, value: object) -> int:
    # In Python, bool is an int.
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        _refuse(name, value, "not a whole number of at most 64 bits")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "neither true nor false")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(name, value, "not text")
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can express and UTF-8 cannot
        _refuse(name, value, "not text that UTF-8 can encode")
    return value


def _refuse(name: str, value: object, why: str) -> NoReturn:
    raise RecordError(f"{name} is {value!r:.80}, {why}")
