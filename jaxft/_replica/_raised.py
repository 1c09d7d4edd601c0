"""An exception that leaves an attempt at a step: reported to the job, which finds out whose failure it is.

The group leaves the quorum, and the others try its shards. The exception reaches the user once it is known what
became of the step, so that a shard that fails in every group ends the job once, with one text:

* the others commit the step: the failure is this group's, and the job continues without it;
* the job halts, because the step fails in every group: `JobHalted`, from the exception;
* it cannot be known, as when there is no other group.

In each case but the second the next call of the step brings the group back. Ctrl-C and SystemExit are reported, and
go on at once.
"""

from typing import Protocol

from jaxft_protocol.messages import Step
from jaxft_protocol.names import one_line
from jaxft_protocol.replica.state import Phase, Raised, Replica

from jaxft._errors import JaxftError
from jaxft._ranks._ranks import Settled
from jaxft._replica._config import GroupConfig
from jaxft._session._mailbox import Mailbox
from jaxft._session._session import error_of

MAX_TEXT_LENGTH = 300


class Report(Protocol):
    """Reports an exception to the job: by the session in rank 0, by the link to rank 0 elsewhere."""

    def __call__(self, step: Step, text: str, shard: int | None, *, timeout_s: float) -> Settled: ...


def report_by(session: Mailbox) -> Report:
    """Return what reports exceptions through a session. Any thread may call it."""

    def report(step: Step, text: str, shard: int | None, *, timeout_s: float) -> Settled:
        session.post(Raised(step, text, shard))
        known = timeout_s > 0 and session.wait_until(lambda replica: _is_settled(replica, step), timeout_s)
        replica = session.replica
        failure = replica.failure if known else None
        return Settled(failure, done=known and (replica.frontier_step or 0) > step)

    return report


class Raising:
    """The training thread owns it."""

    def __init__(self, config: GroupConfig, report: Report, *, alone: bool) -> None:
        """`alone`: the group has one process, and its next call of the step brings it back."""
        self._config = config
        self._report = report
        self._alone = alone

    def raised(self, error: BaseException, step: int, shard: int | None) -> None:
        """Report that `error` has left an attempt at `step`, and wait for what becomes of the step.

        Raises:
            JobHalted: the step fails in every group.
        """
        timeout_s = self._config.failure_timeout_s if isinstance(error, Exception) else 0.0
        try:
            settled = self._report(Step(step), text_of(error), shard, timeout_s=timeout_s)
        except JaxftError:
            return  # the session has ended: every later call raises that; its log line has the reason
        if settled.failure is not None:
            raise error_of(settled.failure) from error
        error.add_note(self._note(step, shard, done=settled.done))

    def _note(self, step: int, shard: int | None, *, done: bool) -> str:
        where = f"step {step}" if shard is None else f"shard {shard} of step {step}"
        others = "The other groups could do this step, and go on without this group. " if done else ""
        next_call = (
            "The next call of the step brings this group back, with the state that it holds."
            if self._alone
            else "The other processes of this group end with this one."
        )
        return f"[jaxft {self._config.group}] raised in {where}, and reported to the job. {others}{next_call}"


def text_of(error: BaseException) -> str:
    """The exception in one short line."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return one_line(text)[:MAX_TEXT_LENGTH]


def _is_settled(replica: Replica, step: int) -> bool:
    if replica.failure is not None or replica.phase in (Phase.FINISHED, Phase.LEFT):
        return True
    # `waiting`: the others cannot go on without this group, or there is none.
    present_alone = replica.phase is Phase.PRESENT and bool(replica.waiting)
    return present_alone or (replica.frontier_step or 0) > step
