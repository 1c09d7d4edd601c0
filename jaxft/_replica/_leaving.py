"""How a group leaves its job at the end of the `with` block: it saves, says goodbye, and tells its supervisor."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxft_protocol.replica.state import LeaveNow

from jaxft._errors import CannotHeal, JaxftError, JobFinished, NotSaved, SessionFailed
from jaxft._ranks._link import end_if_lost
from jaxft._replica._config import GroupConfig
from jaxft._replica._draining import Drained
from jaxft._replica._membership import Membership
from jaxft._replica._runner import Runner
from jaxft._supervised._beacon import Beacon

if TYPE_CHECKING:
    from jaxft._supervised._agent import Agent

_log = logging.getLogger("jaxft")


@dataclass(frozen=True, slots=True)
class Leaving:
    """A group whose `with` block has ended. `runner`: None if the Manager could not be entered."""

    config: GroupConfig
    member: Membership
    runner: Runner | None
    beacon: Beacon | None
    agent: "Agent | None"

    def leave(self, error: BaseException | None) -> None:
        """Save the state, leave the job, and tell the supervisor of the end. `error`: it has ended the block.

        Raises:
            NotSaved: the last state of a finished job is not on the disk.
            SessionFailed: the job is finished here, and the session has failed before the group had left.
        """
        ended = isinstance(error, JobFinished) and self.runner is not None and self.runner.ended
        finished = error is None or ended
        self._end_if_lost(error)
        if finished and self.agent is not None:
            self.agent.finished()
        unsaved = self._save(error, finished=finished)
        self._take_leave(finished=finished and not unsaved, drained=isinstance(error, Drained))
        if self.beacon is not None:
            if isinstance(error, Drained):
                self.beacon.drained(self.runner.step if self.runner else 0)
            if isinstance(error, JobFinished) and not ended:
                self.beacon.late()
            # A folder of checkpoints that was not there may come back.
            if isinstance(error, CannotHeal) and self.config.checkpoints is None:
                self.beacon.stranded()
        if unsaved:
            raise self._not_saved(unsaved)

    def finish_saves(self, error: BaseException | None) -> None:
        """Wait for saves that are under way, unless others wait for this rank, whose program has failed."""
        failed = isinstance(error, Exception) and not isinstance(error, JaxftError)
        waits = not isinstance(error, NotSaved) and not (failed and self.member.ranks.size > 1)
        if self.config.checkpoints is not None and waits:
            self.config.checkpoints.finish(self.config.failure_timeout_s)

    def _end_if_lost(self, error: BaseException | None) -> None:
        """A collective that lost a rank may fail only where its result is read, outside of the step."""
        waited = self.runner is not None and self.runner.broken
        if self.member.ranks.size > 1 and not waited:
            end_if_lost(self.member.ranks, self.config.group, error)

    def _save(self, error: BaseException | None, *, finished: bool) -> str:
        """Save the state that this group leaves with; return why a finished job's last state is not on the disk."""
        if self.runner is None or self.config.checkpoints is None:
            return ""
        if finished:
            return self.runner.save_last()
        # Ctrl-C, or the program's own answer to a signal: it may come to one rank alone.
        stopped = isinstance(error, KeyboardInterrupt | SystemExit) and not isinstance(error, JobFinished)
        if isinstance(error, Drained) or (stopped and self.member.ranks.size == 1):
            self.runner.save_leaving()
        return ""

    def _not_saved(self, why: str) -> NotSaved:
        assert self.config.checkpoints is not None
        step = self.config.step if self.runner is None else self.runner.step
        return NotSaved(
            f"The last state of job {self.config.job!r}, of step {step}, is not on the disk of checkpoints, "
            f"{str(self.config.checkpoints.folder)!r}: {why}. So the job does not count as finished: started again, "
            "it continues from the newest checkpoint. Check that the disk is mounted, has space, and is writable."
        )

    def _take_leave(self, *, finished: bool, drained: bool) -> None:
        if not finished and not drained and self.member.ranks.size > 1:
            return  # the ranks cannot serve joiners together any more
        try:
            self.member.session.post(LeaveNow(finished))
            # After an exception there is no wait for joiners: they find other donors.
            patience_s = self.config.failure_timeout_s if finished or drained else 1.0
            if self.runner is not None:
                self.runner.serve_until_left(patience_s)
        except SessionFailed as error:
            if finished:
                raise
            # Only logged: the caller gets the error that ended the `with` block, most often this very error.
            _log.warning("[jaxft %s] could not take its leave: %s", self.config.group, error)
