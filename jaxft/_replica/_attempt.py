"""Attempts at one step: compute this group's shards, exchange with the others, vote; apply once the job commits.

A step with several exchanges computes and exchanges in turn, stage by stage, and votes once. An attempt goes through
all stages again: it exchanges what was computed before, so that all members get the same means, however far each had
come. The contributions to later stages stay valid, because the means do not depend on the members. Where they do
(without `shards`, or after a member was evicted for what it had contributed), later stages are computed again.

Each phase is announced on the logger at DEBUG: "compute step 3 shard 1", "exchange step 3", ..., and in later stages
"compute step 3 shard 1 stage 1", "exchange step 3 stage 1".
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxft_protocol.messages import GroupName, Member, NewQuorum, Step
from jaxft_protocol.ranks.lanes import Span, rank_of
from jaxft_protocol.replica.state import Applied, Attempt, ExchangeBroke, Exchanged

from jaxft._arrays._host_copies import host_copies
from jaxft._base._calls import ctrl_c_later, told
from jaxft._errors import ExchangeFailed
from jaxft._exchange._grid import peers_of_each
from jaxft._exchange._grid_links import AnyLinks, open_links
from jaxft._exchange._links import Peer
from jaxft._exchange._partials import Leaf, Partials
from jaxft._exchange._patience import LongWaits, Patience
from jaxft._exchange._plan import strands_of
from jaxft._exchange._spans import Contribution, SpanLinks
from jaxft._programs._programs import Local
from jaxft._ranks._ranks import Directing, Ranks, Verdict
from jaxft._replica._call import Call, FiniteCheck
from jaxft._replica._config import GroupConfig
from jaxft._replica._held_state import HeldState
from jaxft._replica._membership import Membership
from jaxft._report import Record
from jaxft._telemetry._call import Observers
from jaxft._transport._endpoints import agreed_threads, endpoints_at
from jaxft._transport._listener import Abort
from jaxft.data._batch_functions import OwnBatch, StateBatches

_log = logging.getLogger("jaxft")

# Before a later exchange of a step, peers may compute for this many times as long as the step took so far, beyond the
# usual limit. Nothing tells this group when they have; one that died or froze is noticed by its heartbeats.
STAGES_OF_PATIENCE = 8


@dataclass
class _Stage:
    """What this group has computed for one exchange, and the means of the last one."""

    contributions: dict[int, Sequence[Leaf]] = field(default_factory=dict[int, Sequence[Leaf]])
    locals: dict[int, Local] = field(default_factory=dict[int, Local])
    partials: Partials | None = None
    means: list[np.ndarray] | None = None
    given: Sequence[Any] = ()  # the means as programs take them: on the devices of an accelerator

    @property
    def adds_on_device(self) -> bool:
        return self.partials is not None and self.partials.sums is not None


@dataclass
class _Work:
    """What this group has computed of one step. It outlives attempts, so nothing is computed twice."""

    step: int
    stages: list[_Stage] = field(default_factory=list[_Stage])
    counted: tuple[int, ...] = ()  # the keys of the shards that belong to the last attempt
    nonfinite: str = ""  # which of the means is not finite

    def means(self, stages: int) -> list[np.ndarray]:
        """The means of the first stages, in the order of the contribution."""
        found: list[np.ndarray] = []
        for stage in self.stages[:stages]:
            assert stage.means is not None
            found += stage.means
        return found

    def given(self, stages: int) -> list[Any]:
        """The same as `means`, as programs take them."""
        return [mean for stage in self.stages[:stages] for mean in stage.given]

    def took(self, number: int, means: list[np.ndarray], after: int) -> None:
        """Note the means of a stage. If they are not what the stages `after` were computed from, drop these."""
        stage = self.stages[number]
        if stage.means is not None and not all(map(_same_bits, stage.means, means)):
            del self.stages[after:]
        stage.means = means


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
        self._work = _Work(held.step)
        self._links: SpanLinks | None = None  # of an older quorum until the first exchange in a new one
        self._abort = Abort()
        self._waits = LongWaits()
        self._more_s = 0.0  # how much longer than usual peers may compute before the current exchange
        self._voted_s = 0.0
        self._shard: int | None = None  # which is being computed
        self._voted: Attempt | None = None  # the last attempt that came to its vote

    def attempt(self, call: Call, quorum: NewQuorum, step: int, record: Record) -> None:
        """Try a step in a quorum up to the vote, or until the core directs something else."""
        held = self._held
        assert step == held.step, f"asked for step {step} while holding state {held.step}"
        # Checked even if links exist: once the listener has ended, no group can join or heal from this one.
        self._listener.check(peers_of_each(len(quorum.members)))
        if self._work.step != step:
            self.forget()
        for stage in self._work.stages:
            stage.given = ()  # of the last attempt: more shards may need the memory
        record.entered(quorum)
        record.attempts += 1
        if self._links is None or self._links.quorum_id != quorum.quorum_id:
            self._abort = Abort()  # one for each quorum; its links watch it
        with self._session.activity(Attempt(quorum, Step(step)), self._abort) as abort:
            held.start_digest(quorum.step)
            began_s = time.monotonic()
            for stage in range(call.programs.stages.count):
                if not self._compute(call, stage, quorum, abort, record):
                    return
                self._session.computed = (quorum.quorum_id, Step(step))
                # From the first exchange on, time counts. Before a later one, peers may still compute, if there is
                # something to compute.
                computes = stage > 0 and call.programs.stages.begins(stage)
                more_s = STAGES_OF_PATIENCE * (time.monotonic() - began_s) if computes else 0.0
                if not self._exchanged(call, stage, quorum, more_s, abort, record):
                    return
        self._vote(call, quorum, record)

    def apply(self, call: Call, step: int, record: Record) -> None:
        """Apply the means of the last attempt, which the job has committed."""
        self._observers.enters("apply", step)
        record.vote_s = time.perf_counter() - self._voted_s
        work = self._work
        assert work.step == step == self._held.step
        means = work.means(call.programs.stages.count)
        local = work.stages[-1].locals[min(work.counted)] if work.counted else None
        skip = call.nonfinite == "skip" and bool(work.nonfinite)

        def applied() -> None:
            self._session.post(Applied(Step(step + 1)))
            self.forget()

        given = work.given(call.programs.stages.count)
        record.metrics = self._held.advance(call.programs, means, local, skip=skip, done=applied, given=given)

    def forget(self) -> None:
        """Drop what was computed from a state that is no longer held."""
        self._work = _Work(self._held.step)

    def give_up(self) -> int | None:
        """After an exception: drop what may be half done. Return the shard that was being computed, if any."""
        shard, self._shard = self._shard, None
        self._drop_links()
        self.forget()
        return shard

    def leave_quorum(self) -> None:
        """Close the connections of the last quorum, which goes on without this group: the others close theirs."""
        self._drop_links()

    def close(self) -> None:
        self._drop_links()

    def _compute(self, call: Call, number: int, quorum: NewQuorum, abort: Abort, record: Record) -> bool:
        """Have this group's contribution to a stage; return False if the attempt was replaced meanwhile.

        With the first stage of a run, all of the run is started, and the others are only waited for.
        """
        began_s = time.perf_counter()
        shards = _shards_of(quorum, self._me)
        run = call.programs.stages.run_of(number)
        if number == run.start:
            self._prepare(call, run, quorum, shards)
            if not self._start(call, run, shards, abort, record):
                return False
        elif shards and call.programs.stages.begins(number):
            for each in call.programs.stages.made_with(number):
                self._merge(call, each, shards[-1])
        for each in call.programs.stages.made_with(number):
            partials = self._work.stages[each].partials
            assert partials is not None
            partials.start_copies()
        record.compute_s += time.perf_counter() - began_s
        # The name tells a rank that has made another edit than rank 0, before a collective of one rank alone.
        return self._ranks.decide(f"exchange{_edits_text(self._held.edits)}", not abort.is_set)

    def _start(self, call: Call, run: range, shards: tuple[int, ...], abort: Abort, record: Record) -> bool:
        """Compute what is missing of a run. Of the last shard, wait only for what the first exchange needs."""
        self._work.counted = ()
        started: list[int] = []
        for shard in shards:
            if not self._ranks.decide("go on", not abort.is_set):
                return False
            key = self._key(call, shard)
            if key not in self._work.stages[run.stop - 1].locals:
                self._shard = shard
                self._observers.enters("compute", self._work.step, f" shard {shard}{_stage_text(run.start)}")
                self._run(call, run, key, shard)
                if run.start == 0:
                    record.shards.append(shard)
            started.append(shard)
            last = shard == shards[-1]
            # An accelerator has its next programs, and their batch, before it has ended the last. On CPU they would
            # take the cores from each other.
            ahead = 1 if call.programs.device.has_room_ahead() else 0
            while len(started) > (0 if last else ahead):
                one = started.pop(0)
                for number in run if one != shards[-1] else call.programs.stages.made_with(run.start):
                    self._merge(call, number, one)
                self._work.counted = (*self._work.counted, self._key(call, one))
        return True

    def _run(self, call: Call, run: range, key: int, shard: int) -> None:
        """Start the programs of a run on a shard, one after the other."""
        leaves, work, programs = self._held.current, self._work, call.programs
        means: list[jax.Array] = []
        if run.start == 0:
            made, local = self._compute_first(call, shard)
        else:
            means = programs.stages.joined(work.given(run.start), run.start)
            before = work.stages[run.start - 1].locals
            made, local = programs.compute_next(leaves, means, self._unspent(call, before[key], means, shard))
            before[key] = before[key].only_counts()  # the new one has what is still needed
        for number in run:
            if number > run.start and programs.stages.begins(number):
                made, local = programs.compute_next(leaves, means, local)
            stage = work.stages[number]
            contribution = programs.stages.stage_pieces[number].split(programs.stages.bucket(number, made))
            call.made(number, contribution)
            if programs.stages.on_accelerator and not stage.adds_on_device:
                # Now: a copy waits for all programs that were started before it.
                stage.contributions[key] = host_copies(contribution)
            else:
                stage.contributions[key] = contribution
            others = stage.locals.values()
            stage.locals[key] = local.sharing(others) if number == run.stop - 1 else local.only_counts()

    def _compute_first(self, call: Call, shard: int) -> tuple[list[jax.Array], Local]:
        # What is made of the state may run a collective, in which this rank waits for others.
        self._ranks.awaits_others(isinstance(call.batch_for, StateBatches))
        with told(self._session.got_on):
            batch = call.batch_for(self._work.step, shard)
        self._ranks.awaits_others(True)
        return call.programs.compute(self._held.current, batch, shard)

    def _unspent(self, call: Call, local: Local, means: Sequence[Any], shard: int) -> Local:
        """What a stage goes on from. It is made again if the stage is: with other means than the last time."""
        if not local.spent:
            return local
        _, again = self._compute_first(call, shard)
        while again.program < local.program:
            _, again = call.programs.compute_next(self._held.current, means, again)
        return again

    def _merge(self, call: Call, number: int, shard: int) -> None:
        """Wait for a shard's contribution to a stage, and add it to those of this group's other shards."""
        stage = self._work.stages[number]
        key = self._key(call, shard)
        assert stage.partials is not None
        if key in stage.contributions and not stage.partials.has(shard):
            self._shard = shard  # its program may fail only now
            self._ranks.awaits_others(True)
            if stage.adds_on_device:  # then `add` waits for nothing
                jax.block_until_ready(stage.contributions[key])
            stage.partials.add(shard, stage.contributions[key])
            if call.shards is not None:
                del stage.contributions[key]  # its values are held, or summed
        self._shard = None
        self._ranks.awaits_others(False)
        self._session.got_on()

    def _key(self, call: Call, shard: int) -> int:
        # If each member has one shard, its number is the member's position, which may change. A batch that the group
        # brings is valid at any position; one that is made for a position is valid only there, as if the step asks
        # for it.
        anywhere = isinstance(call.batch_for, OwnBatch) and not call.programs.cut.depends_on_shard
        return 0 if call.shards is None and anywhere else shard

    def _prepare(self, call: Call, run: range, quorum: NewQuorum, shards: tuple[int, ...]) -> None:
        """Keep what is already computed for a run, and usable in this quorum."""
        first = self._work.stages[0].locals.keys() if self._work.stages else set[int]()
        if call.shards is not None and not first <= set(shards):
            # Back after a lost connection, and other groups got shards that this group had computed: what was
            # already summed cannot be taken apart.
            self.forget()
        stages = self._work.stages
        for number in run:
            if number == len(stages):
                stages.append(_Stage())
            if stages[number].partials is None or call.shards is None:
                stages[number].partials = Partials(
                    call.programs.stages.layouts[number], quorum.total_shards, call.sums(number)
                )

    def _exchanged(
        self, call: Call, number: int, quorum: NewQuorum, more_s: float, abort: Abort, record: Record
    ) -> bool:
        """Exchange with the other members; return False if it failed (and report that) or was aborted."""
        step = self._held.step
        began_s = time.perf_counter()
        try:
            verdict = self._exchange_of_all_ranks(call, number, quorum, more_s, abort)
        finally:
            record.exchange_s += time.perf_counter() - began_s
        if verdict.ok:
            self._work.nonfinite = record.nonfinite = verdict.note
            return True
        self._drop_links()
        if not verdict.stopped:
            accused = tuple(GroupName(peer) for peer in verdict.accused)
            self._session.post(ExchangeBroke(quorum.quorum_id, Step(step), accused, verdict.failure))
        return False

    def _exchange_of_all_ranks(
        self, call: Call, number: int, quorum: NewQuorum, more_s: float, abort: Abort
    ) -> Verdict:
        work, stages = self._work, call.programs.stages.count
        with self._ranks.operation("exchange", abort) as operation:
            try:
                means = self._exchange(call, number, quorum, more_s, abort)
            except ExchangeFailed as error:
                return operation.settle(str(error), tuple(error.peers))
            self._session.got_on()
            work.took(number, means, call.programs.stages.run_of(number).stop)
            work.stages[number].given = call.programs.device.to_devices(number, means)
            last = number == stages - 1
            note = self._finite.look(call, work.means(stages), self._held.step) if last else ""
            return operation.settle(note=note)

    def _exchange(
        self, call: Call, number: int, quorum: NewQuorum, more_s: float, abort: Abort
    ) -> list[np.ndarray]:
        step, timeout_s = self._held.step, self._config.failure_timeout_s
        self._more_s = more_s
        self._waits.begin(step)
        self._observers.enters("exchange", step, _stage_text(number))
        if self._links is None or self._links.quorum_id != quorum.quorum_id:
            self._links = self._span_links(call, number, quorum, abort)
        partials = self._work.stages[number].partials
        assert partials is not None
        return self._links.exchange(
            Contribution(
                partials,
                call.programs.stages.stage_pieces[number],
                lambda span: call.programs.stages.span_layout(number, span),
            ),
            step=step,
            total_shards=quorum.total_shards,
            patience=lambda later_s: self._patience(quorum, step, timeout_s / 2 + more_s + later_s),
        )

    def _span_links(self, call: Call, number: int, quorum: NewQuorum, abort: Abort) -> SpanLinks:
        step, pieces = self._held.step, call.programs.stages.stage_pieces[number]
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
        layouts = (
            call.programs.stages.span_layout(stage, span)
            for stage in range(call.programs.stages.count)
            for span in mine
        )
        strands = max(strands_of(layout, _threads(quorum)) for layout in layouts)
        self._listener.check(peers_of_each(len(quorum.members)), strands)
        _log.debug("quorum %d: exchanges in up to %d strands", quorum.quorum_id, strands)
        return SpanLinks(quorum.quorum_id, mine, abort, connected, self._links, strands)

    def _patience(self, quorum: NewQuorum, step: int, timeout_s: float) -> Patience:
        attempt, session = (quorum.quorum_id, step), self._session
        return Patience(
            timeout_s,
            counts=lambda: session.all_computed == attempt,
            moved=session.got_on,
            waits=self._waits,
        )

    def _vote(self, call: Call, quorum: NewQuorum, record: Record) -> None:
        step, work = self._held.step, self._work
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
        return self._voted is not None and self._voted.step == self._held.step and bool(self._work.stages)

    def _drop_links(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None


def _stage_text(number: int) -> str:
    return f" stage {number}" if number else ""


def _edits_text(edits: Collection[int]) -> str:
    return f" after an edit of the leaves number {sorted(edits)}" if edits else ""


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    # As bytes: NaN is not equal to itself.
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


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
