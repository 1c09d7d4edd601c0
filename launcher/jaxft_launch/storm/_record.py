"""What happened in a run, as plain values: the faults, and the events of each incarnation of each group.

What faults cost, and the share of time in which groups took part, follow from these events alone.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxft_launch.storm._events import FinishedEvent, StepEvent

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One incarnation of a group, from its start to its end. `fell`: a fault that we injected has ended it."""

    group: str
    incarnation: int = 0
    fell: bool = False
    steps: tuple[StepEvent, ...] = ()
    finished: FinishedEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL of a group's process.

    Attributes:
        rank: the process of several.
        t_s: when, in seconds since 1970, as in the events.
        step: the job's committed steps by then.
        strike: the number of its strike; two kills of one strike occur together.
        aim: the phase in which it was planned, if any.
        phase: the phase in which it occurred, if known.
    """

    group: str
    rank: int = 0
    incarnation: int
    t_s: float
    step: int
    strike: int = 0
    aim: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault other than a kill, of a group, a link or the coordinator, that has ended.

    Attributes:
        kind: the kind of fault.
        group: the victim.
        rank: which of its processes.
        other: the other end, if the fault was on a link.
        how: the variant of its kind, as text.
        t_s: when it began, in seconds since 1970, as in the events.
        seconds: how long it lasted.
        step: the job's committed steps when it began.
        strike: the number of its strike.
    """

    kind: str
    group: str
    rank: int = 0
    other: str = ""
    how: str = ""
    t_s: float
    seconds: float
    step: int = 0
    strike: int = 0

    @property
    def end_s(self) -> float:
        return self.t_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A whole run of groups with `nproc` processes each.

    Attributes:
        undamaged: the number of corruptions that found no data large enough to damage.
        problems: failures that we did not inject.
        too_short: the late event, if the job ended before it.
    """

    groups: tuple[str, ...]
    nproc: int = 1
    planned_steps: int
    planned_kills: int = 0
    kills: tuple[Kill, ...] = ()
    planned_faults: int = 0
    faults: tuple[Fault, ...] = ()
    undamaged: int = 0
    histories: tuple[History, ...] = ()
    problems: tuple[str, ...] = ()
    too_short: str = ""

    @property
    def committed_steps(self) -> frozenset[int]:
        """The numbers of all steps that any group reported."""
        return frozenset(event.step for history in self.histories for event in history.steps)

    def last(self, group: str) -> History | None:
        """Return a group's newest incarnation."""
        own = [history for history in self.histories if history.group == group]
        return max(own, key=lambda history: history.incarnation, default=None)


def stall_s(kill: Kill, histories: Iterable[History], kills: Iterable[Kill] = ()) -> float | None:
    """Return the time from a kill until every survivor has committed again, or None if one never did.

    A survivor is an incarnation of another group that had taken part before the kill, and was not itself killed, or
    ended by a stop, before it could commit again; `kills` are all kills of the run.
    """
    killed = {(other.group, other.incarnation) for other in kills}
    waits_s: list[float | None] = []
    for history in _survivors(kill, histories):
        wait_s = _first_live_t_s(history, after_s=kill.t_s)
        ended = history.fell or (history.group, history.incarnation) in killed
        if wait_s is not None or not ended:
            waits_s.append(wait_s)
    return None if not waits_s or None in waits_s else max(t for t in waits_s if t is not None) - kill.t_s


def back_s(kill: Kill, histories: Iterable[History]) -> float | None:
    """Return the time from a kill to the victim's first contribution to a committed step, or None."""
    later = (h for h in histories if h.group == kill.group and h.incarnation > kill.incarnation)
    contributions = [event.t_s for history in later for event in history.steps if event.live and event.shards]
    return min(contributions) - kill.t_s if contributions else None


def _survivors(kill: Kill, histories: Iterable[History]) -> Iterator[History]:
    newest: dict[str, History] = {}
    for history in histories:
        took_part = any(event.live and event.t_s <= kill.t_s for event in history.steps)
        known = newest.get(history.group)
        if took_part and (known is None or known.incarnation < history.incarnation):
            newest[history.group] = history
    return (history for group, history in newest.items() if group != kill.group)


def _first_live_t_s(history: History, *, after_s: float) -> float | None:
    return min((event.t_s for event in history.steps if event.live and event.t_s > after_s), default=None)


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
