"""The training thread's part of a step: does what the replica's core directs, and says how it went.

    Attempt -> compute the shards that are missing, exchange, vote
    Apply   -> apply the means
    HealFrom, Replay -> become equal to the job's frontier

Each phase is announced on the logger at DEBUG ("compute step 3 shard 1", "exchange step 3", ...).
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxft_protocol.messages import GroupName, Heal, HistoryId, NewQuorum, Step
from jaxft_protocol.replica.state import (
    Applied,
    Apply,
    Attempt,
    Digested,
    ExchangeBroke,
    Exchanged,
    Fail,
    HealBroke,
    Healed,
    HealFrom,
    Identity,
    Over,
    Prepared,
    ReadCheckpoint,
    Replay,
    Replayed,
    TakeDigest,
)

from jaxft._arrays._device_digest import PendingDigest, StateDigest, period_steps
from jaxft._arrays._layout import Layout
from jaxft._checkpoints import Checkpoints, Restored
from jaxft._checkpoints._settings import LATER, differences, refusal
from jaxft._errors import ConfigurationError, ExchangeFailed, HealFailed, JobFinished
from jaxft._exchange._exchange import exchange
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._heal._fetch import DonorAt, Fetcher
from jaxft._heal._store import StateStore
from jaxft._programs._build import Programs
from jaxft._programs._environment import nondeterminism, xla_flags
from jaxft._programs._fingerprint import compared
from jaxft._programs._nonfinite import Policy, compared_policy, find
from jaxft._replica._session import Session, error_of
from jaxft._report import HealReport, StepReport
from jaxft._transport._listener import Abort, Listener
from jaxft._version import __version__

_log = logging.getLogger("jaxft")

BatchFor = Callable[[int, int], Any]
# Reads the job's checkpoint, like this state, unless others do so right now; returns the state and whether others do.
Read = Callable[[Any], tuple[Any, bool]]


@dataclass(frozen=True)
class _Own:
    """The batch of a group that brings its own, whatever its place."""

    batch: Any

    def __call__(self, step: int, shard: int) -> Any:
        return self.batch


@dataclass
class _Work:
    """What this group has computed of one step. It outlives attempts, so nothing is computed twice."""

    step: int
    contributions: dict[int, list[jax.Array]] = field(default_factory=dict)
    locals: dict[int, Any] = field(default_factory=dict)
    counted: tuple[int, ...] = ()  # which of them belong to the last attempt
    partials: Partials | None = None
    means: list[np.ndarray] | None = None
    nonfinite: str = ""  # which of the means is not


class Runner:
    """Runs the steps of one job for one group. Not thread-safe: the training thread owns it."""

    def __init__(
        self,
        session: Session,
        store: StateStore,
        listener: Listener,
        identity: Identity,
        *,
        failure_timeout_s: float,
        step: int,
        min_replicas: int | None,
        settings: Mapping[str, str],
        spare: bool,
        other_meshes: bool,
        digest_every: int | None,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.step = step
        self.history = 0  # of the checkpoint that the first state came from
        self.report = StepReport(step=step)
        self._session = session
        self._store = store
        self._listener = listener
        self._me = identity
        self._timeout_s = failure_timeout_s
        self._min_replicas = min_replicas
        self._settings = settings
        self._spare = spare
        self._other_meshes = other_meshes
        self._digest_every = digest_every
        self._state_digest = StateDigest()
        # Of the state that this group holds, whatever becomes of the work that is done from it.
        self._digest: PendingDigest | None = None
        self._checkpoints = checkpoints
        self._nonfinite: Policy = "allow"
        self._warned = False  # of means that are not finite
        self._state: Any = None  # the newest, for the last checkpoint
        self._restored: Restored | None = None
        self._changed: Collection[str] = ()
        self._read: Read | None = None
        self._prepared: tuple[Mapping[str, str], int | None] | None = None
        self._work = _Work(step)
        self._links: Links | None = None
        self._abort = Abort()
        self._voted_s = 0.0
        self._seen = -1  # number of the last directive that was acted on
        self._fetcher: Fetcher | None = None
        self._fetches_for = 0  # the heal of that fetcher
        self._heal_began_s = 0.0

    @property
    def started(self) -> bool:
        """Whether the first step has been called."""
        return self._prepared is not None

    def run(
        self,
        programs: Programs,
        layout: Layout,
        state: Any,
        batch: Any,
        shards: int | None,
        nonfinite: Policy,
    ) -> tuple[Any, Any]:
        """Take part until at least one more step is committed; return the state after it, and its metrics.

        A group that had to heal returns as soon as it stands at the frontier, with the metrics of the last step
        it replayed, so that its loop may see how far the job has come. A spare returns after each step it follows.
        """
        state = programs.owned(state)
        self._nonfinite = nonfinite
        self._prepare(programs, layout, state, shards)
        batch_for: BatchFor = batch if callable(batch) else _Own(batch)
        before = self.report
        self.report = StepReport(step=self.step, quorum_id=before.quorum_id, members=before.members)
        metrics: Any = None
        caught_up = False
        while True:
            self._seen, directive = self._session.wait(self._seen)
            match directive:
                case Attempt() if caught_up:
                    self._seen -= 1  # the next call takes it up
                    return state, programs.blank_metrics() if metrics is None else metrics
                case Attempt(quorum, step):
                    self._attempt(programs, layout, state, batch_for, quorum, step)
                case Apply(_, step) if step < self.step:
                    continue  # applied already; the stream broke before the session's thread heard of it
                case Apply(_, step):
                    return self._apply(programs, state, step)
                case ReadCheckpoint():
                    state = self._read_after_all(programs, state)
                case TakeDigest(step):
                    self._say_digest(step, state)
                case HealFrom():
                    healed = self._heal(directive, programs, state)
                    if healed is not None:
                        state, metrics, caught_up = healed, None, True
                case Replay():
                    replayed = self._replay(directive, programs, state)
                    if replayed is not None:
                        state, metrics = replayed
                        caught_up = True
                        if self._spare and self.step == directive.until:
                            return state, metrics
                case Over(step) if caught_up and self.step == step:
                    return state, programs.blank_metrics() if metrics is None else metrics
                case Over(step):
                    raise JobFinished(self._finished_text(step))
                case Fail(failure):
                    raise error_of(failure)
                case _:
                    raise AssertionError(directive)

    # ---- checkpoints ----

    def restored(self, found: Restored, changed: Collection[str]) -> None:
        """The state of the first call comes from a checkpoint."""
        self.step, self.history = found.step, found.history
        self._work = _Work(self.step)
        self.report = StepReport(step=self.step)
        self._restored, self._changed = found, changed

    def heals_only(self, read: Read) -> None:
        """The state of the first call is a fresh one of a job that has a checkpoint, which others have read.

        Args:
            read: for when they are gone before this group has healed from them.
        """
        self._read = read

    def _read_after_all(self, programs: Programs, state: Any) -> Any:
        """Read the checkpoint that had been left to others; or leave it to others once more, who read right now."""
        if self._read is None:
            return state  # read already, before the session's thread had heard of it
        with self._session.in_step(False):
            state, others_read = self._read(state)
            if not others_read:
                self._read = None
            state = programs.owned(state)
            self._say_prepared(state)
        return state

    def _check_restored(self, present: Mapping[str, str]) -> None:
        """Compare what is known of the step with what the checkpoint was saved with. Raises ConfigurationError."""
        if self._restored is None or self._restored.settings is None:
            return
        saved = {name: value for name, value in self._restored.settings.items() if name in LATER}
        now = {name: present[name] for name in saved}
        if differing := differences(saved, now, self._changed):
            raise ConfigurationError(refusal(str(self._restored.folder), differing, self.step, self._changed))

    def serve_until_left(self, timeout_s: float) -> None:
        """Take digests of the last state for joiners, until this group has left the job."""
        deadline_s = time.monotonic() + timeout_s
        told: Step | None = None
        while (step := self._session.wait_until_left(deadline_s, told)) is not None:
            self._say_digest(step, self._state)
            told = step

    def save_last(self) -> None:
        """Save the state in which this group's loop ended, if it is this group's turn."""
        if self._state is None:
            return
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            _log.warning("the last state was consumed by other code before the job ended, and is not saved")
            return
        self._save(self._state)

    def _save(self, state: Any) -> None:
        """One group writes for all: the first of the quorum, whoever that is at this step."""
        if self._checkpoints is None or self.report.members[:1] != (self._me.group,):
            return
        history = self._session.history
        assert self._prepared is not None
        kept = {name: value for name, value in self._prepared[0].items() if name in LATER} | dict(
            self._settings
        )
        self._checkpoints.save(self.step, state, job=self._me.job, history=history, settings=kept)

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        if self._fetcher is not None:
            self._fetcher.close()

    # ---- joining ----

    def _prepare(self, programs: Programs, layout: Layout, state: Any, shards: int | None) -> None:
        settings = {
            **compared(programs.fingerprint, other_meshes=self._other_meshes),
            **self._settings,
            "layout": layout.digest,
            "shards": "members" if shards is None else str(shards),
            "nonfinite": compared_policy(self._nonfinite),
            "jaxft": __version__,
            "digest_every": str(self._digest_period(state)),
        }
        if self._prepared is not None:
            self._check_same(settings)
            return
        if text := nondeterminism(settings["backend"], xla_flags(os.environ.get("XLA_FLAGS", ""))):
            _log.warning("[jaxft %s] %s", self._me.group, text)
        self._prepared = (settings, shards)
        self._say_prepared(state)

    def _say_prepared(self, state: Any) -> None:
        """Let the coordinator know which state this group brings, and what must be alike in all groups."""
        assert self._prepared is not None
        settings, shards = self._prepared
        self._check_restored(settings)
        leaves = jax.tree.leaves(state)
        self._store.publish(self.step, leaves)
        digest = self._state_digest.start(leaves).result()
        history, least = HistoryId(self.history), self._min_replicas or 0
        heals_only = self._read is not None
        told = {
            name: value for name, value in settings.items() if name != "shards"
        }  # it has a field of its own
        self._session.post(
            Prepared(Step(self.step), digest, told, least, history, self._spare, heals_only, shards)
        )

    def _check_same(self, settings: Mapping[str, str]) -> None:
        """A group's first step defines its part in the job; another shape of batch may follow, no other state."""
        assert self._prepared is not None
        for name in ("state", "contribution", "shards", "nonfinite"):
            if settings.get(name) != self._prepared[0].get(name):
                raise ConfigurationError(
                    f"this step differs from the one that group {self._me.group!r} joined job {self._me.job!r} "
                    f"with, in {name}: {self._prepared[0].get(name)!r} then, {settings.get(name)!r} now. One "
                    "Manager serves one training step; use another Manager, under another job name."
                )

    # ---- one attempt ----

    def _attempt(
        self,
        programs: Programs,
        layout: Layout,
        state: Any,
        batch_for: BatchFor,
        quorum: NewQuorum,
        step: int,
    ) -> None:
        assert step == self.step, f"asked for step {step} while holding state {self.step}"
        # Also where the links stand: nobody could join or heal from here any more, and nobody would say so.
        self._listener.check(len(quorum.members))
        if self._work.step != step:
            self._work = _Work(step)
        self._note_members(quorum)
        self.report = replace(self.report, attempts=self.report.attempts + 1)
        if self._links is None or self._links.quorum_id != quorum.quorum_id:
            self._drop_links()
            self._abort = Abort()  # one for each quorum: its links watch it
        with self._session.activity(Attempt(quorum, Step(step)), self._abort) as abort:
            self._start_digest(quorum, state)
            if not self._compute(programs, layout, state, batch_for, quorum, abort):
                return
            self._session.computed = (quorum.quorum_id, Step(step))
            began_s = time.perf_counter()
            try:
                self._work.means = self._exchange(layout, quorum, step, abort)
                self._session.got_on()
            except ExchangeFailed as error:
                self._drop_links()
                if not abort.is_set:
                    accused = tuple(GroupName(peer) for peer in error.peers)
                    self._session.post(ExchangeBroke(quorum.quorum_id, Step(step), accused, str(error)))
                return
            finally:
                took_s = time.perf_counter() - began_s
                self.report = replace(self.report, exchange_s=self.report.exchange_s + took_s)
        _log.debug("vote step %d", step)
        self._voted_s = time.perf_counter()
        digest = None if self._digest is None else self._digest.result()
        assert digest is not None or step != quorum.step, "the first step of a quorum is compared"
        self._work.nonfinite = self._look_at(programs, self._work.means, step)
        stop = self._work.nonfinite if self._nonfinite == "raise" else ""
        self._session.post(Exchanged(quorum.quorum_id, Step(step), digest, stop))

    def _start_digest(self, quorum: NewQuorum, state: Any) -> None:
        """Take the fingerprint of the state that this step computes from, where the coordinator compares them.

        Due in the first step of each quorum, so that nobody takes part for one step with a state of its own, and
        every so many steps. All members go by the same rule.
        """
        due = self.step == quorum.step or self.step % self._digest_period(state) == 0
        if due and self._digest is None:
            self._digest = self._state_digest.start(jax.tree.leaves(state))

    def _say_digest(self, step: int, state: Any) -> None:
        """Tell the digest of the state that this group holds, for joiners or to come back after a lost connection."""
        if step != self.step:
            return  # the job has moved on before the session's thread has heard of it
        leaves = jax.tree.leaves(state)
        gone = not leaves or any(leaf.is_deleted() for leaf in leaves)
        digest = None if gone else self._state_digest.start(leaves).result()
        self._session.post(Digested(Step(step), digest))

    def _digest_period(self, state: Any) -> int:
        if self._digest_every is None:
            leaves = jax.tree.leaves(state)
            platform = next(iter(leaves[0].devices())).platform if leaves else "cpu"
            self._digest_every = period_steps(sum(leaf.nbytes for leaf in leaves), platform)
        return self._digest_every

    def _compute(
        self,
        programs: Programs,
        layout: Layout,
        state: Any,
        batch_for: BatchFor,
        quorum: NewQuorum,
        abort: Abort,
    ) -> bool:
        """Compute what is missing of this group's shards; False if the attempt was overtaken meanwhile."""
        work = self._work
        began_s = time.perf_counter()
        by_members = self._prepared is not None and self._prepared[1] is None
        if not by_members and not work.locals.keys() <= set(_shards_of(quorum, self._me.group)):
            # Back after a lost connection, and others have been given what this group had computed: what was
            # summed already cannot be taken apart.
            work = self._work = _Work(work.step)
        if work.partials is None or by_members:
            work.partials = Partials(layout, quorum.total_shards)
        # Where each member has one shard, its number is the member's place, which may change. A batch that the group
        # brings stays right at any place; one that is made for a place counts for that place alone.
        own = by_members and isinstance(batch_for, _Own)
        work.counted = ()
        for shard in _shards_of(quorum, self._me.group):
            if abort.is_set:
                return False
            key = 0 if own else shard
            if key not in work.locals:
                _log.debug("compute step %d shard %d", work.step, shard)
                leaves, work.locals[key] = programs.compute(state, batch_for(work.step, shard))
                self.report = replace(self.report, shards=(*self.report.shards, shard))
                if by_members:
                    work.contributions[key] = leaves
                else:
                    work.partials.add(shard, leaves)
            if by_members:
                work.partials.add(shard, work.contributions[key])
            work.counted = (*work.counted, key)
            self._session.got_on()
        took_s = time.perf_counter() - began_s
        self.report = replace(self.report, compute_s=self.report.compute_s + took_s)
        return not abort.is_set

    def _exchange(self, layout: Layout, quorum: NewQuorum, step: int, abort: Abort) -> list[np.ndarray]:
        _log.debug("exchange step %d", step)
        if self._links is None:
            self._links = Links.open(
                self._listener,
                job=self._me.job,
                quorum_id=quorum.quorum_id,
                me=self._me.group,
                members=[_peer(member) for member in quorum.members],
                abort=abort,
                # Shorter than that of the exchange: those who wait for a link end before those who wait for them.
                patience=self._patience(quorum, step, self._timeout_s / 4),
            )
        assert self._work.partials is not None
        return exchange(
            self._links,
            layout=layout,
            step=step,
            partials=self._work.partials,
            total_shards=quorum.total_shards,
            patience=self._patience(quorum, step, self._timeout_s / 2),
        )

    def _patience(self, quorum: NewQuorum, step: int, timeout_s: float) -> Patience:
        attempt, session = (quorum.quorum_id, step), self._session
        return Patience(timeout_s, counts=lambda: session.all_computed == attempt, moved=session.got_on)

    def _drop_links(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None

    def _apply(self, programs: Programs, state: Any, step: int) -> tuple[Any, Any]:
        _log.debug("apply step %d", step)
        work = self._work
        assert work.means is not None
        assert work.step == step == self.step
        vote_s = time.perf_counter() - self._voted_s
        began_s = time.perf_counter()
        local = work.locals[min(work.counted)] if work.counted else None
        skip = self._nonfinite == "skip" and bool(work.nonfinite)
        state, metrics = self._advance(programs, state, step, work.means, local, skip=skip)
        self._session.post(Applied(Step(self.step)))
        self._work = _Work(self.step)
        if self._checkpoints is not None and self._checkpoints.due(self.step):
            with self._session.in_step(False):
                self._save(state)
        apply_s = time.perf_counter() - began_s
        self.report = replace(self.report, step=self.step, vote_s=vote_s, apply_s=apply_s)
        return state, metrics

    def _advance(
        self, programs: Programs, state: Any, step: int, means: list[np.ndarray], local: Any, *, skip: bool
    ) -> tuple[Any, Any]:
        """Turn state `step` into the next, unless it is skipped; the one place where a state is donated."""
        self._store.log(step, means)
        if self._session.wants_digest(Step(step)):
            self._say_digest(step, state)  # the last moment at which it can be taken
        # Also where the step is skipped: its state is overwritten by the next one, under another number.
        self._store.before_donation()
        self._digest = None
        if skip:
            leaves, metrics = jax.tree.leaves(state), programs.blank_metrics()
        else:
            state, metrics = programs.apply(state, means, local)
            leaves = jax.block_until_ready(jax.tree.leaves(state))
        self.step = step + 1
        self._state = state
        self._store.publish(self.step, leaves)
        return state, metrics

    def _look_at(self, programs: Programs, means: list[np.ndarray], step: int) -> str:
        """Which of the means is not finite, if the policy has this looked for: the same word in every group."""
        found = find(programs.contribution, means, self._nonfinite)
        self.report = replace(self.report, nonfinite=found)
        if found and self._nonfinite == "skip":
            _log.warning("[jaxft %s] step %d changes nothing: %s", self._me.group, step, found)
        elif found and not self._warned:
            self._warned = True
            _log.warning(
                '[jaxft %s] the means of step %d are not finite: %s (nonfinite="%s"; this is said once)',
                *(self._me.group, step, found, self._nonfinite),
            )
        return found

    # ---- healing ----

    def _heal(self, directive: HealFrom, programs: Programs, state: Any) -> Any:
        """Fetch the snapshot of a heal; None if that failed or was overtaken."""
        heal = directive.heal
        self._heal_began_s = time.perf_counter()
        donors = tuple(donor.group for donor in heal.donors)
        _log.info("[jaxft %s] heals to step %d from %s", self._me.group, heal.step, ", ".join(donors))
        leaves, tree = jax.tree.flatten(state)
        with self._session.activity(directive, Abort()) as abort:
            fetcher = self._fetcher_for(heal)
            try:
                state = jax.tree.unflatten(tree, fetcher.state(heal.step, leaves, cancel=abort))
            except HealFailed as error:
                # Also if it was overtaken: a session that comes back waits to hear what this group holds.
                self._session.post(HealBroke(heal.heal_id, str(error)))
                return None
            self.step = heal.step
            self._digest = None
            self._work = _Work(self.step)
            self._state = state
            self._store.publish(self.step, jax.tree.leaves(state))
            self._session.post(Healed(heal.heal_id, heal.step))
        self._note_caught_up()
        self._note_heal(HealReport(heal.step, 0, 0, 0.0, donors))
        return state

    def _replay(self, directive: Replay, programs: Programs, state: Any) -> tuple[Any, Any] | None:
        step = directive.step
        if step != self.step:
            # The job has moved on before the session's thread has heard of the last replay: the same step is asked
            # for once more, and applying it twice would be the end of this state.
            return None
        _log.debug("replay step %d", step)
        with self._session.activity(directive, Abort()) as abort:
            try:
                means = self._fetcher_for(directive.heal).means(step, programs.contribution, cancel=abort)
            except HealFailed as error:
                self._session.post(HealBroke(directive.heal.heal_id, str(error)))
                return None
            skip = bool(self._look_at(programs, means, step)) and self._nonfinite == "skip"
            state, metrics = self._advance(programs, state, step, means, None, skip=skip)
            self._work = _Work(self.step)
            self._session.post(Replayed(directive.heal.heal_id, Step(self.step)))
        self.report = replace(self.report, step=self.step)
        self._note_caught_up()
        heal = self.report.heal
        if heal is not None:
            self._note_heal(replace(heal, replayed_steps=heal.replayed_steps + 1))
        return state, metrics

    def _fetcher_for(self, heal: Heal) -> Fetcher:
        if self._fetcher is None or self._fetches_for != heal.heal_id:
            if self._fetcher is not None:
                self._fetcher.close()
            self._fetches_for = heal.heal_id
            self._fetcher = Fetcher(
                job=self._me.job,
                group=self._me.group,
                incarnation=self._me.incarnation,
                heal_id=heal.heal_id,
                donors=[DonorAt(donor.group, donor.incarnation, donor.address) for donor in heal.donors],
                timeout_s=self._timeout_s / 2,
                key=self._listener.key,
            )
        return self._fetcher

    def _note_caught_up(self) -> None:
        """What it may have tried before, of an earlier step or in vain, has no part in the step that it now holds."""
        self.report = replace(self.report, attempts=0, shards=())

    def _note_heal(self, heal: HealReport) -> None:
        assert self._fetcher is not None
        seconds = time.perf_counter() - self._heal_began_s
        heal = replace(heal, transferred_bytes=self._fetcher.transferred_bytes, seconds=seconds)
        self.report = replace(self.report, step=self.step, heal=heal)

    # ---- words ----

    def _note_members(self, quorum: NewQuorum) -> None:
        members = tuple(member.group for member in quorum.members)
        reasons = {str(change.group): change.reason for change in quorum.left}
        before = self.report.members
        left = tuple((name, reasons.get(name, "")) for name in before if name not in members)
        joined = tuple(name for name in members if before and name not in before)
        self.report = replace(
            self.report,
            quorum_id=quorum.quorum_id,
            members=members,
            joined=self.report.joined + joined,
            left=self.report.left + left,
        )

    def _finished_text(self, step: int) -> str:
        return (
            f"job {self._me.job!r} finished at step {step}, and every group that holds its state has left; group "
            f"{self._me.group!r} stands at step {self.step}. For another run choose another job name."
        )


def _shards_of(quorum: NewQuorum, group: str) -> tuple[int, ...]:
    return next(member.shards for member in quorum.members if member.group == group)


def _peer(member: Any) -> Peer:
    return Peer(member.group, member.incarnation, member.address, member.shards)
