"""All jobs of a coordinator while it leads: steps the pure state machine, and runs its effects in order.

One asyncio loop owns every job, so there is no lock. With a store, effects wait until the durable part of a decision
is written (`_journal.py`).

Jobs are isolated from each other. A failure while a job handles an event (an error in the machine, a record
that the store refuses, a message that cannot be encoded) stops that job: its groups get a message, and it resumes
from its last record when they come back. A failure caused by one session ends that session.
"""

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from jaxft_protocol.coordinator import durable, machine
from jaxft_protocol.coordinator.job import (
    Close,
    DrainAsked,
    Effect,
    Event,
    Forgotten,
    Job,
    Options,
    PauseAsked,
    Persist,
    Received,
    Record,
    Send,
    SessionClosed,
    SessionId,
    Suspended,
    Tick,
)
from jaxft_protocol.messages import Evicted, GroupName, Halted, HaltKind, HealId, Hello

from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell import limits
from jaxft_coordinator.shell._journal import Journal
from jaxft_coordinator.stores import Opened

_log = logging.getLogger("jaxft_coordinator")

# How often to look for jobs to forget.
_FORGET_EVERY_S = 10.0
# How long a group may send nothing while its process answers pings, in heartbeat timeouts.
SILENT_TIMEOUTS = 12
# Random bits in the heal ids of a coordinator without a store, which forgets those given out before.
_LIFE_BITS = 31


class Outside(Protocol):
    """Two clocks of the machine."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...


class Streams(Protocol):
    """The streams to all groups."""

    def do(self, effects: Sequence[Effect]) -> None:
        """Run the effects of an event, all but `Persist`."""

    def sessions_of(self, job: str) -> Sequence[SessionId]:
        """Return the sessions of a job that have not ended."""
        ...

    def leads(self) -> None:
        """This coordinator starts to lead."""

    def stands_down(self, reason: str) -> None:
        """It no longer leads; later events are ignored."""


class Jobs:
    """Steps jobs by name.

    Args:
        options: the options of all jobs.
        streams: where decisions are announced.
        forget_after_s: how long a job that finished, or never committed a step, is remembered after its last group
            has left.
        observer: sees each announced change; None: nothing is observed.
        clocks: of this machine.
    """

    def __init__(
        self,
        options: Options,
        streams: Streams,
        *,
        forget_after_s: float = limits.FORGET_AFTER_S,
        observer: Observer | None = None,
        clocks: Outside = time,
    ) -> None:
        self._options = options
        self._clocks = clocks
        self._streams = streams
        self._forget_after_s = forget_after_s
        self._observer = observer
        self._jobs: dict[str, Job] = {}
        # When the last message for a job came on each session.
        self._heard_s: dict[SessionId, float] = {} if observer is None else observer.heard_s
        self._journal: Journal | None = None
        self._unreadable: dict[str, str] = {}
        self._forgot_s = 0.0
        # How often each job was stopped by a failure.
        self.failures: Counter[str] = Counter()
        self._ran_s = self._clocks.monotonic()  # when anything was last done
        self._stopped: set[str] = set()  # jobs that have failed, until a group joins
        self.leading = False

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def term(self) -> int:
        """The number of this coordinator's life; 0 before it leads."""
        return self._options.term

    @property
    def blocked_s(self) -> float:
        """For how long the job that waits longest has waited for its record to be written."""
        journal = self._journal
        return max((journal.blocked_s(name) for name in self._jobs), default=0.0) if journal else 0.0

    def get(self, name: str) -> Job | None:
        return self._jobs.get(name)

    def blocked(self, name: str) -> str:
        """Say that the job waits for its record to be written; "" if it does not, or not for long."""
        if not self._is_blocked(name):
            return ""
        assert self._journal is not None
        return (
            f"the store has not taken its last decision for {self._journal.blocked_s(name):.0f} s. The coordinator's "
            "log has the reason"
        )

    def refusal(self, name: str) -> str:
        """Why no group of this job can be admitted; "" if one can."""
        if why := self._unreadable.get(name):
            return (
                f"the record of job {name!r} cannot be read ({why}). It is kept as it is, and other jobs go on. Run "
                "the version of the coordinator that wrote it, or give the job another name"
            )
        if name in self._jobs or len(self._jobs) < limits.MAX_JOBS:
            return ""
        if durable.first_to_forget(self._jobs.values()) is not None:
            return ""
        return (
            f"this coordinator serves {limits.MAX_JOBS} jobs, its limit: start another one for job {name!r}"
        )

    def begin(self, opened: Opened, journal: Journal | None, life: int | None = None) -> None:
        """Lead the jobs that the store remembers."""
        stored = journal is not None
        if stored:
            life = opened.term
        elif life is None:
            life = secrets.randbits(_LIFE_BITS)
        heals_from = HealId(life << durable.HEALS_PER_LIFE_BITS)
        self._options = replace(self._options, term=opened.term, durable=stored, heals_from=heals_from)
        self._jobs = _restored(opened, self._options, self._clocks.monotonic())
        self._unreadable = dict(opened.unreadable)
        for name in self._unreadable:
            _log.warning("%s", self.refusal(name))
        self._journal = journal
        self._stopped.clear()
        self._heard_s.clear()
        self._ran_s = self._clocks.monotonic()
        self.leading = True
        if self._observer is not None:
            self._observer.leads(opened.term)
            for job in self._jobs.values():
                self._observer.saw(job, None, (), self._clocks.monotonic())

    def stand_down(self) -> None:
        """Ignore all further events: what arrives while the coordinator stops must change no job."""
        self.leading = False

    def clear(self) -> None:
        """Forget all jobs: another coordinator leads them."""
        self._jobs.clear()

    @property
    def heartbeat_timeout_s(self) -> float:
        return self._options.heartbeat_timeout_s

    def overdue_s(self, session: SessionId) -> float:
        """How long an open session has been silent, if longer than heartbeats take to come; else 0."""
        silent_s = self._clocks.monotonic() - self._heard_s.get(session, math.inf)
        return silent_s if silent_s > self._options.heartbeat_timeout_s / 2 else 0.0

    def tick(self) -> None:
        """Look for silent groups, and for jobs to forget."""
        self._note_run()
        unix_s, alive_s = int(self._clocks.time()), self._alive_s()
        for name, job in list(self._jobs.items()):
            idle = job.idle_since is not None and job.restored_s is None and not job.groups
            if not (idle or name in self._stopped or self._is_blocked(name)):
                self.step(name, Tick(alive_s, unix_s))
        if self._clocks.monotonic() - self._forgot_s > _FORGET_EVERY_S:
            self._forgot_s = self._clocks.monotonic()
            self._forget_the_old(unix_s)

    def step(self, name: str, event: Event) -> None:
        """Apply `event` to a job. A job starts with its first Hello.

        Raises:
            IllegalEvent: its sender broke the protocol; the job is untouched.
        """
        if isinstance(event, SessionClosed):
            self._heard_s.pop(event.session, None)
        if not self.leading:
            return
        self._note_run()
        is_hello = isinstance(event, Received) and isinstance(event.message, Hello)
        job = self._jobs.get(name)
        if job is None:
            if not is_hello:
                return
            job = self._started(name)
        elif (
            not is_hello and isinstance(event, Received | SessionClosed) and event.session not in job.sessions
        ):
            return  # the job has ended this session, and the group will hear once that is durable
        if is_hello:
            self._stopped.discard(name)
        now_s = self._clocks.monotonic()
        if isinstance(event, Received):
            self._heard_s[event.session] = now_s
        try:
            after, effects = machine.step(job, event, now_s)
        except Exception as error:
            if isinstance(error, machine.IllegalEvent) and isinstance(event, Received):
                raise
            self._fail(job, event, error)
            return
        self._jobs[name] = durable.emptied(after) if after.empty else after
        self._tell(job, after, event, effects, now_s)

    # Each action of an operator returns why it cannot be done; "" once it is decided.

    def evict(self, name: str, group: GroupName, reason: str) -> str:
        """End a group's part in a job for good: its process gets the error `Evicted`, and must be started again."""
        if problem := self._why_not(name, group):
            return problem
        session = self._jobs[name].groups[group].session
        ends = (Send(session, Evicted(reason, may_return=False)), Close(session))
        self._put(name, None, lambda: self._do_all(name, ends))
        self.step(name, SessionClosed(session, reason))
        return ""

    def drain(self, name: str, group: GroupName, reason: str) -> str:
        """Let a group finish its step, hand over its place, and end with status 0."""
        if problem := self._why_not(name, group):
            return problem
        self.step(name, DrainAsked(group, reason))
        return ""

    def pause(self, name: str, *, paused: bool) -> str:
        """Let a job stand still after its current step, or continue."""
        if problem := self._why_not(name):
            return problem
        job = self._jobs[name]
        if job.empty or job.finished is not None:
            return f"job {name!r} has {'no group yet' if job.finished is None else 'finished'}"
        self.step(name, PauseAsked(paused))
        return ""

    def _why_not(self, name: str, group: GroupName | None = None) -> str:
        job = self._jobs.get(name)
        if not self.leading or job is None:
            return f"this coordinator serves no job {name!r}"
        if group is not None and group not in job.groups:
            return f"group {group!r} of job {name!r} is not connected"
        return ""

    # ---- jobs start, fail, and are forgotten ----

    def _started(self, name: str) -> Job:
        """Return a new job, forgetting an old one if there are too many."""
        if len(self._jobs) >= limits.MAX_JOBS:
            oldest = durable.first_to_forget(self._jobs.values())
            if oldest is not None:
                self._forget(
                    oldest, f"{limits.MAX_JOBS} jobs are remembered, the limit, and job {name!r} starts"
                )
        return durable.new(name, self._options)

    def _forget_the_old(self, unix_s: int) -> None:
        for job in list(self._jobs.values()):
            if durable.may_forget(job, unix_s, self._forget_after_s):
                self._forget(job, f"its last group left {unix_s - (job.idle_since or 0)} s ago")

    def _forget(self, job: Job, why: str) -> None:
        finished = "" if job.finished is None else f"finished at step {job.finished}; "
        _log.info("[%s] is forgotten: %s%s", job.name, finished, why)
        del self._jobs[job.name]
        self.failures.pop(job.name, None)
        self._stopped.discard(job.name)
        if self._observer is not None:
            self._observer.forget(job.name)
        if self._journal is not None:
            self._journal.put(job.name, Forgotten(job.name), lambda: None)

    def _fail(self, job: Job, event: Event, error: Exception) -> None:
        """Stop a job that raised an error. `job` is its state before the event."""
        again = durable.begun_again(job, self._clocks.monotonic())
        self._stop(job, again, f"to handle a {_named(event)}", error)

    def refused(self, name: str, error: Exception) -> None:
        """The store refuses a job's record: go back to the job's last durable state."""
        job = self._jobs.get(name)
        if job is None or self._journal is None:
            return
        known = self._journal.known.get(name)
        fresh = durable.new(name, self._options)
        before = fresh if known is None else durable.restored(known, self._options, self._clocks.monotonic())
        again = replace(before, last_heal_id=job.last_heal_id, term=job.term)
        self._stop(job, again, "to record a decision, which its store refuses", error)

    def _stop(self, job: Job, again: Job, where: str, error: Exception) -> None:
        """End all sessions of `job` with the reason; keep it as `again` until a group comes back.

        Also sessions that the job has ended already: if a record was refused, they have not heard.
        """
        name = job.name
        self._jobs[name] = replace(again, idle_since=int(self._clocks.time()))
        self.failures[name] += 1
        self._stopped.add(name)
        _log.error(
            "[%s] stops: the coordinator failed %s (failure %d of this job). The job resumes from its last record "
            "when its groups come back",
            name,
            where,
            self.failures[name],
            exc_info=error,
        )
        if self._observer is not None:
            self._observer.saw(self._jobs[name], None, (), self._clocks.monotonic())
        reason = (
            f"the coordinator failed {where} ({type(error).__name__}: {error!s:.300}). This is a bug in the "
            "coordinator, and its log has the traceback. Other jobs go on, and this one resumes from its last "
            "decision when its groups come back"
        )
        halted = Halted(reason, HaltKind.FAILED)
        ends = tuple(
            effect
            for session in self._streams.sessions_of(name)
            for effect in (Send(session, halted), Close(session))
        )
        self._put(name, None, lambda: self._do_all(name, ends, last=True))

    # ---- announcing ----

    def _tell(self, before: Job, job: Job, event: Event, effects: Sequence[Effect], now_s: float) -> None:
        observer = self._observer
        if observer is None or not observer.interested(before, job, event, effects):
            if not effects:
                return
            observer = None
        record = effects[0].record if effects and isinstance(effects[0], Persist) else None

        def act() -> None:
            self._do_all(job.name, effects)
            if observer is not None:
                observer.saw(job, event, effects, now_s)

        self._put(job.name, record, act)

    def _put(self, name: str, record: Record | None, act: Callable[[], None]) -> None:
        if self._journal is None:
            act()
        else:
            self._journal.put(name, record, act)

    def _do_all(self, name: str, effects: Sequence[Effect], *, last: bool = False) -> None:
        try:
            self._streams.do(effects)
        except Exception as error:
            job = self._jobs.get(name)
            if last or job is None:
                _log.exception("[%s] could not be informed that it ends", name)
                return
            again = durable.begun_again(job, self._clocks.monotonic())
            self._stop(job, again, "to announce a decision", error)

    # ---- the time ----

    def _alive_s(self) -> dict[SessionId, float]:
        """When each open session was last known to live: a stream whose process does not answer pings ends."""
        now_s = self._clocks.monotonic()
        least_s = now_s - SILENT_TIMEOUTS * self._options.heartbeat_timeout_s
        return {session: now_s if at_s >= least_s else at_s for session, at_s in self._heard_s.items()}

    def _note_run(self) -> None:
        """Note that this process runs; if it did nothing for long, tell the jobs before they learn anything else."""
        before_s, self._ran_s = self._ran_s, self._clocks.monotonic()
        seconds = self._ran_s - before_s
        if seconds <= self._options.heartbeat_timeout_s / 2:
            return
        _log.warning(
            "this coordinator did not run for %.1f s: its process was stopped, or its machine was suspended or too "
            "busy. No group is blamed for the silence; steps have waited for it",
            seconds,
        )
        for name in list(self._jobs):
            self.step(name, Suspended(seconds))

    def _is_blocked(self, name: str) -> bool:
        """Whether the job's groups wait for a record to be written: then their silence means nothing."""
        limit_s = self._options.heartbeat_timeout_s / 5
        return self._journal is not None and self._journal.blocked_s(name) > limit_s


def _restored(opened: Opened, options: Options, now_s: float) -> dict[str, Job]:
    jobs = {name: durable.restored(record, options, now_s) for name, record in opened.jobs.items()}
    for job in jobs.values():
        step = None if job.frontier is None else job.frontier.step
        _log.info("[%s] remembered: step %s, quorum %d", job.name, step, job.last_quorum_id)
    return jobs


def _named(event: Event) -> str:
    return type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
