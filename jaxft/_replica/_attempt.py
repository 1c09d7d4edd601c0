"""Attempts at one step: compute this group's shards, exchange with the others, vote; apply once the job commits.

A step with several exchanges computes and exchanges in turn, stage by stage, and votes once. An attempt goes through
all stages again: it exchanges again, so that all members get the same means, however far each had
come. The contributions to later stages stay valid, because the means do not depend on the members. Where they do
(without `shards`, or after a member was evicted for its contribution), later stages are computed again.

Each phase is announced on the logger at DEBUG: "compute step 3 shard 1", "exchange step 3", ..., and in later stages
"compute step 3 shard 1 stage 1", "exchange step 3 stage 1".
"""

import logging
import time

import numpy as np
from jaxft_protocol.messages import GroupName, Member, NewQuorum, Step
from jaxft_protocol.ranks.lanes import Span, rank_of
from jaxft_protocol.replica.state import Applied, Attempt, ExchangeBroke, Exchanged

from jaxft._base._calls import ctrl_c_later
from jaxft._errors import ExchangeFailed
from jaxft._exchange._grid_links import AnyLinks, open_links, peers_of_each
from jaxft._exchange._links import Peer
from jaxft._exchange._patience import LongWaits, Patience
from jaxft._exchange._plan import strands_of
from jaxft._exchange._spans import Contribution, SpanLinks
from jaxft._ranks._ranks import Directing, Ranks, Verdict
from jaxft._replica._call import Call, FiniteCheck
from jaxft._replica._compute import Computing, Try, stage_text
from jaxft._replica._config import GroupConfig
from jaxft._replica._held_state import HeldState
from jaxft._replica._membership import Membership
from jaxft._report import Record
from jaxft._telemetry._call import Observers
from jaxft._transport._endpoints import agreed_threads, endpoints_at
from jaxft._transport._listener import Abort

_log = logging.getLogger("jaxft")

# Before a later exchange of a step, peers may compute for this many times as long as the step took so far, beyond the
# usual limit. This group learns of no deadline of theirs; dead or frozen peers are noticed by their heartbeats.
STAGES_OF_PATIENCE = 8


class Attempts:
    """This group's attempts at the step after the state that it holds. The training thread owns it."""

    def __init__(
        self,
        config: GroupConfig,
        member: Membership,
        observers: Observers,
        held: HeldState,
        finite: FiniteCheck,
    ) -> None:
        self._config = config
        self._me = GroupName(config.group)
        self._session: Directing = member.session
        self._ranks: Ranks = member.ranks
        self._listener = member.listener
        self._observers = observers
        self._held = held
        self._finite = finite
        self.computing = Computing(member, observers, held)
        self._links: SpanLinks | None = None  # of an older quorum until the first exchange in a new one
        self._abort = Abort()
        self._waits = LongWaits()
        self._more_s = 0.0  # how much longer than usual peers may compute before the current exchange
        self._voted_s = 0.0
        self._voted: Attempt | None = None  # the last attempt that came to its vote

    def attempt(self, call: Call, quorum: NewQuorum, step: int, record: Record) -> None:
        """Try a step in a quorum up to the vote, or until the core directs something else."""
        held = self._held
        assert step == held.step, f"asked for step {step} while holding state {held.step}"
        # Checked even if links exist: once the listener has ended, no group can join or heal from this one.
        self._listener.check(peers_of_each(len(quorum.members)))
        self.computing.begin(step)
        record.entered(quorum)
        record.attempts += 1
        if self._links is None or self._links.quorum_id != quorum.quorum_id:
            self._abort = Abort()  # one for each quorum; its links watch it
        with self._session.activity(Attempt(quorum, Step(step)), self._abort) as abort:
            held.start_digest(quorum.step)
            began_s = time.monotonic()
            now = Try(call, quorum, _shards_of(quorum, self._me), abort, record)
            for stage in range(call.programs.stages.count):
                if not self.computing.compute(now, stage):
                    return
                self._session.computed = (quorum.quorum_id, Step(step))
                # From the first exchange on, time counts. Before a later one, peers may still compute, if there is
                # something to compute.
                computes = stage > 0 and call.programs.stages.begins(stage)
                more_s = STAGES_OF_PATIENCE * (time.monotonic() - began_s) if computes else 0.0
                if not self._exchanged(now, stage, more_s):
                    return
        self._vote(call, quorum)

    def apply(self, call: Call, step: int, record: Record) -> None:
        """Apply the means of the last attempt, which the job has committed."""
        self._observers.enters("apply", step)
        record.vote_s = time.perf_counter() - self._voted_s
        work = self.computing.work
        assert work.step == step == self._held.step
        means = work.means(call.programs.stages.count)
        local = work.stages[-1].locals[min(work.counted)] if work.counted else None
        skip = call.nonfinite == "skip" and bool(work.nonfinite)

        def applied() -> None:
            self._session.post(Applied(Step(step + 1)))
            self.computing.forget()

        given = work.given(call.programs.stages.count)
        record.metrics = self._held.advance(call.programs, means, local, skip=skip, done=applied, given=given)

    def forget(self) -> None:
        """Drop the work on a state that is no longer held."""
        self.computing.forget()

    def give_up(self) -> int | None:
        """After an exception: drop what may be half done. Return the shard that was being computed, if any."""
        self._drop_links()
        return self.computing.give_up()

    def leave_quorum(self) -> None:
        """Close the connections of the last quorum, which continues without this group: the others close theirs."""
        self._drop_links()

    def close(self) -> None:
        self._drop_links()

    def _exchanged(self, now: Try, number: int, more_s: float) -> bool:
        """Exchange with the other members; return False if it failed (and report that) or was aborted."""
        began_s = time.perf_counter()
        self._more_s = more_s
        try:
            verdict = self._exchange_of_all_ranks(now, number)
        finally:
            now.record.exchange_s += time.perf_counter() - began_s
        if verdict.ok:
            self.computing.work.nonfinite = now.record.nonfinite = verdict.note
            return True
        self._drop_links()
        if not verdict.stopped:
            accused = tuple(GroupName(peer) for peer in verdict.accused)
            self._session.post(
                ExchangeBroke(now.quorum.quorum_id, Step(self._held.step), accused, verdict.failure)
            )
        return False

    def _exchange_of_all_ranks(self, now: Try, number: int) -> Verdict:
        call, work = now.call, self.computing.work
        stages = call.programs.stages.count
        with self._ranks.operation("exchange", now.abort) as operation:
            try:
                means = self._exchange(now, number)
            except ExchangeFailed as error:
                return operation.settle(str(error), tuple(error.peers))
            self._session.got_on()
            work.took(number, means, call.programs.stages.run_of(number).stop)
            work.stages[number].given = call.programs.device.to_devices(number, means)
            last = number == stages - 1
            note = self._finite.look(call, work.means(stages), self._held.step) if last else ""
            return operation.settle(note=note)

    def _exchange(self, now: Try, number: int) -> list[np.ndarray]:
        stages, quorum = now.call.programs.stages, now.quorum
        step, timeout_s = self._held.step, self._config.failure_timeout_s / 2 + self._more_s
        self._waits.begin(step)
        self._observers.enters("exchange", step, stage_text(number))
        if self._links is None or self._links.quorum_id != quorum.quorum_id:
            self._links = self._span_links(now, number)
        partials = self.computing.work.stages[number].partials
        assert partials is not None
        return self._links.exchange(
            Contribution(
                partials,
                stages.stage_pieces[number],
                lambda span: stages.span_layout(number, span),
            ),
            step=step,
            total_shards=quorum.total_shards,
            patience=lambda later_s: self._patience(quorum, step, timeout_s + later_s),
        )

    def _span_links(self, now: Try, number: int) -> SpanLinks:
        stages, quorum = now.call.programs.stages, now.quorum
        step, pieces = self._held.step, stages.stage_pieces[number]
        # Shorter than the exchange's timeout, so that members that wait for a link fail first.
        timeout_s = self._config.failure_timeout_s / 4

        def connected(span: Span | None, strand: int, abort: Abort, before: AnyLinks | None) -> AnyLinks:
            lane = 0 if span is None else span.start
            return open_links(
                self._listener,
                job=self._config.job,
                quorum_id=quorum.quorum_id,
                me=self._me,
                members=[_peer(member, lane, pieces.lanes.count) for member in quorum.members],
                abort=abort,
                patience=self._patience(quorum, step, timeout_s + self._more_s),
                lane=lane,
                strand=strand,
                before=before,
            )

        sizes = {len(endpoints_at(member.address)) for member in quorum.members}
        mine: tuple[Span | None, ...] = (None,) if sizes == {1} else pieces.spans(sizes)
        # No more than the largest exchange of a step is divided into.
        layouts = (stages.span_layout(stage, span) for stage in range(stages.count) for span in mine)
        strands = max(strands_of(layout, _threads(quorum)) for layout in layouts)
        self._listener.check(peers_of_each(len(quorum.members)), strands)
        _log.debug("quorum %d: exchanges in up to %d strands", quorum.quorum_id, strands)
        return SpanLinks(quorum.quorum_id, mine, now.abort, connected, self._links, strands)

    def _patience(self, quorum: NewQuorum, step: int, timeout_s: float) -> Patience:
        attempt, session = (quorum.quorum_id, step), self._session
        return Patience(
            timeout_s,
            counts=lambda: session.all_computed == attempt,
            moved=session.got_on,
            waits=self._waits,
        )

    def _vote(self, call: Call, quorum: NewQuorum) -> None:
        step, work = self._held.step, self.computing.work
        self._observers.enters("vote", step)
        self._voted_s = time.perf_counter()
        digest = self._held.started_digest()
        assert digest is not None or step != quorum.step, "the first step of a quorum is compared"
        stop = work.nonfinite if call.nonfinite == "raise" else ""
        vote = Exchanged(quorum.quorum_id, Step(step), digest, stop, self._held.edit_digest())
        with ctrl_c_later():
            self._voted = Attempt(quorum, Step(step))
            self._session.post(vote)

    def has_voted(self, attempt: Attempt) -> bool:
        """Whether the vote of this attempt is out, so that the job may commit with it."""
        return self._voted == attempt

    @property
    def votes_on_held(self) -> bool:
        """Whether a vote on the next step is out that may still count."""
        return (
            self._voted is not None
            and self._voted.step == self._held.step
            and bool(self.computing.work.stages)
        )

    def _drop_links(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None


def _shards_of(quorum: NewQuorum, group: GroupName) -> tuple[int, ...]:
    return next(member.shards for member in quorum.members if member.group == group)


def _threads(quorum: NewQuorum) -> int:
    """How many threads an exchange has at most. A quorum of one member exchanges nothing."""
    return agreed_threads(member.address for member in quorum.members) if len(quorum.members) > 1 else 1


def _peer(member: Member, lane: int, lanes: int) -> Peer:
    """The member's process that holds a lane."""
    ranks = endpoints_at(member.address)
    rank = rank_of(lane, len(ranks), lanes)
    return Peer(member.group, member.incarnation, ranks[rank].address, member.shards, rank, len(ranks))
