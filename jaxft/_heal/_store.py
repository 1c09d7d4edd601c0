"""What a donor keeps for its joiners: states that are pinned at a step, and the means of the steps since.

The training thread publishes each state and asks leave before it donates one; the session's thread pins and
releases; server threads read. A pin of the state in hand costs nothing until the moment of its donation:

* On the CPU backend a host view of an array is no copy, and JAX copies an array that has a live view instead of
  donating it. So the view is a copy-on-write snapshot.
* Elsewhere the view is a copy in host memory, made by the first server thread that asks, or at the latest by the
  training thread before it donates.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._heal._blob import Blob, BlobLayout, LeafType

_log = logging.getLogger("jaxft")

# A log that has outgrown this many states is no way to catch up; a new snapshot is.
LOG_LIMIT_STATES = 2
LOG_LIMIT_MIN_STEPS = 8


class Gone(LookupError):
    """What was asked for is not kept here, or not any more."""


class NotYet(LookupError):
    """What was asked for is expected, but was not there by the deadline."""


@dataclass(slots=True)
class _Pin:
    step: int
    snapshot: Blob | None = None
    sources: list[jax.Array] = field(default_factory=list[jax.Array])


class StateStore:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = -1
        self._leaves: list[jax.Array] = []
        self._pins: dict[int, _Pin] = {}
        self._log: dict[int, list[np.ndarray]] = {}

    # ---- the training thread ----

    def publish(self, step: int, leaves: Sequence[jax.Array]) -> None:
        """Say that `leaves` are now the group's committed state, state `step`."""
        with self._changed:
            self._step = step
            self._leaves = list(leaves)
            for heal_id, pin in list(self._pins.items()):
                if any(source.is_deleted() for source in pin.sources):
                    _log.error("state %d was overwritten under heal %d; it is given up", pin.step, heal_id)
                    self._drop(heal_id)
                pin.sources = []
            self._changed.notify_all()

    def before_donation(self) -> None:
        """Make every snapshot of the present state that is still to be made; it is overwritten next."""
        with self._changed:
            for pin in self._pins.values():
                if pin.step == self._step:
                    self._materialise(pin)
            # The present state must not be read after this.
            self._leaves = []

    def log(self, step: int, means: list[np.ndarray]) -> None:
        """Keep the means of a committed step, if a heal needs them. They are never written to again."""
        with self._changed:
            if not self._pins:
                return
            self._log[step] = means
            self._bound_log()
            self._changed.notify_all()

    # ---- the session ----

    def pin(self, heal_id: int, step: int) -> None:
        """Keep state `step` for a heal, and the means of all steps from `step` on."""
        with self._changed:
            self._pins[heal_id] = _Pin(step)
            self._changed.notify_all()

    def release(self, heal_id: int) -> None:
        with self._changed:
            self._drop(heal_id)

    # ---- server threads ----

    def state(self, heal_id: int, *, deadline_s: float) -> tuple[int, Blob]:
        """The pinned step of a heal and its state. Raises Gone or NotYet."""
        with self._changed:
            while True:
                pin = self._pins.get(heal_id)
                if pin is not None and pin.step == self._step and self._leaves:
                    self._materialise(pin)
                if pin is not None and pin.snapshot is not None:
                    return pin.step, pin.snapshot
                if pin is not None and pin.step < self._step:
                    raise Gone(f"state {pin.step} of heal {heal_id} is not kept")
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise NotYet(f"heal {heal_id} is not pinned yet")

    def means(self, heal_id: int, step: int, *, deadline_s: float) -> list[np.ndarray]:
        """The logged means of a step. Raises Gone or NotYet."""
        with self._changed:
            while True:
                pin = self._pins.get(heal_id)
                if pin is None or step < pin.step:
                    raise Gone(f"the means of step {step} are not kept for heal {heal_id}")
                if step in self._log:
                    return self._log[step]
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise NotYet(f"step {step} is not committed yet")

    # ---- under the lock ----

    def _materialise(self, pin: _Pin) -> None:
        if pin.snapshot is not None:
            return
        held = [_Held(leaf) for leaf in self._leaves]
        pin.snapshot = Blob(BlobLayout.of([leaf.type for leaf in held]), held)
        pin.sources = [leaf for leaf in self._leaves if _is_viewed(leaf)]

    def _drop(self, heal_id: int) -> None:
        self._pins.pop(heal_id, None)
        oldest = min((pin.step for pin in self._pins.values()), default=None)
        for step in list(self._log):
            if oldest is None or step < oldest:
                del self._log[step]
        self._changed.notify_all()

    def _bound_log(self) -> None:
        """Give up the oldest heal when the log has outgrown what catching up by it is worth."""
        state_bytes = sum(leaf.nbytes for leaf in self._leaves)
        log_bytes = sum(mean.nbytes for means in self._log.values() for mean in means)
        if len(self._log) <= LOG_LIMIT_MIN_STEPS or log_bytes <= LOG_LIMIT_STATES * state_bytes:
            return
        heal_id = min(self._pins, key=lambda heal_id: self._pins[heal_id].step)
        _log.warning(
            "heal %d is given up: %d steps (%.0f MB) have been logged for it; the joiner must begin anew",
            heal_id,
            len(self._log),
            log_bytes / 1e6,
        )
        self._drop(heal_id)


class _Held:
    """One leaf of a snapshot: host views (or copies) of its pieces, joined when somebody asks for it."""

    def __init__(self, leaf: jax.Array) -> None:
        if _is_key(leaf):
            # The array beneath a key is its own buffer: a view of it would not be seen by the donation.
            data = np.array(jax.random.key_data(leaf))
            self._pieces: list[tuple[tuple[slice, ...], np.ndarray]] = [((), data)]
            self.type = LeafType(data.shape, data.dtype.name)
            return
        self._pieces = [
            (shard.index, np.asarray(shard.data))
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]
        self.type = LeafType(tuple(leaf.shape), leaf.dtype.name)

    def host(self) -> np.ndarray:
        """The whole leaf, C-contiguous."""
        if len(self._pieces) > 1:
            whole = np.empty(self.type.shape, np.dtype(self.type.dtype))
            for index, piece in self._pieces:
                whole[index] = piece
            # Server threads may do this twice at once; both results are right, and one is kept.
            self._pieces = [((), whole)]
        return np.ascontiguousarray(self._pieces[0][1])


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_viewed(leaf: jax.Array) -> bool:
    """Whether a host view of the leaf is the leaf's own memory, so that its donation must be seen to copy."""
    return not _is_key(leaf) and all(device.platform == "cpu" for device in leaf.devices())
