"""Attempts at one step: compute this group's shards, exchange with the others, vote; apply once the job commits.

Each phase is announced on the logger at DEBUG ("compute step 3 shard 1", "exchange step 3", ...).
"""

import logging
import time
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxft_protocol.messages import GroupName, Member, NewQuorum, Step
from jaxft_protocol.replica.state import Applied, Attempt, ExchangeBroke, Exchanged

from jaxft._errors import ExchangeFailed
from jaxft._exchange._exchange import exchange
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._programs._programs import Local
from jaxft._replica._config import GroupConfig
from jaxft._replica._engine import Call, OwnBatch
from jaxft._replica._finite import FiniteCheck
from jaxft._replica._held_state import HeldState
from jaxft._replica._session import Session
from jaxft._report import Record
from jaxft._transport._listener import Abort, Listener

_log = logging.getLogger("jaxft")


@dataclass
class _Work:
    """What this group has computed of one step. It outlives attempts, so nothing is computed twice."""

    step: int
    contributions: dict[int, list[jax.Array]] = field(default_factory=dict[int, list[jax.Array]])
    locals: dict[int, Local] = field(default_factory=dict[int, Local])
    counted: tuple[int, ...] = ()  # which of them belong to the last attempt
    partials: Partials | None = None
    means: list[np.ndarray] | None = None
    nonfinite: str = ""  # which of the means is not finite


class Attempts:
    """This group's attempts at the step after the state that it holds. The training thread owns it."""

    def __init__(
        self,
        config: GroupConfig,
        session: Session,
        listener: Listener,
        held: HeldState,
        finite: FiniteCheck,
    ) -> None:
        self._config = config
        self._me = GroupName(config.group)
        self._session = session
        self._listener = listener
        self._held = held
        self._finite = finite
        self._work = _Work(held.step)
        self._links: Links | None = None
        self._abort = Abort()
        self._voted_s = 0.0

    def attempt(self, call: Call, quorum: NewQuorum, step: int, record: Record) -> None:
        """Try a step in a quorum up to the vote, or until the core directs something else."""
        held = self._held
        assert step == held.step, f"asked for step {step} while holding state {held.step}"
        # Checked even if links exist: once the listener has ended, no group can join or heal from this one.
        self._listener.check(len(quorum.members))
        if self._work.step != step:
            self.forget()
        record.entered(quorum)
        record.attempts += 1
        if self._links is None or self._links.quorum_id != quorum.quorum_id:
            self._drop_links()
            self._abort = Abort()  # one for each quorum; its links watch it
        with self._session.activity(Attempt(quorum, Step(step)), self._abort) as abort:
            held.start_digest(quorum.step)
            if not self._compute(call, quorum, abort, record):
                return
            self._session.computed = (quorum.quorum_id, Step(step))
            if not self._exchanged(call, quorum, abort, record):
                return
        self._vote(call, quorum, record)

    def apply(self, call: Call, step: int, record: Record) -> None:
        """Apply the means of the last attempt, which the job has committed."""
        _log.debug("apply step %d", step)
        record.vote_s = time.perf_counter() - self._voted_s
        work = self._work
        assert work.means is not None
        assert work.step == step == self._held.step
        local = work.locals[min(work.counted)] if work.counted else None
        skip = call.nonfinite == "skip" and bool(work.nonfinite)
        record.metrics = self._held.advance(call.programs, work.means, local, skip=skip)
        self._session.post(Applied(Step(self._held.step)))
        self.forget()

    def forget(self) -> None:
        """Drop what was computed from a state that is no longer held."""
        self._work = _Work(self._held.step)

    def close(self) -> None:
        self._drop_links()

    def _compute(self, call: Call, quorum: NewQuorum, abort: Abort, record: Record) -> bool:
        """Compute this group's missing shards; return False if the attempt was replaced meanwhile."""
        began_s = time.perf_counter()
        shards = _shards_of(quorum, self._me)
        work, partials = self._work_for(call, quorum, shards)
        # If each member has one shard, its number is the member's place, which may change. A batch that the group
        # brings is valid at any place; one that is made for a place is valid only there, as if the step asks for it.
        anywhere = isinstance(call.batch_for, OwnBatch) and not call.programs.cut.depends_on_shard
        own = call.shards is None and anywhere
        work.counted = ()
        for shard in shards:
            if abort.is_set:
                return False
            key = 0 if own else shard
            if key not in work.locals:
                _log.debug("compute step %d shard %d", work.step, shard)
                batch = call.batch_for(work.step, shard)
                contribution, work.locals[key] = call.programs.compute(self._held.leaves, batch, shard)
                record.shards.append(shard)
                if call.shards is None:
                    work.contributions[key] = contribution
                else:
                    partials.add(shard, contribution)
            if call.shards is None:
                partials.add(shard, work.contributions[key])
            work.counted = (*work.counted, key)
            self._session.got_on()
        record.compute_s += time.perf_counter() - began_s
        return not abort.is_set

    def _work_for(self, call: Call, quorum: NewQuorum, shards: tuple[int, ...]) -> tuple[_Work, Partials]:
        """What is already computed and usable in this quorum."""
        if call.shards is not None and not self._work.locals.keys() <= set(shards):
            # Back after a lost connection, and other groups got shards that this group had computed: what was
            # already summed cannot be taken apart.
            self.forget()
        work = self._work
        if work.partials is None or call.shards is None:
            work.partials = Partials(call.programs.layout, quorum.total_shards)
        return work, work.partials

    def _exchanged(self, call: Call, quorum: NewQuorum, abort: Abort, record: Record) -> bool:
        """Exchange with the other members; return False if it failed (and report that) or was aborted."""
        step = self._held.step
        began_s = time.perf_counter()
        try:
            self._work.means = self._exchange(call, quorum, abort)
            self._session.got_on()
        except ExchangeFailed as error:
            self._drop_links()
            if not abort.is_set:
                accused = tuple(GroupName(peer) for peer in error.peers)
                self._session.post(ExchangeBroke(quorum.quorum_id, Step(step), accused, str(error)))
            return False
        finally:
            record.exchange_s += time.perf_counter() - began_s
        return True

    def _exchange(self, call: Call, quorum: NewQuorum, abort: Abort) -> list[np.ndarray]:
        step, timeout_s = self._held.step, self._config.failure_timeout_s
        _log.debug("exchange step %d", step)
        if self._links is None:
            self._links = Links.open(
                self._listener,
                job=self._config.job,
                quorum_id=quorum.quorum_id,
                me=self._me,
                members=[_peer(member) for member in quorum.members],
                abort=abort,
                # Shorter than the exchange's timeout, so that members that wait for a link fail first.
                patience=self._patience(quorum, step, timeout_s / 4),
            )
        assert self._work.partials is not None
        return exchange(
            self._links,
            layout=call.programs.layout,
            step=step,
            partials=self._work.partials,
            total_shards=quorum.total_shards,
            patience=self._patience(quorum, step, timeout_s / 2),
        )

    def _patience(self, quorum: NewQuorum, step: int, timeout_s: float) -> Patience:
        attempt, session = (quorum.quorum_id, step), self._session
        return Patience(timeout_s, counts=lambda: session.all_computed == attempt, moved=session.got_on)

    def _vote(self, call: Call, quorum: NewQuorum, record: Record) -> None:
        step, work = self._held.step, self._work
        assert work.means is not None
        _log.debug("vote step %d", step)
        self._voted_s = time.perf_counter()
        digest = self._held.started_digest()
        assert digest is not None or step != quorum.step, "the first step of a quorum is compared"
        work.nonfinite = record.nonfinite = self._finite.look(call, work.means, step)
        stop = work.nonfinite if call.nonfinite == "raise" else ""
        self._session.post(Exchanged(quorum.quorum_id, Step(step), digest, stop))

    def _drop_links(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None


def _shards_of(quorum: NewQuorum, group: GroupName) -> tuple[int, ...]:
    return next(member.shards for member in quorum.members if member.group == group)


def _peer(member: Member) -> Peer:
    return Peer(member.group, member.incarnation, member.address, member.shards)
