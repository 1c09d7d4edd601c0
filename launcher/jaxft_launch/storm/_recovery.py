"""The cost of faults that have ended, and the share of time in which groups took part: from the events alone."""

import itertools
from collections.abc import Iterable, Iterator

from jaxft_launch.storm._record import Fault, History, RunRecord

Span = tuple[float, float]


def standstill_s(fault: Fault, histories: Iterable[History]) -> float | None:
    """Return the longest time without a committed step, from when the fault began to the first one after its end.

    None if no group committed a step after its end. Steps that only the fault's victim reports do not count.
    """
    others = (history for history in histories if history.group != fault.group)
    commits_s = sorted(e.t_s for h in others for e in h.steps if e.live and e.t_s > fault.t_s)
    after = next((number for number, t_s in enumerate(commits_s) if t_s > fault.end_s), None)
    if after is None:
        return None
    times_s = [fault.t_s, *commits_s[: after + 1]]
    return max(later - earlier for earlier, later in itertools.pairwise(times_s))


def again_s(fault: Fault, group: str, histories: Iterable[History]) -> float | None:
    """Return the time from the fault's end until `group` took part in a step attempted since then, or None."""
    histories = tuple(histories)
    known = max((e.step for h in histories for e in h.steps if e.t_s <= fault.end_s), default=0)
    own = (e.t_s for h in histories if h.group == group for e in h.steps if e.live and e.step > known)
    t_s = min((t_s for t_s in own if t_s > fault.end_s), default=None)
    return None if t_s is None else t_s - fault.end_s


def participation(record: RunRecord) -> float | None:
    """Return the share of time in which groups that could take part did so, or None if there were no steps.

    From the job's first commit to its last. A step's time is that since the step before it, and belongs to its
    members. The time of faults on a group, or on the coordinator, does not count. The time that a killed group takes
    to restart counts as time in which it could have taken part.
    """
    intervals = _intervals(record)
    if not intervals:
        return None
    could_s = did_s = 0.0
    for group in record.groups:
        harmed = tuple((f.t_s, f.end_s) for f in record.faults if group in _harmed(f, record.groups))
        for span, members in intervals:
            free_s = span[1] - span[0] - _covered_s(span, harmed)
            could_s += free_s
            did_s += free_s if group in members else 0.0
    return did_s / could_s if could_s else None


def _intervals(record: RunRecord) -> list[tuple[Span, frozenset[str]]]:
    """The time of each step after the first, with the members that committed it."""
    first: dict[int, tuple[float, frozenset[str]]] = {}
    for history in record.histories:
        for event in history.steps:
            if event.live and (event.step not in first or event.t_s < first[event.step][0]):
                first[event.step] = event.t_s, frozenset(event.members)
    commits = sorted(first.values(), key=lambda commit: commit[0])
    return [((a_s, b_s), members) for (a_s, _), (b_s, members) in itertools.pairwise(commits)]


def _harmed(fault: Fault, groups: Iterable[str]) -> Iterable[str]:
    named = {fault.group, fault.other}
    return named if named & set(groups) else groups


def _covered_s(span: Span, by: Iterable[Span]) -> float:
    """How much of a span is covered by other spans, which may overlap."""
    covered_s, until_s = 0.0, span[0]
    for begin_s, end_s in _clipped(span, by):
        covered_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


def _clipped(span: Span, by: Iterable[Span]) -> Iterator[Span]:
    for begin_s, end_s in sorted(by):
        if end_s > span[0] and begin_s < span[1]:
            yield max(begin_s, span[0]), min(end_s, span[1])
