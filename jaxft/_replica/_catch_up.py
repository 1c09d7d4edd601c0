"""Brings this group to the job's frontier: fetches a snapshot from donors, and replays the steps since."""

import logging
import time

import numpy as np
from jaxft_protocol.messages import Heal, Step
from jaxft_protocol.replica.state import HealBroke, Healed, HealFrom, Identity, Replay, Replayed

from jaxft._arrays._layout import LeafSpec
from jaxft._errors import HealFailed
from jaxft._heal._fetch import DonorAt, Fetcher
from jaxft._replica._config import GroupConfig
from jaxft._replica._engine import Call
from jaxft._replica._finite import FiniteCheck
from jaxft._replica._held_state import HeldState
from jaxft._replica._session import Session
from jaxft._report import HealReport, Record
from jaxft._transport._listener import Abort, Listener

_log = logging.getLogger("jaxft")


class CatchUp:
    """This group's heals. The training thread owns it."""

    def __init__(
        self,
        config: GroupConfig,
        identity: Identity,
        session: Session,
        listener: Listener,
        held: HeldState,
        finite: FiniteCheck,
    ) -> None:
        self._config = config
        self._me = identity
        self._session = session
        self._key = listener.key
        self._held = held
        self._finite = finite
        self._fetcher: Fetcher | None = None
        self._fetches_for = 0  # the heal that the fetcher is for
        self._began_s = 0.0

    def heal(self, directive: HealFrom, call: Call, record: Record) -> bool:
        """Fetch the snapshot of a heal and hold it; return False if that failed or was aborted."""
        heal = directive.heal
        self._began_s = time.perf_counter()
        donors = tuple(donor.group for donor in heal.donors)
        _log.info("[jaxft %s] heals to step %d from %s", self._me.group, heal.step, ", ".join(donors))
        with self._session.activity(directive, Abort()) as abort:
            fetcher = self._fetcher_for(heal)
            try:
                leaves = fetcher.state(heal.step, self._held.leaves, cancel=abort)
            except HealFailed as error:
                # Also if it was aborted: a reconnected session waits for a report of what this group holds.
                self._session.post(HealBroke(heal.heal_id, str(error)))
                return False
            self._held.replace(heal.step, leaves)
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
        _log.debug("replay step %d", step)
        with self._session.activity(directive, Abort()) as abort:
            fetcher = self._fetcher_for(heal)
            try:
                *means, changed = fetcher.means(step, self._logged(call), cancel=abort)
                numbers = np.flatnonzero(changed).tolist()
                edits = fetcher.edits(step, [self._held.leaves[number] for number in numbers], cancel=abort)
            except HealFailed as error:
                self._session.post(HealBroke(heal.heal_id, str(error)))
                return False
            self._held.replay_edit(dict(zip(numbers, edits, strict=True)))
            record.nonfinite = self._finite.look(call, means, step)
            skip = bool(record.nonfinite) and call.nonfinite == "skip"
            try:
                metrics = self._held.advance(call.programs, means, None, skip=skip)
            finally:
                if self._held.step == step + 1:  # also if Ctrl-C came while it was applied
                    self._session.post(Replayed(heal.heal_id, Step(self._held.step)))
        record.caught_up_with(metrics)
        if (so_far := record.heal) is not None:
            replayed = so_far.replayed_steps + 1
            record.heal = self._report(fetcher, so_far.snapshot_step, replayed, so_far.donors)
        return True

    def _logged(self, call: Call) -> list[LeafSpec]:
        """What donors log of a step: the means, and which leaves were edited before it."""
        return [*call.programs.contribution, LeafSpec("edited", (len(self._held.leaves),), "uint8")]

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def _fetcher_for(self, heal: Heal) -> Fetcher:
        if self._fetcher is None or self._fetches_for != heal.heal_id:
            self.close()
            self._fetches_for = heal.heal_id
            self._fetcher = Fetcher(
                job=self._me.job,
                group=self._me.group,
                incarnation=self._me.incarnation,
                heal_id=heal.heal_id,
                donors=[DonorAt(donor.group, donor.incarnation, donor.address) for donor in heal.donors],
                timeout_s=self._config.failure_timeout_s / 2,
                key=self._key,
            )
        return self._fetcher

    def _report(
        self, fetcher: Fetcher, snapshot_step: int, replayed: int, donors: tuple[str, ...]
    ) -> HealReport:
        seconds = time.perf_counter() - self._began_s
        return HealReport(snapshot_step, replayed, fetcher.transferred_bytes, seconds, donors)
