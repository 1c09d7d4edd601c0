"""The state that this group holds, offered to joiners and reported to the coordinator as digests."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxft_protocol.messages import Step
from jaxft_protocol.replica.state import Digested

from jaxft._arrays._device_digest import PendingDigest, StateDigest, period_steps
from jaxft._heal._store import StateStore
from jaxft._programs._programs import Local, Programs
from jaxft._replica._session import Session


class HeldState:
    """The leaves of a state and its step. The training thread owns it."""

    def __init__(self, session: Session, store: StateStore, step: int, *, digest_every: int | None) -> None:
        self.step = step
        self.leaves: Sequence[jax.Array] = ()  # what the caller passed, or the state after it
        self.newest: Sequence[jax.Array] | None = None  # the last one that a step or a heal made
        self._session = session
        self._store = store
        self._digests = StateDigest()
        # Of the held state, even if the work based on it is dropped.
        self._digest: PendingDigest | None = None
        self._digest_every = digest_every

    def publish(self) -> None:
        """Offer the state to joiners."""
        self._store.publish(self.step, self.leaves)

    def replace(self, step: int, leaves: Sequence[jax.Array]) -> None:
        """Replace the held state."""
        self.step, self.leaves, self.newest = step, leaves, leaves
        self._digest = None
        self.publish()

    def advance(self, programs: Programs, means: list[np.ndarray], local: Local | None, *, skip: bool) -> Any:
        """Apply the means and return the metrics. The only place that donates a state.

        Args:
            programs: what to apply the means with.
            means: the means of the step.
            local: this group's local values of the step, if it computed a shard.
            skip: keep the state, but count the step.
        """
        self._store.log(self.step, means)
        if self._session.wants_digest(Step(self.step)):
            self.say_digest(self.step)  # last chance: the state is about to be overwritten
        # Also for a skipped step: the next one overwrites its state.
        self._store.before_donation()
        if skip:
            leaves, metrics = self.leaves, programs.blank_metrics()
        else:
            leaves, metrics = programs.apply(self.leaves, means, local)
        try:
            jax.block_until_ready(leaves)
        finally:
            # Also if Ctrl-C came meanwhile: the state before is consumed.
            self.replace(self.step + 1, leaves)
        return metrics

    def digest_period(self) -> int:
        """The number of steps between comparisons of digests."""
        if self._digest_every is None:
            platform = next(iter(self.leaves[0].devices())).platform if self.leaves else "cpu"
            self._digest_every = period_steps(sum(leaf.nbytes for leaf in self.leaves), platform)
        return self._digest_every

    def start_digest(self, quorum_step: int) -> None:
        """Start the digest of the state that a step starts from, if the coordinator compares it.

        It does so in the first step of each quorum, so that no group takes part with a different state for even one
        step, and then every `digest_every` steps. All members follow the same rule.
        """
        due = self.step == quorum_step or self.step % self.digest_period() == 0
        if due and self._digest is None:
            self._digest = self._digests.start(self.leaves)

    def started_digest(self) -> int | None:
        """The digest, if one was due."""
        return None if self._digest is None else self._digest.result()

    def digest(self) -> int:
        return self._digests.start(self.leaves).result()

    def say_digest(self, step: int) -> None:
        """Report the digest of the state, for joiners or after a lost connection."""
        if step != self.step:
            return  # the job moved on before the session's thread got the report
        gone = not self.leaves or any(leaf.is_deleted() for leaf in self.leaves)
        self._session.post(Digested(Step(step), None if gone else self.digest()))
