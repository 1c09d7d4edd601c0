"""What happened in a run, as plain values: the kills, and the events of each incarnation of each group."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxft_launch.storm._events import FinishedEvent, StepEvent


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
        rank: which one of several.
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
        too_short: what was late for the end of the job, if something was.
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
