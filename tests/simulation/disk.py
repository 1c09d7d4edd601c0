"""The coordinators' shared disk: the durable records, and who may write them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxft_coordinator.stores import Opened, records
from jaxft_protocol.coordinator import bounds, durable
from jaxft_protocol.coordinator.job import Record, Saved

from .truth import Violation

if TYPE_CHECKING:
    from .world import World

JOB = "job"


class Disk:
    def __init__(self, world: "World") -> None:
        self.life = 0
        self.has_lied = False
        self.is_new = False
        self._world = world
        self._known: Mapping[str, Saved] = {}
        self._before: Mapping[str, Saved] = {}  # without the last record
        self._last = JOB  # of which job that is

    @property
    def saved(self) -> Saved | None:
        return self._known.get(JOB)

    @property
    def known(self) -> Mapping[str, Saved]:
        return self._known

    def refuses(self) -> bool:
        """Whether the store finds the next record invalid: a passing fault of the store."""
        setting, world = self._world.setting, self._world
        return bool(setting.refuses) and not world.calm and world.random() < setting.refuses

    def open(self) -> tuple[int, Opened]:
        """Lead from now on: no earlier life can append any more. Return which life it is, and the known jobs.

        Without a store a life begins with a clock that may be behind, and with nothing.
        """
        self.life += 1
        if not self._world.setting.memoryless:
            return self.life, Opened(self.life, self._known)
        self.lose_all()
        return self.life, Opened(1000 + int(1000 * self._world.random()))

    def append(self, life: int, record: Record) -> bool:
        """Make `record` durable; return False if another life has begun."""
        if life != self.life:
            return False
        if why := bounds.problem(record) or _differs(record):
            raise Violation("each decision can be written down", why)
        self._before, before, self._last = self._known, self.saved, record.job
        self._known = durable.fold(self._known, record)
        if record.job == JOB:
            self._world.truth.durable(before, self.saved)
        return True

    def lose_all(self) -> None:
        """There is no store, or its folder is gone."""
        self._forget_drains()
        if not self._known:
            return
        self.is_new = True
        self._known = self._before = {}
        self._world.sometimes.note("amnesia")
        self._world.truth.forgets_all()

    def _forget_drains(self) -> None:
        for process in self._world.incarnations.values():
            process.drains_since = None

    def lose_the_last(self) -> None:
        """The disk had lied: a durable record is not there."""
        if self._known is self._before:
            return
        self._forget_drains()
        self.has_lied = True
        self._known = self._before
        self._world.sometimes.note("lying disk")
        if self._last == JOB:
            self._world.truth.forgets(self.saved)


def _differs(record: Record) -> str:
    data = records.encode(record)
    return "" if records.decode(data) == record else f"{record} is read as {records.decode(data)}"
