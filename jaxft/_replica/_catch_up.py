"""Brings this group to the job's frontier: fetches a snapshot from donors, and replays the steps since."""

import logging
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxft_protocol.messages import Heal, Step
from jaxft_protocol.ranks.lanes import Span, rank_of
from jaxft_protocol.replica.state import HealBroke, Healed, HealFrom, Replay, Replayed

from jaxft._arrays._layout import LeafSpec
from jaxft._arrays._pieces import Pieces
from jaxft._errors import HealFailed
from jaxft._heal._fetch import DonorAt, Fetcher
from jaxft._heal._spans import SpanFetcher
from jaxft._ranks._ranks import Directing, Ranks
from jaxft._replica._call import Call, FiniteCheck
from jaxft._replica._config import GroupConfig
from jaxft._replica._held_state import HeldState
from jaxft._replica._membership import Membership
from jaxft._replica._rehearsal import Rehearsal
from jaxft._report import HealReport, Record
from jaxft._telemetry._call import Observers
from jaxft._transport._endpoints import endpoints_at
from jaxft._transport._listener import Abort

_log = logging.getLogger("jaxft")


class CatchUp:
    """This group's heals. The training thread owns it."""

    def __init__(
        self,
        config: GroupConfig,
        member: Membership,
        observers: Observers,
        held: HeldState,
        finite: FiniteCheck,
    ) -> None:
        self._config = config
        self._me = member.identity
        self._session: Directing = member.session
        self._ranks: Ranks = member.ranks
        self._key = member.listener.key
        self._observers = observers
        self._held = held
        self._finite = finite
        self._rehearsal = Rehearsal(self._session, self._ranks, held)
        self._fetcher: SpanFetcher | None = None
        self._fetches_for = 0  # the heal that the fetcher is for
        self._began_s = 0.0

    def heal(self, directive: HealFrom, call: Call, record: Record) -> bool:
        """Fetch the snapshot of a heal and hold it; return False if that failed or was aborted."""
        heal = directive.heal
        self._began_s = time.perf_counter()
        donors = tuple(donor.group for donor in heal.donors)
        _log.info("[jaxft %s] heals to step %d from %s", self._me.group, heal.step, ", ".join(donors))
        self._observers.enters("heal", heal.step)
        pieces = call.programs.stages.state_pieces
        self._rehearsal.start(call)
        with (
            self._session.activity(directive, Abort()) as abort,
            self._ranks.operation("heal", abort) as operation,
        ):
            fetcher = self._fetcher_for(heal, pieces)
            fetched: Sequence[np.ndarray] = ()
            try:
                fetched = fetcher.state(heal.step, pieces, cancel=abort)
                failure = ""
            except HealFailed as error:
                failure = str(error)
            verdict = operation.settle(failure)
            if not verdict.ok:
                # Also if it was aborted: a reconnected session waits for a report of the held step.
                self._session.post(HealBroke(heal.heal_id, verdict.failure))
                return False
            self._rehearsal.touch_results(call)
            self._held.heal(heal.step, fetched, pieces, call.programs.cut.donated)
            self._session.post(Healed(heal.heal_id, heal.step))
        record.caught_up_with(call.programs.blank_metrics())
        record.heal = self._report(fetcher, heal.step, 0, donors)
        return True

    def replay(self, directive: Replay, call: Call, record: Record) -> bool:
        """Apply the means of a committed step; return False if it is already applied or cannot be fetched."""
        step, heal = directive.step, directive.heal
        if step != self._held.step:
            # The frontier moved before the session's thread got the report of the last replay, so the directive names
            # the same step again. Applying it twice would corrupt the state.
            return False
        self._observers.enters("replay", step)
        with (
            self._session.activity(directive, Abort()) as abort,
            self._ranks.operation("replay", abort) as operation,
        ):
            programs = call.programs
            fetcher = self._fetcher_for(heal, programs.stages.state_pieces)
            means: list[np.ndarray] = []
            numbers: list[int] = []
            edits: Sequence[np.ndarray] = ()
            failure = note = ""
            try:
                flags = LeafSpec("edited", (len(self._held.leaves),), "uint8")
                means, changed = fetcher.means(
                    step, programs.stages.specs_of, programs.stages.stage_pieces, flags, cancel=abort
                )
                numbers = np.flatnonzero(changed).tolist()
                edits = fetcher.edits(step, programs.stages.pieces_of_state(numbers), cancel=abort)
                note = self._finite.look(call, means, step)
            except HealFailed as error:
                failure = str(error)
            verdict = operation.settle(failure, note=note)
            if not verdict.ok:
                self._session.post(HealBroke(heal.heal_id, verdict.failure))
                return False
            self._held.replay_edit(self._placed(call, numbers, edits))
            record.nonfinite = verdict.note
            skip = bool(record.nonfinite) and call.nonfinite == "skip"
            report = Replayed(heal.heal_id, Step(step + 1))
            metrics = self._held.advance(
                call.programs, means, None, skip=skip, done=lambda: self._session.post(report)
            )
        record.caught_up_with(metrics)
        if (so_far := record.heal) is not None:
            replayed = so_far.replayed_steps + 1
            record.heal = self._report(fetcher, so_far.snapshot_step, replayed, so_far.donors)
        return True

    def _placed(
        self, call: Call, numbers: Sequence[int], edits: Sequence[np.ndarray]
    ) -> dict[int, jax.Array]:
        """The leaves that the job edited before a step."""
        if not numbers:
            return {}
        like = [self._held.leaves[number] for number in numbers]
        return dict(
            zip(numbers, call.programs.stages.pieces_of_state(numbers).place(edits, like), strict=True)
        )

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def _fetcher_for(self, heal: Heal, pieces: Pieces) -> SpanFetcher:
        if self._fetcher is None or self._fetches_for != heal.heal_id:
            self.close()
            self._fetches_for = heal.heal_id
            sizes = {self._ranks.size, *(len(endpoints_at(donor.address)) for donor in heal.donors)}
            spans: Sequence[Span | None] = (None,) if sizes == {1} else pieces.spans(sizes)
            self._fetcher = SpanFetcher([(span, self._of_span(heal, span, pieces)) for span in spans])
        return self._fetcher

    def _of_span(self, heal: Heal, span: Span | None, pieces: Pieces) -> Fetcher:
        donors = list[DonorAt]()
        for donor in heal.donors:
            ranks = endpoints_at(donor.address)
            rank = 0 if span is None else rank_of(span.start, len(ranks), pieces.lanes.count)
            donors.append(DonorAt(donor.group, donor.incarnation, ranks[rank].address, rank))
        return Fetcher(
            job=self._me.job,
            group=self._me.group,
            incarnation=self._me.incarnation,
            heal_id=heal.heal_id,
            donors=donors,
            span=span,
            timeout_s=self._config.failure_timeout_s / 2,
            key=self._key,
            # Rank 0 waits for the slowest rank as long as its bytes move.
            moved=self._session.got_on,
        )

    def _report(
        self, fetcher: SpanFetcher, snapshot_step: int, replayed: int, donors: tuple[str, ...]
    ) -> HealReport:
        seconds = time.perf_counter() - self._began_s
        return HealReport(snapshot_step, replayed, fetcher.transferred_bytes, seconds, donors)
