"""All jobs of a coordinator, as long as it leads: steps the pure machine, and has its effects done in order.

One asyncio loop owns every job, so there is no lock. With a store, effects wait until what must survive is written
(`_journal.py`), and leading ends when another coordinator has taken the store over. Without one the coordinator
always leads, and forgets everything when it dies: its groups then found their jobs anew on what they hold.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jaxft_coordinator._journal import Journal
from jaxft_coordinator.core import durable, machine
from jaxft_coordinator.core.job import Effect, Event, GroupSaid, Job, Options, Persist, Tick
from jaxft_coordinator.core.messages import Hello
from jaxft_coordinator.stores import Opened, Store, StoreLost

_log = logging.getLogger("jaxft_coordinator")


class Jobs:
    """Steps jobs by name.

    Args:
        options: what holds for all jobs.
        store: where to keep what must not be forgotten; None keeps nothing.
        tick_s: how often silence is looked for.
        do: does the effects of a turn, all but `Persist`.
        on_lead: called when this coordinator begins to lead.
        on_stand_down: called with the reason when it leads no more; nothing that is said to it counts from then on.
    """

    def __init__(
        self,
        options: Options,
        store: Store | None,
        *,
        tick_s: float,
        do: Callable[[Sequence[Effect]], None],
        on_lead: Callable[[], None],
        on_stand_down: Callable[[str], None],
    ) -> None:
        self._options = options
        self._store = store
        self._tick_s = tick_s
        self._do = do
        self._on_lead = on_lead
        self._on_stand_down = on_stand_down
        self._jobs: dict[str, Job] = {}
        self._journal: Journal | None = None
        self.leading = False

    @property
    def leader(self) -> str:
        """The address of who leads, as far as is known; "" if nobody does."""
        return "" if self._store is None else self._store.leader

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, name: str) -> Job | None:
        return self._jobs.get(name)

    async def run(self, address: str) -> None:
        """Lead, or wait until that is possible, and begin again when another has taken over; until cancelled.

        Raises:
            Exception: what the store remembers cannot be read.
        """
        if self._store is None:
            # Terms grow with the clock, so that they do over lives that remember nothing of each other, too.
            self._begin(Opened(int(time.time())))
            await self._tick_forever()
            return
        while True:
            self._begin(await self._store.open(address))
            _log.info(
                "leads as %s, under term %d, with %d jobs", address, self._options.term, len(self._jobs)
            )
            reason = await self._lead(self._store)
            self.stand_down()
            self._jobs.clear()
            _log.warning("leads no more: %s", reason)
            self._on_stand_down(reason)

    def stand_down(self) -> None:
        """Let nothing happen to any job any more: what a coordinator hears while it goes means nothing."""
        self.leading = False

    async def flush(self, timeout_s: float) -> None:
        """Write down, and tell, what waits to be, while `run` still runs."""
        if self._journal is not None:
            await self._journal.flush(timeout_s)

    async def close(self) -> None:
        """Leave the lead to another, once `run` has ended."""
        if self._store is not None:
            await self._store.close()
        self._jobs.clear()

    def step(self, name: str, event: Event) -> None:
        """Let `event` happen to a job, which begins with its first event.

        Raises:
            IllegalEvent: its sender broke the protocol; the job is untouched.
        """
        if not self.leading:
            return
        job = self._jobs.get(name) or Job(name, self._options)
        if isinstance(event, GroupSaid) and not isinstance(event.message, Hello):
            if event.session not in job.sessions:
                return  # the job has ended this session, and the group hears of it as soon as that is durable
        job, effects = machine.step(job, event, time.monotonic())
        self._jobs[name] = durable.anew(job) if job.empty else job
        if job.empty and not job.last_quorum_id:
            del self._jobs[name]
        if self._journal is None:
            self._do(effects)
            return
        record = effects[0].record if effects and isinstance(effects[0], Persist) else None
        if effects:
            self._journal.put(record, lambda: self._do(effects))

    def _begin(self, opened: Opened) -> None:
        self._options = replace(self._options, term=opened.term)
        self._jobs = _restored(opened, self._options)
        self._journal = None if self._store is None else Journal(self._store)
        self.leading = True
        self._on_lead()

    async def _lead(self, store: Store) -> str:
        """Return, when it is so, why this coordinator leads no more."""
        assert self._journal is not None
        writing = asyncio.create_task(self._journal.run())
        lost = asyncio.create_task(store.lost())
        ticking = asyncio.create_task(self._tick_forever())
        tasks = (writing, lost, ticking)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return lost.result()
            if isinstance(error := writing.exception(), StoreLost):
                return str(error)
            assert error is not None
            raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            if self._is_mute:
                continue
            for name in list(self._jobs):
                try:
                    self.step(name, Tick())
                except Exception:  # a fault in one job must not end the watch over all
                    _log.exception("job %r: the coordinator failed on a tick", name)

    @property
    def _is_mute(self) -> bool:
        """Whether groups wait for a word from here: then their silence says nothing, and nobody is judged by it."""
        patience_s = self._options.heartbeat_timeout_s / 5
        return self._journal is not None and self._journal.stands_still_s > patience_s


def _restored(opened: Opened, options: Options) -> dict[str, Job]:
    jobs: Mapping[str, Job] = {
        name: durable.restored(record, options, time.monotonic()) for name, record in opened.jobs.items()
    }
    for job in jobs.values():
        step = None if job.frontier is None else job.frontier.step
        _log.info("[%s] remembered: step %s, quorum %d", job.name, step, job.last_quorum_id)
    return dict(jobs)
