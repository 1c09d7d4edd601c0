"""Rank 0's side: `step(leader, event, now_s) -> (leader, effects)`."""

from dataclasses import dataclass, replace
from typing import TypeAlias

from jaxft_protocol.ranks.messages import CameApart, Judged, Outcome, StopWork, Verdict
from jaxft_protocol.values import SLOW_WAIT_S, changed


@dataclass(frozen=True, slots=True)
class Rank:
    """What rank 0 knows of another rank."""

    outcomes: tuple[Outcome, ...] = ()  # that no verdict has used yet, the oldest first
    progress: int = 0  # as each beat reports
    moved_s: float = 0.0  # when that grew
    ended: str | None = None  # with which error; "" in an orderly way


@dataclass(frozen=True)
class Leader:
    stuck_s: float  # how long a rank may make no progress while rank 0 waits for its outcome
    ranks: tuple[Rank, ...]  # 1, 2, ...
    operations: int = 0  # begun so far
    what: str = ""  # the operation that rank 0 is in; "" between two of them
    own: Verdict | None = None  # how rank 0's part went, once it has ended
    done_s: float = 0.0  # when it ended
    mention_s: float = SLOW_WAIT_S
    redirected: bool = False  # the group is directed elsewhere
    interrupted: bool = False  # another rank has failed
    awaits: bool = False  # rank 0 waits for the others in a computation of all ranks
    stops: bool = False  # the others have the order to stop this operation

    @staticmethod
    def of(size: int, *, stuck_s: float) -> "Leader":
        return Leader(stuck_s, (Rank(),) * (size - 1))


@dataclass(frozen=True, slots=True)
class Awaits:
    """The training thread enters a computation of all ranks, or has left it."""

    now: bool


@dataclass(frozen=True, slots=True)
class Begins:
    """The training thread begins an operation."""

    what: str
    redirected: bool = False  # the group is directed elsewhere already


@dataclass(frozen=True, slots=True)
class Redirected:
    """The group is directed to do something else than the current operation."""


@dataclass(frozen=True, slots=True)
class Done:
    """Rank 0's part of the operation has ended."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Looks:
    """The training thread waits for the verdict: something has happened, or some time has passed."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """The training thread has left the operation."""


@dataclass(frozen=True, slots=True)
class Reported:
    rank: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Moved:
    """A rank reports its progress."""

    rank: int
    progress: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank ends: with this error, or in an orderly way."""

    rank: int
    error: str


Event: TypeAlias = Awaits | Begins | Redirected | Done | Looks | Leaves | Reported | Moved | Ended


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Rank 0 stops its part of the current operation: another rank has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to all other ranks."""

    message: Judged | StopWork


@dataclass(frozen=True, slots=True)
class Conclude:
    """The training thread continues with this verdict."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A rank has ended, so there will be no verdict."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class Lose:
    """A rank does not move any more: the group ends."""

    rank: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class GetsOn:
    """A rank that rank 0 waits for has made progress, and so has the group."""


@dataclass(frozen=True, slots=True)
class Mention:
    """Log a long wait."""

    rank: int
    waited_s: float


Effect: TypeAlias = Interrupt | Tell | Conclude | GiveUp | Lose | GetsOn | Mention
_Next: TypeAlias = tuple[Leader, tuple[Effect, ...]]


def step(leader: Leader, event: Event, now_s: float) -> _Next:  # noqa: C901 (a case for each event)
    """Return the leader after `event` at `now_s` (monotonic seconds), and what must be done.

    `Conclude`, `Tell` and what ends a wait come only of `Done` and `Looks`: events of the training thread. So orders
    have one sender.

    Raises:
        CameApart: a rank reports another operation than rank 0's.
    """
    match event:
        case Begins(what, redirected):
            number = leader.operations + 1
            begun = changed(leader, operations=number, what=f"{what}#{number}", own=None, stops=False)
            return _interrupted(changed(begun, redirected=redirected, interrupted=False, awaits=False))
        case Redirected():
            # Another rank's failure came first, and has ended the operation.
            return changed(leader, redirected=not leader.interrupted), ()
        case Done(verdict):
            done = changed(leader, own=verdict, done_s=now_s, mention_s=SLOW_WAIT_S)
            return _looked(done, now_s)
        case Looks():
            return _looked(leader, now_s)
        case Leaves():
            return changed(leader, what="", own=None), ()
        case Reported(rank, outcome):
            known = leader.ranks[rank - 1]
            return _interrupted(_with(leader, rank, replace(known, outcomes=(*known.outcomes, outcome))))
        case Moved(rank, progress):
            known = leader.ranks[rank - 1]
            if progress == known.progress:
                return leader, ()
            moved = _with(leader, rank, replace(known, progress=progress, moved_s=now_s))
            # Otherwise rank 0 must show by its own part that it does not hang.
            awaited = leader.awaits or (leader.own is not None and not known.outcomes)
            return moved, ((GetsOn(),) if awaited else ())
        case Awaits(now):
            return changed(leader, awaits=now), ()
        case Ended(rank, error):
            return _with(leader, rank, replace(leader.ranks[rank - 1], ended=error)), ()


def _with(leader: Leader, number: int, rank: Rank) -> Leader:
    ranks = (*leader.ranks[: number - 1], rank, *leader.ranks[number:])
    return changed(leader, ranks=ranks)


def _interrupted(leader: Leader) -> _Next:
    """End rank 0's part of the operation as soon as another rank has failed in it, also if that was before."""
    if not leader.what or leader.redirected or leader.interrupted:
        return leader, ()
    for number, rank in enumerate(leader.ranks, 1):
        for outcome in rank.outcomes[:1]:
            if outcome.what == leader.what and outcome.verdict.failure:
                reason = f"rank {number} failed: {outcome.verdict.failure}"
                return changed(leader, interrupted=True), (Interrupt(reason),)
    return leader, ()


def _looked(leader: Leader, now_s: float) -> _Next:
    own = leader.own
    if own is None:
        return leader, ()
    effects: list[Effect] = []
    if not leader.stops and (own.failure or leader.redirected or leader.interrupted):
        # Rank 0 has failed, is needed elsewhere, or passes on that another rank has failed.
        leader = changed(leader, stops=True)
        effects.append(Tell(StopWork(leader.what)))
    missing = [number for number, rank in enumerate(leader.ranks, 1) if not rank.outcomes]
    if not missing:
        verdict = _verdict(leader, own)
        rest = tuple(replace(rank, outcomes=rank.outcomes[1:]) for rank in leader.ranks)
        effects += [Tell(Judged(leader.what, verdict)), Conclude(verdict)]
        return changed(leader, ranks=rest, own=None), tuple(effects)
    return _awaited(leader, missing, effects, now_s)


def _verdict(leader: Leader, own: Verdict) -> Verdict:
    outcomes = [rank.outcomes[0] for rank in leader.ranks]
    for number, outcome in enumerate(outcomes, 1):
        _check(leader, number, outcome)
    # Rank 0's own failure is often only that another rank had failed and stopped it.
    failures = [outcome.verdict.failure for outcome in outcomes if outcome.verdict.failure]
    stopped = leader.redirected
    failure = own.failure if own.failure and (stopped or not failures) else next(iter(failures), "")
    accused = {name for outcome in outcomes for name in outcome.verdict.accused} | set(own.accused)
    notes = (own.note, *(outcome.verdict.note for outcome in outcomes))
    return Verdict(failure, tuple(sorted(accused)), next(filter(None, notes), ""), stopped)


def _check(leader: Leader, rank: int, outcome: Outcome) -> None:
    if outcome.what != leader.what:
        raise CameApart(
            f"The ranks of this group have come apart: rank {rank} reports {outcome.what!r}, and rank 0 is at "
            f"{leader.what!r}. Every rank must run the same program, with the same calls of the step."
        )


def _awaited(leader: Leader, missing: list[int], effects: list[Effect], now_s: float) -> _Next:
    """Some have not reported yet."""
    for number, rank in enumerate(leader.ranks, 1):
        for outcome in rank.outcomes[:1]:
            _check(leader, number, outcome)
    for number in missing:
        rank = leader.ranks[number - 1]
        silent_s = now_s - max(leader.done_s, rank.moved_s)
        if rank.ended is not None:
            effects.append(GiveUp(number, rank.ended))
        elif silent_s > leader.stuck_s:
            effects.append(Lose(number, silent_s))
    waited_s = now_s - leader.done_s
    if waited_s >= leader.mention_s:
        leader = changed(leader, mention_s=2 * waited_s)
        effects += [Mention(number, waited_s) for number in missing]
    return leader, tuple(effects)
