"""The data that a donor keeps for its joiners: states pinned at a step, and the means of the steps since.

The training thread publishes each state, and calls `before_donation` before it donates one; the session's thread pins
and releases; server threads read. No thread holds the lock while it copies or reads arrays, so neither training nor
heartbeats wait for a joiner. Before the training thread donates a pinned state, it captures the leaves that no joiner
has asked for yet (see `_snapshot`).

Everything is kept only while a joiner needs it. A joiner that holds a state says so (`holds`), and everything before
that state is freed; `release` frees the rest. Joiners pinned at the same step share a snapshot.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxft._heal._blob import Blob, blob_of
from jaxft._heal._snapshot import Snapshot

_log = logging.getLogger("jaxft")

# A joiner whose log has outgrown this many states is faster with a new snapshot, so its heal is abandoned. Steps of a
# small model are fast and their log is cheap, so no heal is abandoned below this many bytes or steps.
LOG_LIMIT_STATES = 2
LOG_LIMIT_MIN_BYTES = 64 << 20
LOG_LIMIT_MIN_STEPS = 8

# How many ended heals are remembered, so that their joiners get an answer at once.
_REMEMBERED_HEALS = 256


class Gone(LookupError):
    """The requested data is not kept here, or no longer."""


class NotYet(LookupError):
    """The requested data is expected, but did not come by the deadline."""


@dataclass(slots=True)
class _Pin:
    step: int
    held: int = -1  # the state that the joiner holds

    @property
    def needs_state(self) -> bool:
        return self.held < 0

    @property
    def needs_means_from(self) -> int:
        return max(self.step, self.held)


class _Logged:
    """The means of one step and the edits before it, made into blobs when the first joiner asks for them."""

    def __init__(self, means: Sequence[np.ndarray], edits: Sequence[np.ndarray]) -> None:
        self._means = [np.asarray(mean) for mean in means]
        self._edits = edits
        self._blob: Blob | None = None
        self.size_bytes = sum(array.nbytes for array in (*self._means, *edits))

    @property
    def blob(self) -> Blob:
        if self._blob is None:  # two threads may each make one; they are equal
            self._blob = blob_of(self._means)
        return self._blob

    @property
    def edits_blob(self) -> Blob:
        return blob_of(self._edits)


class StateStore:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = -1
        self._oldest = 0  # the oldest state that can still be pinned: the current one, until it is donated
        self._leaves: list[Any] = []
        self._state_bytes = 0
        self._pins: dict[int, _Pin] = {}
        self._over: deque[int] = deque(maxlen=_REMEMBERED_HEALS)
        self._snapshots: dict[int, Snapshot] = {}
        self._log: dict[int, _Logged] = {}

    # ---- the training thread ----

    def publish(self, step: int, leaves: Sequence[Any]) -> None:
        """Make `leaves` the group's committed state, state `step`."""
        with self._changed:
            self._step = self._oldest = step
            self._leaves = list(leaves)
            for kept in [kept for kept, snapshot in self._snapshots.items() if not snapshot.intact()]:
                self._abandon_state(kept, "it was overwritten")
            self._take_snapshot()
            self._changed.notify_all()

    def before_donation(self) -> None:
        """Capture the current state if a joiner needs it: the donation overwrites it."""
        with self._changed:
            step, self._leaves = self._step, []
            self._oldest = step + 1
            snapshot = self._snapshots.get(step)
        if snapshot is None:
            return
        try:
            snapshot.capture(lambda: self._snapshots.get(step) is snapshot)
        except Exception as error:  # such as out of memory: must not end the donor's own training
            with self._changed:
                self._abandon_state(step, f"it could not be captured: {error!r}")

    def log(self, step: int, means: Sequence[np.ndarray], edits: Sequence[np.ndarray] = ()) -> None:
        """Keep the means of a committed step, and the leaves that were edited before it, if a heal needs them.

        They must not be written to again.
        """
        with self._changed:
            if all(step < pin.needs_means_from for pin in self._pins.values()):
                return
            self._state_bytes = sum(leaf.nbytes for leaf in self._leaves if hasattr(leaf, "nbytes"))
            self._log[step] = _Logged(means, edits)
            self._bound_log()
            self._changed.notify_all()

    # ---- the session ----

    def pin(self, heal_id: int, step: int, *, log_only: bool = False) -> None:
        """Keep state `step` for a heal, unless the joiner has it (`log_only`), and the means of each step since."""
        with self._changed:
            self._pins[heal_id] = _Pin(step, held=step if log_only else -1)
            self._take_snapshot()
            self._changed.notify_all()

    def release(self, heal_id: int) -> None:
        with self._changed:
            self._drop(heal_id)

    # ---- server threads ----

    def state(self, heal_id: int, *, deadline_s: float) -> tuple[int, Blob]:
        """The pinned step of a heal, and its state. Raises Gone or NotYet."""
        with self._changed:
            while True:
                pin = self._pins.get(heal_id)
                if pin is None and heal_id in self._over:
                    raise Gone(f"heal {heal_id} is over")
                if pin is not None:
                    snapshot = self._snapshots.get(pin.step) if pin.needs_state else None
                    if snapshot is not None:
                        step = pin.step
                        break
                    if pin.step < self._oldest:
                        raise Gone(f"state {pin.step} of heal {heal_id} is not kept")
                what = f"heal {heal_id} is not pinned" if pin is None else f"state {pin.step} is not reached"
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise NotYet(f"{what} yet")
        return step, snapshot.blob

    def means(self, heal_id: int, step: int, *, deadline_s: float) -> Blob:
        """The logged means of a step. Raises Gone or NotYet."""
        return self._logged(heal_id, step, deadline_s).blob

    def edits(self, heal_id: int, step: int, *, deadline_s: float) -> Blob:
        """The logged edits before a step. Raises Gone or NotYet."""
        return self._logged(heal_id, step, deadline_s).edits_blob

    def _logged(self, heal_id: int, step: int, deadline_s: float) -> _Logged:
        with self._changed:
            while (logged := self._log.get(step)) is None or heal_id not in self._pins:
                pin = self._pins.get(heal_id)
                if pin is None or step < max(pin.needs_means_from, self._step):
                    raise Gone(f"the means of step {step} are not kept for heal {heal_id}")
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise NotYet(f"step {step} is not committed yet")
        return logged

    def holds(self, heal_id: int, step: int) -> None:
        """Note that the joiner holds state `step` and needs nothing before it."""
        with self._changed:
            pin = self._pins.get(heal_id)
            if pin is not None and step >= pin.step:
                pin.held = max(pin.held, step)
                self._trim()

    # ---- under the lock ----

    def _take_snapshot(self) -> None:
        if self._oldest != self._step or self._step in self._snapshots:
            return
        if any(pin.step == self._step and pin.needs_state for pin in self._pins.values()):
            self._snapshots[self._step] = Snapshot(self._leaves)

    def _drop(self, heal_id: int) -> None:
        if self._pins.pop(heal_id, None) is not None:
            self._over.append(heal_id)
        self._trim()
        self._changed.notify_all()

    def _trim(self) -> None:
        states = {pin.step for pin in self._pins.values() if pin.needs_state}
        for step in self._snapshots.keys() - states:
            del self._snapshots[step]
        oldest = min((pin.needs_means_from for pin in self._pins.values()), default=None)
        for step in [step for step in self._log if oldest is None or step < oldest]:
            del self._log[step]

    def _abandon_state(self, step: int, why: str) -> None:
        for heal_id in [one for one, pin in self._pins.items() if pin.step == step and pin.needs_state]:
            _log.error("Abandoned heal %d: state %d is lost, because %s.", heal_id, step, why)
            self._drop(heal_id)

    def _bound_log(self) -> None:
        """Abandon the oldest heals while the log is larger than a new snapshot would be worth."""
        limit_bytes = max(LOG_LIMIT_STATES * self._state_bytes, LOG_LIMIT_MIN_BYTES)
        while len(self._log) > LOG_LIMIT_MIN_STEPS:
            log_bytes = sum(logged.size_bytes for logged in self._log.values())
            if log_bytes <= limit_bytes:
                return
            heal_id = min(self._pins, key=lambda heal_id: self._pins[heal_id].needs_means_from)
            _log.warning(
                "Abandoned heal %d: its log has %d steps (%.0f MB). The joiner needs a new heal.",
                heal_id,
                len(self._log),
                log_bytes / 1e6,
            )
            self._drop(heal_id)
