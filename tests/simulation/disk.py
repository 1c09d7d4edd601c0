"""What the coordinators share: the durable records, and who may write them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxft_coordinator.core import durable
from jaxft_coordinator.core.job import Record, Saved

if TYPE_CHECKING:
    from .world import World

JOB = "job"


class Disk:
    def __init__(self, world: "World") -> None:
        self.term = 0
        self.has_lied = False
        self.is_new = False
        self._world = world
        self._known: Mapping[str, Saved] = {}
        self._before: Mapping[str, Saved] = {}  # without the last record

    @property
    def saved(self) -> Saved | None:
        return self._known.get(JOB)

    def open(self) -> tuple[int, Saved | None]:
        """Lead from now on: no coordinator of a lower term can append any more."""
        self.term += 1
        return self.term, self.saved

    def append(self, term: int, record: Record) -> bool:
        """Make `record` durable; return False if another term has begun."""
        if term != self.term:
            return False
        self._before, before = self._known, self.saved
        self._known = durable.fold(self._known, record)
        self._world.truth.durable(before, self.saved)
        return True

    def lose_all(self) -> None:
        """There is no store, or its folder is gone."""
        if not self._known:
            return
        self.is_new = True
        self._known = self._before = {}
        self._world.sometimes.note("amnesia")
        self._world.truth.amnesia()

    def lose_the_last(self) -> None:
        """The disk had lied: what was said to be durable is not there."""
        if self._known is self._before:
            return
        self.has_lied = True
        self._known = self._before
        self._world.sometimes.note("lying disk")
        self._world.truth.forgets(self.saved)
