"""Follows all jobs of a coordinator, outside of their state machines, for the people who operate them.

It sees each change that the coordinator announces (`saw`), and the groups' samples of their steps (`sampled`). It
keeps the facts of `/metrics`, the API and the page, and passes events on to its listeners. It decides nothing, and an
error in it stops no job.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeGuard

from jaxft_protocol.coordinator.job import Effect, Event, Job, Received, SessionId, Suspended, Tick
from jaxft_protocol.host.admission import RateLimitFilter
from jaxft_protocol.messages import GroupName, Heartbeat, Sample, Vote

from jaxft_coordinator.observe._happened import Happened, happened
from jaxft_coordinator.observe._watched import Histogram, WatchedJob

_log = logging.getLogger("jaxft_coordinator.observe")
_log.addFilter(RateLimitFilter())

# Events of one job: a burst, as when two thousand groups found a job; then this rate per second.
BURST = 8000
EVENTS_PER_S = 50.0

# Groups that are gone, of which something is kept. Each job has its share.
KEPT_GROUPS = 16384

# Gets the job's name ("" for the coordinator itself), a sequence number, and the event's JSON.
Listener = Callable[[str, int, str], None]


class Observer:
    """Keeps what people see of all jobs. For one asyncio loop."""

    def __init__(self) -> None:
        self.jobs: dict[str, WatchedJob] = {}
        # When the last message for a job came on each session; `Jobs` notes it.
        self.heard_s: dict[SessionId, float] = {}
        self.appends = Histogram()  # of the store
        self.errors = 0  # of the observer itself
        self.dropped = 0  # events, because a job had too many
        # Of each job: how many events it may still have, as of when, and how many were dropped since the last one.
        self._allowance: dict[str, tuple[float, float, int]] = {}
        self._sequence = 0
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Pass all further events to `listener`; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @staticmethod
    def interested(before: Job, job: Job, event: Event, effects: Sequence[Effect]) -> bool:
        """Whether `saw` must see an event, which made `job` of `before`.

        Not votes and ticks without effects, nor heartbeats, unless a group leaves its training loop, or is back.
        """
        if effects:
            return True
        if _is_heartbeat(event):
            name = job.sessions.get(event.session)
            return name is not None and job.groups[name].away is not before.groups[name].away
        if isinstance(event, Received):
            return not isinstance(event.message, Vote)
        return not isinstance(event, Tick | Suspended)

    def saw(self, job: Job, event: Event | None, effects: Sequence[Effect], now_s: float) -> None:
        """Take in a job's new state."""
        try:
            self._saw(job, event, effects, now_s)
        except Exception:  # what people see must not stop a job
            self._failed(job.name)

    def sampled(self, job: str, group: GroupName, sample: Sample) -> None:
        """Take in a sample of a group."""
        try:
            if (watched := self.jobs.get(job)) is not None:
                watched.sampled(group, sample)
        except Exception:
            self._failed(job)

    def forget(self, job: str) -> None:
        """A job is forgotten."""
        if self.jobs.pop(job, None) is not None:
            self.tell(job, Happened("job_forgotten"))
        self._allowance.pop(job, None)

    def leads(self, term: int) -> None:
        """The coordinator leads now."""
        self.jobs.clear()
        self.tell("", Happened("leads", more={"term": term}))

    def stands_down(self, reason: str) -> None:
        """The coordinator does not lead any more: another one knows its jobs now."""
        self.jobs.clear()
        self.tell("", Happened("stands_by", reason=reason))

    def tell(self, job: str, found: Happened, unix_s: float | None = None) -> None:
        """Keep an event, and pass it to all listeners. `unix_s`: when it happened, if that is not now."""
        unix_s = time.time() if unix_s is None else unix_s
        for each in self._allowed(job, found, unix_s):
            self._pass_on(job, each, unix_s)

    def tick(self) -> None:
        """A second has passed."""
        now_s, unix_s = time.monotonic(), time.time()
        for watched in self.jobs.values():
            watched.point(now_s, unix_s)

    def _saw(self, job: Job, event: Event | None, effects: Sequence[Effect], now_s: float) -> None:
        watched = self.jobs.get(job.name)
        if watched is None:
            watched = self.jobs[job.name] = WatchedJob(job.name, now_s, self.heard_s)
        elif not effects and _is_heartbeat(event):
            # Of what people see, only `away` differs. In a large job one comes every millisecond.
            watched.job = job
            return
        before = watched.job
        watched.advances(job, now_s)
        unix_s = time.time()
        for found in happened(before, job, event, effects):
            watched.note(found, now_s, unix_s)
            self.tell(job.name, found, unix_s)
        if before is None or job.groups is not before.groups:
            watched.move_groups(now_s, unix_s, KEPT_GROUPS // len(self.jobs))

    def _pass_on(self, job: str, found: Happened, unix_s: float) -> None:
        self._sequence += 1
        text = json.dumps(as_json(job, found, unix_s))
        if (watched := self.jobs.get(job)) is not None:
            watched.events.append((self._sequence, text))
        for listener in list(self._listeners):
            listener(job, self._sequence, text)

    def _allowed(self, job: str, found: Happened, unix_s: float) -> Sequence[Happened]:
        """Bound what one job's events can take: nothing, or the event, after a count of those dropped before."""
        left, since_s, dropped = self._allowance.get(job, (BURST, unix_s, 0))
        left = min(BURST, left + EVENTS_PER_S * max(0.0, unix_s - since_s))
        events = (Happened("events_dropped", more={"count": dropped}), found) if dropped else (found,)
        if left < len(events):
            self.dropped += 1
            self._allowance[job] = (left, unix_s, dropped + 1)
            return ()
        self._allowance[job] = (left - len(events), unix_s, 0)
        return events

    def _failed(self, job: str) -> None:
        self.errors += 1
        _log.exception("[%s] could not be observed; the job itself is not affected", job)


def _is_heartbeat(event: Event | None) -> TypeGuard[Received]:
    return isinstance(event, Received) and isinstance(event.message, Heartbeat)


def as_json(job: str, found: Happened, unix_s: float) -> dict[str, object]:
    """Return the JSON form of an event, as docs/events.md documents it."""
    given = {
        "t": round(unix_s, 3),
        "event": found.event,
        "job": job,
        "group": found.group,
        "step": found.step,
        "quorum_id": found.quorum_id,
        "reason": found.reason,
        **found.more,
    }
    return {name: value for name, value in given.items() if value not in (None, "")}
