"""The records about each job and its groups, for people."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxft_protocol.coordinator.job import Group, GroupPhase, Job, SessionId
from jaxft_protocol.messages import GroupName, Sample

from jaxft_coordinator.observe._goodput import Account, Standing
from jaxft_coordinator.observe._group_goodput import GroupAccount, spends
from jaxft_coordinator.observe._happened import Happened

# Bounds of histograms: from a step over loopback to a heal of many gigabytes.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# Events of a job that a page which is opened later can still show.
KEPT_EVENTS = 300
# Points of the curve of step rate and reported values: ten minutes, at one point a second.
KEPT_POINTS = 600
GONE = "gone"
PARTS = ("compute", "exchange", "vote", "apply")
# Why an attempt was repeated. An event names the lost members.
RETRIED = ("lost a member", "failed")
DEPARTURES = {
    "group_lost": "lost",
    "group_evicted": "evicted",
    "group_set_aside": "set_aside",
    "group_left": "left",
    "group_refused": "refused",
}


@dataclass
class WatchedGroup:
    """The records about one group, over all its lives."""

    state: str
    since_s: float  # when it entered that state, on the monotonic clock
    since_unix_s: float
    reason: str = ""  # why it is gone
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # in earlier states, by state
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))  # from its samples
    sample: Sample | None = None
    losses: int = 0
    spare: bool = False
    ended: bool = False  # gone on purpose
    account: GroupAccount = field(init=False)

    def __post_init__(self) -> None:
        self.account = GroupAccount(self.since_s)

    def moves_to(self, state: str, now_s: float, unix_s: float) -> None:
        self.seconds = self.seconds_in(now_s)
        self.state, self.since_s, self.since_unix_s = state, now_s, unix_s

    def seconds_in(self, now_s: float) -> dict[str, float]:
        """Return the seconds that it has spent in each state."""
        here_s = self.seconds.get(self.state, 0.0) + max(0.0, now_s - self.since_s)
        return {**self.seconds, self.state: here_s}


class WatchedJob:
    """Follows one job."""

    def __init__(self, name: str, now_s: float, heard_s: Mapping[SessionId, float]) -> None:
        self.name = name
        self._heard_s = heard_s
        self.job: Job | None = None
        self.account = Account(now_s)
        self.groups: dict[GroupName, WatchedGroup] = {}
        self.events: deque[tuple[int, str]] = deque(maxlen=KEPT_EVENTS)  # sequence number, JSON
        self.points: deque[dict[str, float]] = deque(maxlen=KEPT_POINTS)
        self.committed = 0
        self.committed_unix_s: float | None = None
        self.retried: Counter[str] = Counter()
        self.departures: Counter[str] = Counter()
        self.shards = self.shards_again = self.heal_bytes = 0
        self.step_s, self.exchange_s = Histogram(), Histogram()
        self.vote_s, self.heal_s = Histogram(), Histogram()
        self._pointed_s, self._pointed_at = now_s, 0

    def heard_s(self, group: Group) -> float:
        """Return when a group last sent anything, on the monotonic clock."""
        return self._heard_s.get(group.session, group.came_s)

    def advances(self, job: Job, now_s: float) -> None:
        """Take over the job's new state: book time and commits."""
        before, self.job = self.job, job
        step = None if job.frontier is None else job.frontier.step
        was = None if before is None or before.frontier is None else before.frontier.step
        if step is not None and was is not None and step > was:
            self.committed += step - was
            self.committed_unix_s = time.time()
            took_s = job.recent_s[-1] if job.recent_s else 0.0
            self.step_s.observe(took_s, step - was)
            self.account.commits(took_s, now_s)
        elif before is not None and before.quorum is not None and job.quorum is not before.quorum:
            self.account.retries()
        standing = _standing(job)
        if standing is not self.account.standing:
            self.account.moves_to(standing, now_s)
            for group in self.groups.values():
                self._book(group, now_s)

    def note(self, found: Happened, now_s: float, unix_s: float) -> None:
        """Count an event."""
        if found.event == "step_retried":
            self.retried[RETRIED[0] if found.reason else RETRIED[1]] += 1
        if (how := DEPARTURES.get(found.event)) is None:
            return
        self.departures[how] += 1
        if (group := self.groups.get(GroupName(found.group))) is not None:
            group.ended = how == "left"
            group.losses += not group.ended
            group.reason = found.reason
            # Back already, if another process or stream has replaced it.
            group.moves_to(GONE, now_s, unix_s)
            self._book(group, now_s)

    def move_groups(self, now_s: float, unix_s: float, most_gone: int) -> None:
        """Note in which state each group is now, and forget all but the last `most_gone` departed groups."""
        assert self.job is not None
        for name, group in self.job.groups.items():
            state = state_of(group.phase)
            known = self.groups.get(name)
            if known is None:
                known = self.groups[name] = WatchedGroup(state, now_s, unix_s)
            elif known.state != state:
                known.moves_to(state, now_s, unix_s)
            known.spare, known.ended = group.spare, False
            self._book(known, now_s)
        too_many = len(self.groups) - len(self.job.groups) - most_gone
        if too_many > 0:
            gone = self.groups.keys() - self.job.groups.keys()
            for name in sorted(gone, key=lambda name: self.groups[name].since_s)[:too_many]:
                del self.groups[name]

    def _book(self, group: WatchedGroup, now_s: float) -> None:
        how = spends(group.state, self.account.standing, spare=group.spare, ended=group.ended)
        group.account.moves_to(how, self.account, now_s)

    def sampled(self, name: GroupName, sample: Sample) -> None:
        """Take in a sample of a group's steps."""
        group = self.groups.get(name)
        if group is None:
            return
        group.sample = sample
        self.shards += sample.shards
        self.shards_again += sample.shards_again
        if sample.steps:
            # Steps that are shorter than a sample count with their average.
            self.exchange_s.observe(sample.exchange_s / sample.steps, sample.steps)
            self.vote_s.observe(sample.vote_s / sample.steps, sample.steps)
        for part in PARTS:
            group.parts_s[part] += getattr(sample, f"{part}_s")
        if sample.heals:
            self.heal_s.observe(sample.heal_s / sample.heals, sample.heals)
            self.heal_bytes += sample.heal_bytes

    def point(self, now_s: float, unix_s: float) -> None:
        """Add a point to the job's curve."""
        passed_s, made = now_s - self._pointed_s, self.committed - self._pointed_at
        if passed_s <= 0:
            return
        self._pointed_s, self._pointed_at = now_s, self.committed
        values = self.values
        self.points.append({"t": round(unix_s, 1), "steps_per_s": round(made / passed_s, 4), **values})

    @property
    def values(self) -> Mapping[str, float]:
        """The values that a training program shows, from the first member by name that shows any."""
        for name in sorted(self.groups):
            group = self.groups[name]
            if group.sample is not None and group.sample.values and group.state == GroupPhase.MEMBER.value:
                return group.sample.values
        return {}

    @property
    def steps_per_s(self) -> float:
        """Steps committed per second, over the last ten points."""
        last = list(self.points)[-10:]
        return sum(point["steps_per_s"] for point in last) / len(last) if last else 0.0


def state_of(phase: GroupPhase) -> str:
    return phase.value


def _standing(job: Job) -> Standing:
    if job.finished is not None:
        return Standing.FINISHED
    if job.halted is not None:
        return Standing.HALTED
    if job.quorum is not None:
        return Standing.TRAINING
    if job.paused:
        return Standing.PAUSED
    return Standing.WAITING if job.last_quorum_id else Standing.STARTING


class Histogram:
    """Counts values, in seconds, by upper bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` this many times."""
        self.counts[bisect_left(SECONDS, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return how many values are at most each bound, as Prometheus writes it."""
        total, found = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found
