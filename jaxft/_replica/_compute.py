"""Computes this group's contribution to a step, stage by stage, and keeps it from one attempt to the next."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxft_protocol.messages import NewQuorum

from jaxft._arrays._host_copies import host_copies
from jaxft._base._calls import Parts, Paused, reporting
from jaxft._exchange._partials import Leaf, Partials
from jaxft._programs._programs import Local
from jaxft._ranks._ranks import Directing, Ranks
from jaxft._replica._call import Call
from jaxft._replica._held_state import HeldState
from jaxft._replica._membership import Membership
from jaxft._report import Record
from jaxft._telemetry._call import Observers
from jaxft._transport._listener import Abort
from jaxft.data._batch_functions import OwnBatch, StateBatches, example_of


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt at the step after the state that this group holds.

    Attributes:
        call: the step.
        quorum: the groups that try it.
        shards: which of its shards this group computes.
        abort: set when the attempt was replaced.
        record: what happens in it.
    """

    call: Call
    quorum: NewQuorum
    shards: tuple[int, ...]
    abort: Abort
    record: Record


@dataclass
class Stage:
    """This group's work for one exchange, and the means of the last exchange."""

    contributions: dict[int, Sequence[Leaf]] = field(default_factory=dict[int, Sequence[Leaf]])
    locals: dict[int, Local] = field(default_factory=dict[int, Local])
    partials: Partials | None = None
    means: list[np.ndarray] | None = None
    given: Sequence[Any] = ()  # the means as programs take them: on the devices of an accelerator

    @property
    def adds_on_device(self) -> bool:
        return self.partials is not None and self.partials.sums is not None


@dataclass
class Work:
    """This group's work on one step. It outlives attempts, so nothing is computed twice."""

    step: int
    stages: list[Stage] = field(default_factory=list[Stage])
    counted: tuple[int, ...] = ()  # the keys of the shards that belong to the last attempt
    nonfinite: str = ""  # which of the means is not finite
    begun: dict[Any, Any] = field(default_factory=dict[Any, Any])  # shards whose computation was paused

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
        """Note the means of a stage. If the stages `after` were computed from other means, drop these."""
        stage = self.stages[number]
        if stage.means is not None and not all(map(_same_bits, stage.means, means)):
            del self.stages[after:]
        stage.means = means


class Computing:
    """This group's computation of one step. The training thread owns it."""

    def __init__(self, member: Membership, observers: Observers, held: HeldState) -> None:
        self._session: Directing = member.session
        self._ranks: Ranks = member.ranks
        self._observers = observers
        self._held = held
        self.work = Work(held.step)
        self._shard: int | None = None  # which is being computed
        self._abort = Abort()  # of the current attempt

    def begin(self, step: int) -> None:
        """An attempt at a step begins: drop the work on another step."""
        if self.work.step != step:
            self.forget()
        for stage in self.work.stages:
            stage.given = ()  # of the last attempt: more shards may need the memory

    def forget(self) -> None:
        """Drop the work on a state that is no longer held."""
        self.work = Work(self._held.step)

    def give_up(self) -> int | None:
        """After an exception: drop what may be half done. Return the shard that was being computed, if any."""
        shard, self._shard = self._shard, None
        self.forget()
        return shard

    def compute(self, now: Try, number: int) -> bool:
        """Have this group's contribution to a stage; return False if the attempt was replaced meanwhile.

        With the first stage of a run, all of the run is started, and the others are only waited for.
        """
        began_s, self._abort = time.perf_counter(), now.abort
        shards, stages = now.shards, now.call.programs.stages
        run = stages.run_of(number)
        if number == run.start:
            self._prepare(now, run)
            if not self._start(now, run):
                return False
        elif shards and stages.begins(number):
            for each in stages.made_with(number):
                self._merge(now.call, each, shards[-1])
        for each in stages.made_with(number):
            partials = self.work.stages[each].partials
            assert partials is not None
            partials.start_copies()
        now.record.compute_s += time.perf_counter() - began_s
        # The name shows a rank with another edit than rank 0's, before a collective of one rank alone.
        return self._ranks.decide(f"exchange{_edits_text(self._held.edits)}", value=not now.abort.is_set)

    def _start(self, now: Try, run: range) -> bool:
        """Compute the missing shards of a run. Of the last shard, wait only for the first exchange's part."""
        call, shards = now.call, now.shards
        self.work.counted = ()
        started: list[int] = []
        for shard in shards:
            if not self._ranks.decide("go on", value=not now.abort.is_set):
                return False
            key = self._key(call, shard)
            if key not in self.work.stages[run.stop - 1].locals:
                self._shard = shard
                self._observers.enters("compute", self.work.step, f" shard {shard}{stage_text(run.start)}")
                try:
                    self._run(call, run, key, shard)
                except Paused:
                    self._shard = None
                    return False
                if run.start == 0:
                    now.record.shards.append(shard)
            started.append(shard)
            last = shard == shards[-1]
            # An accelerator is given the next shard's programs and batch before it has finished the current shard.
            # On CPU the two shards would compete for the cores.
            ahead = 1 if call.programs.device.has_room_ahead() else 0
            while len(started) > (0 if last else ahead):
                one = started.pop(0)
                for number in run if one != shards[-1] else call.programs.stages.made_with(run.start):
                    self._merge(call, number, one)
                self.work.counted = (*self.work.counted, self._key(call, one))
        return True

    def _run(self, call: Call, run: range, key: int, shard: int) -> None:
        """Start the programs of a run on a shard, one after the other."""
        leaves, work, programs = self._held.current, self.work, call.programs
        means: list[jax.Array] = []
        if run.start == 0:
            made, local = self._compute_first(call, shard)
        else:
            means = programs.stages.joined(work.given(run.start), run.start)
            before = work.stages[run.start - 1].locals
            made, local = programs.compute_next(leaves, means, self._unspent(call, before[key], means, shard))
            before[key] = before[key].only_counts()  # the new local has all that is still needed
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
        # A batch made from the state may run a collective, in which this rank waits for others.
        self._ranks.awaits_others(now=isinstance(call.batch_for, StateBatches))
        with reporting(self._session.got_on, Parts(self._goes_on, self.work.begun)):
            self._session.in_parts = example_of(call.batch_for) is not call.batch_for
            try:
                batch = call.batch_for(self.work.step, shard)
            finally:
                self._session.in_parts = False
        self._ranks.awaits_others(now=True)
        return call.programs.compute(self._held.current, batch, shard)

    def _goes_on(self) -> bool:
        """Whether a shard may be computed further. Without the coordinator there is nothing else to do."""
        return self._ranks.decide("go on", value=not self._abort.is_set or self._session.cut_off)

    def _unspent(self, call: Call, local: Local, means: Sequence[Any], shard: int) -> Local:
        """The input of a stage, computed again if the stage is: with other means than the last time."""
        if not local.spent:
            return local
        _, again = self._compute_first(call, shard)
        while again.program < local.program:
            _, again = call.programs.compute_next(self._held.current, means, again)
        return again

    def _merge(self, call: Call, number: int, shard: int) -> None:
        """Wait for a shard's contribution to a stage, and add it to the contributions of this group's other
        shards."""
        stage = self.work.stages[number]
        key = self._key(call, shard)
        assert stage.partials is not None
        if key in stage.contributions and not stage.partials.has(shard):
            self._shard = shard  # its program may fail only now
            self._ranks.awaits_others(now=True)
            if stage.adds_on_device:  # then `add` waits for nothing
                jax.block_until_ready(stage.contributions[key])
            stage.partials.add(shard, stage.contributions[key])
            if call.shards is not None:
                del stage.contributions[key]  # its values are held, or summed
        self._shard = None
        self._ranks.awaits_others(now=False)
        self._session.got_on()

    def _key(self, call: Call, shard: int) -> int:
        # If each member has one shard, its number is the member's position, which may change. A batch that the group
        # brings is valid at any position; a batch made for a position is valid only there, as if the step asks
        # for it.
        anywhere = isinstance(call.batch_for, OwnBatch) and not call.programs.cut.depends_on_shard
        return 0 if call.shards is None and anywhere else shard

    def _prepare(self, now: Try, run: range) -> None:
        """Keep the computed work for a run that is usable in this quorum."""
        call = now.call
        first = self.work.stages[0].locals.keys() if self.work.stages else set[int]()
        if call.shards is not None and not first <= set(now.shards):
            # Back after a lost connection, and other groups got shards that this group had computed:
            # sums cannot be taken apart.
            self.forget()
        stages = self.work.stages
        for number in run:
            if number == len(stages):
                stages.append(Stage())
            if stages[number].partials is None or call.shards is None:
                stages[number].partials = Partials(
                    call.programs.stages.layouts[number], now.quorum.total_shards, call.sums(number)
                )


def stage_text(number: int) -> str:
    return f" stage {number}" if number else ""


def _edits_text(edits: Collection[int]) -> str:
    return f" after an edit of the leaves number {sorted(edits)}" if edits else ""


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    # As bytes: NaN is not equal to itself.
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
