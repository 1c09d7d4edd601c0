"""The state that this group holds, offered to joiners and reported to the coordinator as digests."""

import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxft_protocol.messages import Step
from jaxft_protocol.replica.state import Digested

from jaxft._arrays._device_digest import PendingDigest, StateDigest, period_steps
from jaxft._arrays._leaf_types import is_key
from jaxft._arrays._memory import not_idle, result_bytes, touch_ahead
from jaxft._arrays._pieces import Pieces
from jaxft._base._calls import ctrl_c_later
from jaxft._base._room import available_bytes
from jaxft._errors import ConfigurationError
from jaxft._heal._store import StateStore, host_part
from jaxft._programs._programs import Local, Programs
from jaxft._ranks._ranks import Directing, Ranks

_log = logging.getLogger("jaxft")


class HeldState:
    """The leaves of a state and its step. The training thread owns it.

    Step `step` - 1 has made state `step`. An edit belongs to the step that follows it: it is kept
    apart until that step is applied, and logged with the step's means. So donors, digests, checkpoints and joiners
    mean the same by state `step`, whether a group has made its edit already or not.
    """

    def __init__(
        self, session: Directing, store: StateStore, ranks: Ranks, step: int, *, digest_every: int | None
    ) -> None:
        self.step = step
        self.first_step = step  # at the first call
        self.leaves: Sequence[
            jax.Array
        ] = ()  # of state `step`: passed by the first call, or made by a step or a heal
        self.made = False  # a step or a heal has made it
        self.edits: dict[int, jax.Array] = {}  # leaves that the next step starts from instead of these
        self.programs: Programs | None = None  # know how the state is split; None: no step was called yet
        self._session = session
        self._store = store
        self._ranks = ranks
        self._digests = StateDigest()
        # Of the held state, even if the work based on it is dropped.
        self._digest: PendingDigest | None = None
        self._edit_digest: int | None = None
        self._digest_every = digest_every
        self._touching: threading.Thread | None = None

    @property
    def current(self) -> Sequence[jax.Array]:
        """The leaves that the next step starts from: the state with its edits."""
        if not self.edits:
            return self.leaves
        return [self.edits.get(index, leaf) for index, leaf in enumerate(self.leaves)]

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        """Make an edit before the next step, after all earlier edits."""
        self.edits = {**self.edits, **changes}
        self._edit_digest = None

    def edit_digest(self) -> int:
        """A digest of the edits before the next step, the same in all groups that made the same; 0: none."""
        if not self.edits:
            return 0
        if self._edit_digest is None:
            numbers = sorted(self.edits)
            values = self._digests.start([self.edits[number] for number in numbers]).result()
            encoded = f"{numbers} {values}".encode()
            self._edit_digest = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest()) or 1
        return self._edit_digest

    def replay_edit(self, changes: Mapping[int, jax.Array]) -> None:
        """Make the edit that the job made before the next step.

        Raises:
            ConfigurationError: this group made another one.
        """
        mine, own = self.edit_digest(), sorted(self.edits)
        self.edits, self._edit_digest = dict(changes), None
        if mine and mine != self.edit_digest():
            raise ConfigurationError(
                f"This group has edited the state before step {self.step} (leaves number {own}), and the job has not "
                f"made the same edit (leaves number {sorted(changes)}). Whether a group calls `step.edit` at a step, "
                "and what its function does, may depend only on the number of the step and on the state."
            )

    def publish(self) -> None:
        """Offer the state to joiners: the pieces that belong to this process's lanes."""
        pieces = None if self.programs is None else self.programs.stages.state_pieces
        self._store.publish(self.step, self.leaves if pieces is None else pieces.split(self.leaves), pieces)

    def end_log(self) -> None:
        """This group takes no step any more: joiners get later means from others."""
        self._store.end_log()

    def replace(self, step: int, leaves: Sequence[jax.Array]) -> None:
        """Replace the held state."""
        self.step, self.leaves, self.made = step, leaves, True
        self.edits, self._edit_digest = {}, None
        self._digest = None
        self.publish()

    def heal(
        self, step: int, fetched: Sequence[np.ndarray], pieces: Pieces, consumed: Collection[int]
    ) -> None:
        """Hold a fetched state in place of this one, whose leaves of these numbers give up their memory."""
        self._store.before_donation()
        with ctrl_c_later():
            self.replace(step, pieces.place(fetched, self.leaves, consumed))

    def advance(
        self,
        programs: Programs,
        means: list[np.ndarray],
        local: Local | None,
        *,
        skip: bool,
        done: Callable[[], None],
        given: Sequence[Any] | None = None,
    ) -> Any:
        """Apply the means and return the metrics. The only place that donates a state.

        Ctrl-C waits meanwhile. It would be raised when the program that consumes the state has returned, and drop the
        new one.

        Args:
            programs: what to apply the means with.
            means: the means of the step: this process's pieces.
            local: this group's local values of the step, if it computed a shard.
            skip: keep the state, but count the step.
            done: called when the new state is held, also if its computation fails. Must not block.
            given: the same means as programs take them, if some are on the devices already.
        """
        self._log(programs, means)
        wanted = self._session.wants_digest(Step(self.step))
        if self._ranks.decide("take the last digest", value=wanted):
            self.say_digest(self.step)  # last chance: the state is about to be overwritten
        # Also for a skipped step: the next one overwrites its state.
        self._store.before_donation()
        joined = () if skip else programs.stages.joined(means if given is None else given)
        with ctrl_c_later():
            if skip:
                leaves, metrics = self.current, programs.blank_metrics()
            else:
                leaves, metrics = programs.apply(self.current, joined, local)
            try:
                jax.block_until_ready(leaves)
            finally:
                self.replace(self.step + 1, leaves)  # the state before is consumed
                done()
        return metrics

    def _log(self, programs: Programs, means: Sequence[np.ndarray]) -> None:
        """Keep for joiners what makes the next state of this one: which leaves were edited, and the means."""
        changed = np.zeros(len(self.leaves), np.uint8)
        changed[list(self.edits)] = 1
        numbers = sorted(self.edits)
        edited = [self.edits[number] for number in numbers]
        edits = (
            [_on_host(piece) for piece in programs.stages.pieces_of_state(numbers).split(edited)]
            if edited
            else []
        )
        kept = self._store.log(
            self.step,
            [*means, changed],
            edits,
            cut_means=lambda logged, span: [*programs.stages.cut_means(logged[:-1], span), logged[-1]],
            cut_edits=lambda logged, span: programs.stages.pieces_of_state(numbers).cut(logged, span),
        )
        if kept:
            self._replace_results(programs)

    def _replace_results(self, programs: Programs) -> None:
        """Have memory for the next results ready, in place of memory kept for joiners, before an exchange takes it.

        Fresh memory is slow, and all groups would wait for it. Where it is short, only an exchange takes more: the
        joiner may need nothing any more by then.
        """
        if self._touching is not None and self._touching.is_alive():
            return
        layouts = programs.stages.layouts_with(self._ranks.size)
        sizes = not_idle(size for layout in layouts for size in result_bytes(layout))
        if not sizes or not _has_room(sum(sizes)):
            return
        self._touching = threading.Thread(target=_touch, args=(sizes,), name="jaxft-memory", daemon=True)
        try:
            self._touching.start()
        except RuntimeError as error:
            _log.warning("The next exchange takes fresh memory, since there is no other thread: %s.", error)
            self._touching = None

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

    def pending_digest(self) -> PendingDigest:
        """Start the digest of the state without waiting for it."""
        return self._digests.start(self.leaves)

    def say_digest(self, step: int) -> None:
        """Report the digest of the state, for joiners or after a lost connection."""
        if step != self.step:
            return  # the job moved on before the session's thread got the report
        gone = not self.leaves or any(leaf.is_deleted() for leaf in self.leaves)
        self._session.post(Digested(Step(step), None if gone else self.digest()))


def _has_room(size_bytes: int) -> bool:
    free_bytes = available_bytes()
    return free_bytes is None or size_bytes <= host_part() * free_bytes


def _touch(sizes_bytes: Sequence[int]) -> None:
    try:
        touch_ahead(sizes_bytes)
    except (OSError, MemoryError) as error:
        _log.warning(
            "There is no memory for the results of one more step, %.2f GB, while other steps' results are kept for a "
            "joiner: %r. If the next exchange finds none either, this group ends.",
            sum(sizes_bytes) / 1e9,
            error,
        )


def _on_host(leaf: jax.Array) -> np.ndarray:
    return np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)
