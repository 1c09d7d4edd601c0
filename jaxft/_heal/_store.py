"""The data that a donor keeps for its joiners: states pinned at a step, and the means of the steps since.

The training thread publishes each state, and calls `before_donation` before it donates one; the session's thread pins
and releases; server threads read. No thread holds the lock while it copies or reads arrays, so neither training nor
heartbeats wait for a joiner. Before the training thread donates a pinned state, it captures its stripe of that (see
`_snapshot`). The other donors keep the rest.

On an accelerator a thread starts the copies to host memory as soon as a state is pinned, during the step. A stripe
that would take, with the copies under way, more than half of the host memory available to this group's processes is
not kept: its heal ends here, and the other donors may have room.

Everything is kept only while a joiner needs it. A joiner reports each state that it holds (`holds`), and everything
before that state is freed; `release` frees the rest. Joiners at the same step with the same stripe share a snapshot.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxft_protocol.messages import WHOLE, Stripe
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._pieces import Pieces
from jaxft._base._room import available_bytes
from jaxft._heal._blob import Blob, blob_of
from jaxft._heal._snapshot import Snapshot

_log = logging.getLogger("jaxft")

# A joiner whose log has outgrown this many states is faster with a new snapshot, so its heal is abandoned. Steps of a
# small model are fast and their log is cheap, so no heal is abandoned below this many bytes or steps.
LOG_LIMIT_STATES = 2
LOG_LIMIT_MIN_BYTES = 64 << 20
LOG_LIMIT_MIN_STEPS = 8

# What joiners cost ahead of need may take this part of the available host memory, if all processes of a group are
# on one host: copies of a state on accelerators, and memory for results.
_HOST_PART = 0.5

# How many ended heals are remembered, so that their joiners get an answer at once.
_REMEMBERED_HEALS = 256


def host_part() -> float:
    """Which part of the available host memory this process may take ahead of need."""
    return _HOST_PART / jax.process_count()


class Gone(LookupError):
    """The requested data is not kept here, or no longer."""


class NotYet(LookupError):
    """The requested data is expected, but did not come by the deadline."""


# Of which state a snapshot is, and which stripe of that it keeps.
_Kept = tuple[int, Stripe]

# The parts of logged arrays that belong to some lanes.
Cut = Callable[[Sequence[np.ndarray], Span], Sequence[np.ndarray]]


@dataclass(slots=True)
class _Pin:
    step: int
    stripe: Stripe
    own: Span  # the lanes of this process
    # The states that the joiner's processes hold, by the lanes that each fetches here; None: all.
    holds: dict[Span | None, int] = field(default_factory=dict[Span | None, int])

    @property
    def kept(self) -> "_Kept":
        return self.step, self.stripe

    @property
    def held(self) -> int:
        """The state that the joiner holds of all lanes of this process; -1: none."""
        everywhere = self.holds.get(None, -1)
        some = [(span, step) for span, step in self.holds.items() if span is not None]
        if not some:
            return everywhere
        return min(
            max([everywhere, *(step for span, step in some if span.start <= lane < span.stop)])
            for lane in range(self.own.start, self.own.stop)
        )

    @property
    def needs_state(self) -> bool:
        return self.held < 0

    @property
    def needs_means_from(self) -> int:
        return max(self.step, self.held)


class _Logged:
    """The means of one step and the edits before it, made into blobs when the first joiner asks for them."""

    def __init__(
        self,
        means: Sequence[np.ndarray],
        edits: Sequence[np.ndarray],
        cut_means: Cut | None,
        cut_edits: Cut | None,
    ) -> None:
        self._means = [np.asarray(mean) for mean in means]
        self._edits = edits
        self._cut_means, self._cut_edits = cut_means, cut_edits
        self._blobs: dict[Span | None, Blob] = {}
        self.size_bytes = sum(array.nbytes for array in (*self._means, *edits))

    def blob(self, span: Span | None) -> Blob:
        if span not in self._blobs:  # two threads may each make one; they are equal
            self._blobs[span] = blob_of(_cut(self._means, span, self._cut_means))
        return self._blobs[span]

    def edits_blob(self, span: Span | None) -> Blob:
        return blob_of(_cut(self._edits, span, self._cut_edits))


def _cut(arrays: Sequence[np.ndarray], span: Span | None, cut: Cut | None) -> Sequence[np.ndarray]:
    if span is None:
        return arrays
    assert cut is not None
    return cut(arrays, span)


class StateStore:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = -1
        self._oldest = 0  # the oldest state that can still be pinned: the current one, until it is donated
        self._leaves: list[Any] = []
        self._pieces: Pieces | None = None
        self._state_bytes = 0
        self._copied: dict[_Kept, bool] = {}  # the snapshots whose copies are under way (False), or made
        self._pool_bytes = 0  # the most pinned memory that copies have taken at once, which XLA keeps
        self._pins: dict[int, _Pin] = {}
        self._over: deque[int] = deque(maxlen=_REMEMBERED_HEALS)
        self._snapshots: dict[_Kept, Snapshot] = {}
        self._log: dict[int, _Logged] = {}
        self._grows = True

    # ---- the training thread ----

    def publish(self, step: int, leaves: Sequence[Any], pieces: Pieces | None = None) -> None:
        """Make `leaves` the group's committed state, state `step`."""
        with self._changed:
            self._pieces = pieces
            self._step = self._oldest = step
            self._leaves = list(leaves)
            for kept in [kept for kept, snapshot in self._snapshots.items() if not snapshot.intact()]:
                self._abandon_state(kept, "it was overwritten")
            taken = self._take_snapshots()
            self._changed.notify_all()
        self._start_copies(taken)

    def before_donation(self) -> None:
        """Capture of the current state what joiners need from here: the donation overwrites it."""
        with self._changed:
            step, self._leaves = self._step, []
            self._oldest = step + 1
            current = {kept: snapshot for kept, snapshot in self._snapshots.items() if kept[0] == step}
        for kept, snapshot in current.items():
            self._capture(kept, snapshot)
            snapshot.let_go()

    def log(
        self,
        step: int,
        means: Sequence[np.ndarray],
        edits: Sequence[np.ndarray] = (),
        *,
        cut_means: Cut | None = None,
        cut_edits: Cut | None = None,
    ) -> bool:
        """Keep the means of a committed step, and the leaves that were edited before it, if a heal needs them.

        Returns whether one does. They must not be written to again. `cut_means` and `cut_edits` pick what belongs to
        some lanes.
        """
        with self._changed:
            if all(step < pin.needs_means_from for pin in self._pins.values()):
                return False
            self._state_bytes = sum(leaf.nbytes for leaf in self._leaves if hasattr(leaf, "nbytes"))
            self._log[step] = _Logged(means, edits, cut_means, cut_edits)
            self._bound_log()
            self._changed.notify_all()
            return bool(self._log)

    def end_log(self) -> None:
        """Keep the log, and tell joiners that no further means will come: this group takes no more steps."""
        with self._changed:
            self._grows = False
            self._changed.notify_all()

    # ---- the session ----

    def pin(self, heal_id: int, step: int, *, log_only: bool = False, stripe: Stripe = WHOLE) -> None:
        """Keep a stripe of state `step` for a heal, and the means of each step since.

        With `log_only` the joiner has the state. Until the state is donated, all of it can be read on CPU.
        """
        with self._changed:
            self._pins[heal_id] = _Pin(step, stripe, self._own, {None: step} if log_only else {})
            taken = self._take_snapshots()
            self._changed.notify_all()
        self._start_copies(taken)

    def release(self, heal_id: int) -> None:
        with self._changed:
            self._drop(heal_id)

    # ---- server threads ----

    def state(self, heal_id: int, span: Span | None = None, *, deadline_s: float) -> tuple[int, Blob]:
        """The pinned step of a heal, and the part of its state that belongs to some lanes. Raises Gone or NotYet."""
        step, snapshot = self._snapshot_for(heal_id, span, deadline_s)
        return step, snapshot.blob(span)

    def keeps(self, heal_id: int, span: Span | None = None, *, deadline_s: float) -> tuple[Stripe, bool]:
        """Which stripe of that state is kept, and whether the rest can be read as well. Raises Gone or NotYet."""
        _, snapshot = self._snapshot_for(heal_id, span, deadline_s)
        return snapshot.stripe, snapshot.live

    def _snapshot_for(self, heal_id: int, span: Span | None, deadline_s: float) -> tuple[int, Snapshot]:
        with self._changed:
            while True:
                pin = self._pins.get(heal_id)
                if pin is None and heal_id in self._over:
                    raise Gone(f"heal {heal_id} is over")
                if pin is not None:
                    snapshot = self._snapshots.get(pin.kept) if pin.needs_state else None
                    if snapshot is not None:
                        self._check_lanes(span)
                        return pin.step, snapshot
                    if pin.step < self._oldest:
                        raise Gone(f"state {pin.step} of heal {heal_id} is not kept")
                what = f"heal {heal_id} is not pinned" if pin is None else f"state {pin.step} is not reached"
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise NotYet(f"{what} yet")

    def means(self, heal_id: int, step: int, span: Span | None = None, *, deadline_s: float) -> Blob:
        """The logged means of a step. Raises Gone or NotYet."""
        return self._logged(heal_id, step, span, deadline_s).blob(span)

    def edits(self, heal_id: int, step: int, span: Span | None = None, *, deadline_s: float) -> Blob:
        """The logged edits before a step. Raises Gone or NotYet."""
        return self._logged(heal_id, step, span, deadline_s).edits_blob(span)

    def _logged(self, heal_id: int, step: int, span: Span | None, deadline_s: float) -> _Logged:
        with self._changed:
            while (logged := self._log.get(step)) is None or heal_id not in self._pins:
                pin = self._pins.get(heal_id)
                if pin is None or step < max(pin.needs_means_from, self._step):
                    raise Gone(f"the means of step {step} are not kept for heal {heal_id}")
                if not self._grows:
                    raise Gone(f"it has left the job at step {self._step}, before step {step}")
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise NotYet(f"step {step} is not committed yet")
            self._check_lanes(span)
        return logged

    def holds(self, heal_id: int, step: int, span: Span | None = None) -> None:
        """Note that the joiner holds state `step` of some lanes, and needs nothing before it for them."""
        with self._changed:
            pin = self._pins.get(heal_id)
            if pin is not None and step >= pin.step:
                pin.holds[span] = max(pin.holds.get(span, -1), step)
                self._trim()

    # ---- copies, in any thread ----

    def _start_copies(self, taken: dict[_Kept, Snapshot]) -> None:
        """Have an accelerator copy new snapshots to the host, during the step."""
        for kept, snapshot in taken.items():
            if snapshot.copied_bytes:
                self._start_copy(kept, snapshot)

    def _start_copy(self, kept: _Kept, taken: Snapshot) -> None:
        with self._changed:
            if self._snapshots.get(kept) is not taken:
                return
            if why := self._why_no_room(taken):
                self._abandon_state(kept, why)
                return
            self._copied[kept] = False
        copied_mb = taken.copied_bytes / 1e6
        _log.info("copies state %d to the host for joiners, during the step: %.1f MB", kept[0], copied_mb)
        thread = threading.Thread(
            target=self._capture, args=(kept, taken), name="jaxft-snapshot", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning(
                "State %d is copied by the training thread, since there is no other: %s.", kept[0], error
            )

    def _capture(self, kept: _Kept, snapshot: Snapshot) -> None:
        """Protect a stripe from its donation. A failure ends the heals that need it, and not the training here."""
        try:
            snapshot.capture(lambda: self._snapshots.get(kept) is snapshot)
        except Exception as error:  # such as out of memory
            with self._changed:
                if self._snapshots.get(kept) is snapshot:
                    self._abandon_state(kept, f"it could not be captured: {error!r}")
        with self._changed:
            if self._snapshots.get(kept) is snapshot and kept in self._copied:
                self._copied[kept] = True
                made = (self._snapshots[kept] for kept, whole in self._copied.items() if whole)
                self._pool_bytes = max(self._pool_bytes, sum(snapshot.pinned_bytes for snapshot in made))

    # ---- under the lock ----

    @property
    def _own(self) -> Span:
        return Span(0, 1) if self._pieces is None else self._pieces.own

    def _check_lanes(self, span: Span | None) -> None:
        """Raise Gone if this process does not hold the lanes of a joiner."""
        own, whole = self._own, self._pieces is None or self._pieces.whole
        if span is None and whole:
            return
        if span is None or self._pieces is None or not own.start <= span.start < span.stop <= own.stop:
            asked = "whole leaves" if span is None else f"the lanes from {span.start} up to {span.stop}"
            raise Gone(
                f"{asked} are asked for, and this process holds the lanes from {own.start} up to {own.stop}"
            )

    def _take_snapshots(self) -> dict[_Kept, Snapshot]:
        """Keep of the current state what joiners need; return the snapshots that are new."""
        if self._oldest != self._step:
            return {}
        needed = {pin.kept for pin in self._pins.values() if pin.step == self._step and pin.needs_state}
        new = needed - self._snapshots.keys()
        for kept in new:
            taken_bytes = sum(snapshot.pinned_bytes for snapshot in self._snapshots.values())
            self._snapshots[kept] = Snapshot(self._leaves, self._pieces, kept[1], taken_bytes=taken_bytes)
        return {kept: self._snapshots[kept] for kept in new}

    def _why_no_room(self, new: Snapshot) -> str:
        """Why host memory does not allow for the copy of a snapshot, with the copies under way; "": it does."""
        copied = [*(self._snapshots[kept] for kept in self._copied), new]
        pinned_bytes = max(0, sum(copy.pinned_bytes for copy in copied) - self._pool_bytes)
        more_bytes = pinned_bytes + sum(copy.missing_bytes for copy in copied)
        # Read last: memory taken meanwhile is counted twice, and never missed.
        part, free_bytes = host_part(), available_bytes()
        if free_bytes is None or more_bytes <= part * free_bytes or not (pinned_bytes or new.missing_bytes):
            return ""
        return (
            f"copies for joiners take {more_bytes / 1e9:.1f} GB more with its, and may take {part:.0%} of the "
            f"{free_bytes / 1e9:.1f} GB of host memory that are available to this process. Use hosts with more "
            "memory, or shard the state over more of them"
        )

    def _drop(self, heal_id: int) -> None:
        if self._pins.pop(heal_id, None) is not None:
            self._over.append(heal_id)
        self._trim()
        self._changed.notify_all()

    def _trim(self) -> None:
        for kept in self._snapshots.keys() - {pin.kept for pin in self._pins.values() if pin.needs_state}:
            del self._snapshots[kept]
            self._copied.pop(kept, None)
        oldest = min((pin.needs_means_from for pin in self._pins.values()), default=None)
        for step in [step for step in self._log if oldest is None or step < oldest]:
            del self._log[step]

    def _abandon_state(self, kept: _Kept, why: str) -> None:
        for heal_id in [one for one, pin in self._pins.items() if pin.kept == kept and pin.needs_state]:
            _log.error("Abandoned heal %d: state %d is lost, because %s.", heal_id, kept[0], why)
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
