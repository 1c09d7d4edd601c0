"""Write-ahead journal: persists each decision of a job before it is announced.

Each event gives a record, or none, and an action that announces it. The actions of one job run in order, each after
all earlier records of that job are durable. Jobs do not wait for each other: records written at the same time go into
one append, but a record that the store refuses delays only its own job. While one append is in progress the next
collects, so a slow disk costs latency and not throughput.
"""

import asyncio
import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import Record, Saved

from jaxft_coordinator.stores import Store, StoreLost

E = TypeVar("E", bound=Exception)

_log = logging.getLogger("jaxft_coordinator")

# After an error such as a full disk or too large a record: how often to retry, and how often to log it.
RETRY_S = 0.5
MENTION_S = 5.0


@dataclass(frozen=True, slots=True)
class _Entry:
    record: Record | None
    act: Callable[[], None]
    since_s: float


class Journal:
    """Writes records to a store, then runs the actions that wait for them. For one asyncio loop.

    Args:
        store: an open store.
        known: the jobs that it remembers.
        on_refused: called with the name of a job whose record the store rejects as invalid, and with the error. The
            job's pending entries are dropped; `known` keeps the durable state before them.
    """

    def __init__(
        self, store: Store, known: Mapping[str, Saved], on_refused: Callable[[str, Exception], None]
    ) -> None:
        self.known = dict(known)
        self._store = store
        self._on_refused = on_refused
        self._pipes: dict[str, deque[_Entry]] = {}
        self._retry_at: dict[str, float] = {}  # jobs whose last append failed, and when to try the next
        self._mention_s: dict[str, float] = {}  # when a failure is logged again; "" for all jobs
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def blocked_s(self, job: str) -> float:
        """How long this job's groups have heard nothing because a record is being written."""
        pipe = self._pipes.get(job)
        return time.monotonic() - pipe[0].since_s if pipe else 0.0

    def put(self, job: str, record: Record | None, act: Callable[[], None]) -> None:
        """Run `act` once `record` and all earlier records of this job are durable; at once if they are."""
        if record is None and job not in self._pipes:
            act()
            return
        self._pipes.setdefault(job, deque()).append(_Entry(record, act, time.monotonic()))
        self._empty.clear()
        self._more.set()

    async def run(self) -> None:
        """Write records and run actions, until cancelled.

        Raises:
            StoreLost: another coordinator leads now; pending actions never run.
        """
        while True:
            await self._until_more()
            together = [job for job in self._pipes if job not in self._retry_at]
            await self._write(together)
            now_s = time.monotonic()
            for job in [job for job, due_s in self._retry_at.items() if due_s <= now_s]:
                await self._write([job])

    async def _until_more(self) -> None:
        """Return when an entry was added, or a retry is due; perhaps a moment early."""
        due_s = min(self._retry_at.values(), default=None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._more.wait(), None if due_s is None else max(0.0, due_s - time.monotonic())
            )
        self._more.clear()

    async def flush(self, timeout_s: float) -> None:
        """Wait until every entry is durable and its action has run, but for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)

    async def _write(self, jobs: Sequence[str]) -> None:
        """Append the pending records of `jobs`, and run the actions that wait for them."""
        counts = {job: len(self._pipes.get(job, ())) for job in jobs}
        records = [
            entry.record for job in counts for entry in self._pipes.get(job, ()) if entry.record is not None
        ]
        try:
            if records:
                await self._store.append(records)
        except StoreLost:
            raise
        except ValueError as error:
            await self._one_by_one_or(jobs, self._drop, error)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                await self._one_by_one_or(jobs, self._try_later, error)
            else:
                self._mention("", f"all jobs are blocked until a decision can be written: {error}")
                await asyncio.sleep(RETRY_S)  # it affects all jobs
                self._more.set()
        else:
            for job, count in counts.items():
                self._retry_at.pop(job, None)
                self._done(job, count)
            if not self._pipes:
                self._empty.set()

    async def _one_by_one_or(self, jobs: Sequence[str], give_up: Callable[[str, E], None], error: E) -> None:
        """After a job has failed several, write each by itself; give up on a single job."""
        if len(jobs) == 1:
            give_up(jobs[0], error)
            return
        for job in jobs:
            await self._write([job])

    def _done(self, job: str, count: int) -> None:
        """The first `count` entries of a job are durable: run their actions."""
        pipe = self._pipes.get(job)
        if pipe is None:
            return
        for entry in list(pipe)[:count]:
            if entry.record is not None:
                self.known = durable.fold(self.known, entry.record)
        for _ in range(count):
            if self._pipes.get(job) is not pipe:
                return  # an action dropped the other entries
            pipe[0].act()
            pipe.popleft()
        if not pipe:
            del self._pipes[job]

    def _try_later(self, job: str, error: OSError) -> None:
        self._retry_at[job] = time.monotonic() + RETRY_S
        self._mention(job, f"[{job}] is blocked until a decision can be written: {error}")

    def _drop(self, job: str, error: ValueError) -> None:
        self._pipes.pop(job, None)
        self._retry_at.pop(job, None)
        self._on_refused(job, error)
        if not self._pipes:
            self._empty.set()

    def _mention(self, about: str, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._mention_s.get(about, 0.0):
            self._mention_s = {job: due_s for job, due_s in self._mention_s.items() if due_s > now_s}
            self._mention_s[about] = now_s + MENTION_S
            _log.error("%s", text)
