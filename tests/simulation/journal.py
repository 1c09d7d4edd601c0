"""A coordinator's `Journal` on the simulated disk: records first, then their announcements.

The actions of one job run in order, each after all earlier records of that job are durable. All that waits goes into
one append; a record that the store refuses stops its own job alone.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jaxft_protocol.coordinator.job import Record, Saved

if TYPE_CHECKING:
    from .coordinator import Life

Entry = tuple[Record | None, Callable[[], None], float]


class Journal:
    def __init__(self, life: "Life", known: Mapping[str, Saved]) -> None:
        self.known = dict(known)
        self.writing: list[tuple[str, int]] = []  # of each job, how many entries are being written
        self.wrote = False  # a record is durable, and its announcements are under way
        self._life = life
        self._world = life.world
        self._pipes: dict[str, deque[Entry]] = {}

    def blocked_s(self, job: str) -> float:
        pipe = self._pipes.get(job)
        return self._life.clocks.monotonic() - pipe[0][2] if pipe else 0.0

    @property
    def pending(self) -> bool:
        return bool(self._pipes)

    def put(self, job: str, record: Record | None, act: Callable[[], None]) -> None:
        if record is None and job not in self._pipes and not self._life.stands:
            act()
            return
        self._pipes.setdefault(job, deque()).append((record, act, self._life.clocks.monotonic()))
        self.go_on()

    def go_on(self) -> None:
        """Write what waits, unless something is being written."""
        life, setting = self._life, self._world.setting
        if self.writing or not self._pipes or life.dead or life.stands:
            return
        if not any(record for pipe in self._pipes.values() for record, _, _ in pipe):
            self._written()
            return
        self.writing = [(job, len(pipe)) for job, pipe in self._pipes.items()]
        if life.takes_an_effect():
            return
        held_s = max(0.0, life.disk_held_s - self._world.now_s)
        self._world.after(held_s + self._world.random() * setting.disk_s, self._written)

    def append(self) -> bool:
        """Make all that is being written durable, as the life dies; return whether there was anything."""
        records = [
            record for job, count in self.writing for record, _, _ in list(self._pipes[job])[:count] if record
        ]
        return any([self._world.disk.append(self._life.number, record) for record in records])

    def tell_unwritten(self) -> None:
        self.writing, pipes = [], self._pipes
        self._pipes = {}
        for pipe in pipes.values():
            for _, act, _ in pipe:
                act()

    def _written(self) -> None:
        life = self._life
        if life.dead:
            return
        batch = self.writing or [(job, len(pipe)) for job, pipe in self._pipes.items()]
        self.writing = []
        for job, count in batch:
            if not self._finish(job, count):
                life.fenced()
                return
        if life.stands or life.dead:
            return
        self.go_on()

    def _finish(self, job: str, count: int) -> bool:
        """Append the first entries of a job, and make their announcements. Return False if another life leads."""
        pipe = self._pipes.get(job)
        for _ in range(count):
            if pipe is None or not pipe or self._pipes.get(job) is not pipe or self._life.dead:
                break
            record, act, _ = pipe[0]
            if record is not None and self._world.disk.refuses():
                self._drop(job)
                return True
            if record is not None and not self._world.disk.append(self._life.number, record):
                return False
            if record is not None:
                self.known = dict(self._world.disk.known)
            self.wrote = record is not None
            if self._life.stands:
                pipe[0] = (None, act, pipe[0][2])
                return True
            act()
            self.wrote = False
            if self._pipes.get(job) is pipe and pipe:
                pipe.popleft()
        if pipe is not None and not pipe and self._pipes.get(job) is pipe:
            del self._pipes[job]
        return True

    def _drop(self, job: str) -> None:
        """The store refuses a record: the job's other entries go with it."""
        self._world.sometimes.note("record refused")
        del self._pipes[job]
        self._life.refused(job)
