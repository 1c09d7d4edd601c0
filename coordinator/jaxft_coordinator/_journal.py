"""Write-ahead journal: persists each decision of a job before it is announced.

Each turn of the machine gives a record, or none, and an act that tells of it. The acts of one job are done in the
order in which they came, each after every record of that job before it. Jobs do not wait for each other: what they
write at the same time goes into one append, but a record that the store refuses holds up its own job only. While one
append is under way the next collects, so a slow disk costs latency and not throughput.
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

# A full disk, or a record that is too big: how often to try again, and how often to say so.
RETRY_S = 0.5
MENTION_S = 5.0


@dataclass(frozen=True, slots=True)
class _Entry:
    record: Record | None
    act: Callable[[], None]
    since_s: float


class Journal:
    """Writes records to a store, and does what waits for them. All calls come from one asyncio loop.

    Args:
        store: an open one.
        known: what it remembers.
        on_refused: called with the name of a job whose record makes no sense to the store, and with the error. What
            the job still had to say is dropped; `known` has what was durable before it.
    """

    def __init__(
        self, store: Store, known: Mapping[str, Saved], on_refused: Callable[[str, Exception], None]
    ) -> None:
        self.known = dict(known)
        self._store = store
        self._on_refused = on_refused
        self._pipes: dict[str, deque[_Entry]] = {}
        self._apart: dict[str, float] = {}  # jobs whose last append failed, and when the next one is due
        self._mention_s: dict[str, float] = {}  # when a failure is logged again; "" for one that concerns all
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def waits_s(self, job: str) -> float:
        """For how long nothing could be told to this job's groups, because a record is being written."""
        pipe = self._pipes.get(job)
        return time.monotonic() - pipe[0].since_s if pipe else 0.0

    def put(self, job: str, record: Record | None, act: Callable[[], None]) -> None:
        """Do `act` once `record`, and all of this job before it, is durable: at once, if all is."""
        if record is None and job not in self._pipes:
            act()
            return
        self._pipes.setdefault(job, deque()).append(_Entry(record, act, time.monotonic()))
        self._empty.clear()
        self._more.set()

    async def run(self) -> None:
        """Write and act, until cancelled.

        Raises:
            StoreLost: another coordinator leads now; what waits is never done.
        """
        while True:
            await self._until_more()
            together = [job for job in self._pipes if job not in self._apart]
            await self._write(together)
            now_s = time.monotonic()
            for job in [job for job, due_s in self._apart.items() if due_s <= now_s]:
                await self._write([job])

    async def _until_more(self) -> None:
        """Return when something was put, or a job apart is due; perhaps a moment before that."""
        due_s = min(self._apart.values(), default=None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._more.wait(), None if due_s is None else max(0.0, due_s - time.monotonic())
            )
        self._more.clear()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all that was put is durable and done, or for `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)

    async def _write(self, jobs: Sequence[str]) -> None:
        """Append what waits of `jobs`, and do what waited for it."""
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
            await self._apart_or(jobs, self._drop, error)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                await self._apart_or(jobs, self._try_later, error)
            else:
                self._mention("", f"all jobs stand still until a decision can be written down: {error}")
                await asyncio.sleep(RETRY_S)  # it concerns all jobs
                self._more.set()
        else:
            for job, count in counts.items():
                self._apart.pop(job, None)
                self._done(job, count)
            if not self._pipes:
                self._empty.set()

    async def _apart_or(self, jobs: Sequence[str], give_up: Callable[[str, E], None], error: E) -> None:
        """Write each of several jobs by itself, for one of them has failed all; or give up on the only one."""
        if len(jobs) == 1:
            give_up(jobs[0], error)
            return
        for job in jobs:
            await self._write([job])

    def _done(self, job: str, count: int) -> None:
        """The first `count` entries of a job are durable: tell of them."""
        pipe = self._pipes.get(job)
        if pipe is None:
            return
        for entry in list(pipe)[:count]:
            if entry.record is not None:
                self.known = durable.fold(self.known, entry.record)
        for _ in range(count):
            if self._pipes.get(job) is not pipe:
                return  # what it still had to say was dropped meanwhile
            pipe[0].act()
            pipe.popleft()
        if not pipe:
            del self._pipes[job]

    def _try_later(self, job: str, error: OSError) -> None:
        self._apart[job] = time.monotonic() + RETRY_S
        self._mention(job, f"[{job}] stands still until a decision can be written down: {error}")

    def _drop(self, job: str, error: ValueError) -> None:
        self._pipes.pop(job, None)
        self._apart.pop(job, None)
        self._on_refused(job, error)
        if not self._pipes:
            self._empty.set()

    def _mention(self, about: str, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._mention_s.get(about, 0.0):
            self._mention_s = {job: due_s for job, due_s in self._mention_s.items() if due_s > now_s}
            self._mention_s[about] = now_s + MENTION_S
            _log.error("%s", text)
