"""The training thread's part of a job: carries out the core's directives, and reports the results.

    Attempt -> compute the shards that are missing, exchange, vote (`_attempt`)
    Apply   -> apply the means (`_attempt`)
    HealFrom, Replay -> reach the job's frontier (`_catch_up`)

All share the state that this group holds (`_held_state`).
"""

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jax
from jaxft_protocol.messages import NewQuorum, Step
from jaxft_protocol.names import ENDED, natural_key
from jaxft_protocol.replica.state import (
    Apply,
    Attempt,
    Directive,
    Fail,
    HealFrom,
    LeaveJob,
    Over,
    ReadCheckpoint,
    Replay,
    TakeDigest,
)

from jaxft._base._calls import ctrl_c_later
from jaxft._errors import ConfigurationError, JobFinished, SessionFailed
from jaxft._heal._store import StateStore
from jaxft._programs._programs import Programs
from jaxft._ranks._link import end_if_lost
from jaxft._ranks._ranks import Directing, Ranks
from jaxft._replica._attempt import Attempts
from jaxft._replica._call import Call, FiniteCheck
from jaxft._replica._catch_up import CatchUp
from jaxft._replica._config import GroupConfig
from jaxft._replica._draining import Drained
from jaxft._replica._held_state import HeldState
from jaxft._replica._joining import Joining
from jaxft._replica._membership import Membership
from jaxft._replica._raised import Raising, report_by
from jaxft._replica._saving import Saving
from jaxft._replica._steps import LoopWatch
from jaxft._report import Record, StepReport
from jaxft._session._mailbox import Mailbox
from jaxft._session._session import error_of
from jaxft._telemetry._call import Observers

if TYPE_CHECKING:
    from jaxft._ranks._follower import Follower

_log = logging.getLogger("jaxft")


class Runner:
    """The engine of a step in a job. Not thread-safe: the training thread owns it."""

    def __init__(
        self, config: GroupConfig, member: Membership, store: StateStore, observers: Observers
    ) -> None:
        session: Directing = member.session
        ranks: Ranks = member.ranks
        self._config = config
        self._session = session
        self._ranks = ranks
        self._observers = observers
        self._broken = ""  # the exception that left a call, in a group of several processes
        self.ended = False  # the batch function has reported that there is no further step
        self._held = HeldState(session, store, ranks, config.step, digest_every=config.digest_every)
        finite = FiniteCheck(config.group)
        self._attempts = Attempts(config, member, observers, self._held, finite)
        self._catch_up = CatchUp(config, member, observers, self._held, finite)
        self._saving = Saving(config, session, ranks, self._held)
        self._joining = Joining(config, session, ranks, self._held, self._saving)
        self._record = Record()
        self._programs: Programs | None = None  # of the last call
        # The number of the last directive that was taken, and the directive while it is carried out.
        self._taken: tuple[int, Directive | None] = (-1, None)
        if ranks.rank:
            report = cast("Follower", session).report_raised
        else:
            report = report_by(cast(Mailbox, session))
        self._raising = Raising(config, report, alone=ranks.size == 1)
        self._writer = Writer(config.group)
        self._told_of_ended = False
        self._report: StepReport | None = None
        self.loop = LoopWatch()

    @property
    def step(self) -> int:
        return self._held.step

    @property
    def history(self) -> int:
        """Of the job, as far as this group knows; before its first quorum, of the state that it brings."""
        return self._session.history or self._saving.history

    @property
    def handed(self) -> Sequence[jax.Array] | None:
        return self._held.current if self.started else None

    @property
    def started(self) -> bool:
        """Whether the step has been called."""
        return self._joining.started

    @property
    def report(self) -> StepReport:
        """A report of the last call."""
        return self._report or StepReport(step=self._held.step)

    def show(self, values: Mapping[str, float]) -> None:
        """Show values with this group's next sample."""
        self._session.show(values)

    @property
    def broken(self) -> bool:
        """Whether an exception has left a call, in a group of several processes."""
        return bool(self._broken)

    @property
    def is_writer(self) -> bool:
        return self._writer.is_it(self._session.quorum)

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        return self._session.in_step(now=False)

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        """Take part until at least one more step is committed (see `Engine.run`).

        A group that had to heal returns as soon as it has reached the frontier, with the metrics of the last step
        it replayed, so that its loop can see the job's progress. A spare returns after each step it replays.
        """
        before = self._held.step
        with self.loop.calling(lambda: self._held.step):
            self._take_part(call, state, joins=False)
        if self._held.step != before + 1:
            self.loop.jumped("this group was behind and has caught up with the others", in_call=True)
        return self._held.leaves, self._record.metrics

    def join(self, call: Call, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
        before = self._held.step
        self._take_part(call, state, joins=True)
        if self._held.step != before:
            self.loop.jumped("this group has joined a job that was under way")
        return self._held.current

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        if self._attempts.votes_on_held:
            raise ConfigurationError(
                f"The vote of group {self._config.group!r} on step {self.step} is out, without this edit: an "
                "exception such as Ctrl-C has interrupted the call that waited for the decision. Call the step, "
                "and make the edit before the next one."
            )
        self._held.edit(changes)
        self._attempts.forget()

    def _take_part(self, call: Call, state: Sequence[jax.Array], *, joins: bool) -> None:
        if self._broken:
            raise SessionFailed(
                f"An exception has left the step in this rank of group {self._config.group!r} before: "
                f"{self._broken}. In a group of several processes the others cannot know, so this group has to be "
                "started again."
            )
        with (
            self._session.in_step(now=True),
            self._observers.calling(self._held.step, shards=call.shards, joins=joins) as calling,
        ):
            self._joining.prepare(call, state)
            self._programs = call.programs
            self._record = self._record.next_call()
            before = self._held.step
            try:
                self._follow_directives(call, self._record, joins=joins)
            except BaseException as error:
                if self._held.step not in (before, before + 1):
                    why = "this group had caught up when an exception ended the last call"
                    self.loop.jumped(why, in_call=True)
                self._left_by(error)
                raise
            finally:
                if not self._held.edits:
                    self.loop.edits_made = 0
                if self._held.step != before:
                    self._writer.committed(self._record.committed_by, self._held.step)
                self._report = self._record.report(self._held.step, self._writer.name)
                self._session.sample(self._report)
                calling.ended(self._report, self._held.leaves)

    def _left_by(self, error: BaseException) -> None:
        """An exception leaves the call: let the next call find the work that is left."""
        if isinstance(error, JobFinished) and isinstance(self._taken[1], Attempt):
            # The data has ended. The others find that out in this step, too, once they have this group's shards.
            self.ended, self._taken = True, (self._taken[0] - 1, None)
            self._attempts.forget()
            return
        if self._ranks.size > 1:
            # The other ranks may be inside the same collective and never return, so this group cannot go on.
            self._broken = repr(error)
            end_if_lost(self._ranks, self._config.group, error)
        number, directive = self._taken
        if isinstance(directive, Attempt) and self._attempts.has_voted(directive):
            # The job may commit with its vote: the next call applies the means.
            self._taken = (number, None)
        elif isinstance(directive, Attempt):
            self._taken = (number, None)
            self._raising.raised(error, directive.step, self._attempts.give_up())
        elif directive is not None and not self._broken:
            self._taken = (number - 1, None)
            self._catch_up.close()

    def _follow_directives(self, call: Call, record: Record, *, joins: bool) -> None:
        """Follow the core until a step is committed, or until this group is ready for one (`joins`)."""
        while True:
            self._taken = (self._taken[0], None)
            self._observers.enters("wait", self._held.step)
            self._taken = self._session.wait(self._taken[0])
            number, directive = self._taken
            if (record.caught_up or joins) and self._can_wait(directive):
                self._taken = (number - 1, None)  # the next call continues from here
                return
            if self._do(directive, call, record):
                return

    def _can_wait(self, directive: Directive) -> bool:
        """Whether a call that has caught up leaves this directive to the next call."""
        at_end = isinstance(directive, Over) and directive.step == self._held.step
        return at_end or isinstance(directive, Attempt)

    def _do(self, directive: Directive, call: Call, record: Record) -> bool:
        """Carry out a directive; return whether the call ends with it."""
        match directive:
            case Attempt(quorum, step):
                if self._config.checkpoints is not None:
                    self._saving.note_beginning(quorum)
                self._attempts.attempt(call, quorum, step, record)
            case Apply(_, step):
                if step < self._held.step:
                    # Applied before; the stream broke before the session's thread got the report.
                    return False
                self._apply(call, step, record)
                return True
            case ReadCheckpoint():
                self._joining.read_after_all(call)
            case TakeDigest(step):
                self._held.say_digest(step)
            case HealFrom():
                self._attempts.leave_quorum()
                if self._catch_up.heal(directive, call, record):
                    self._attempts.forget()
            case Replay():
                return self._replayed(directive, call, record)
            case _:
                self._end(directive)
        return False

    def _end(self, directive: Directive) -> NoReturn:
        match directive:
            case Over(step):
                text = self._finished_text(step)
                _log.warning("[jaxft %s] %s", self._config.group, text)
                raise JobFinished(text)
            case LeaveJob():
                drained = Drained(self._config.group, self._held.step)
                _log.info("[jaxft %s] %s", self._config.group, drained.text)
                raise drained
            case Fail(failure):
                raise error_of(failure)
            case _:
                raise AssertionError(directive)

    def _apply(self, call: Call, step: int, record: Record) -> None:
        began_s = time.perf_counter()
        # If Ctrl-C came after the vote, it was the last call that voted.
        record.attempts = max(1, record.attempts)
        with ctrl_c_later():  # no later call knows that this state is to be saved
            self._attempts.apply(call, step, record)
            if self._config.checkpoints is not None:
                self._saving.save_if_due(call.programs, record.members)
        record.apply_s = time.perf_counter() - began_s
        self._warn_of_ended(record, step)

    def _warn_of_ended(self, record: Record, step: int) -> None:
        """Warn, once, that another group's loop has ended before this step, which is another end of the run."""
        ended = sorted((name for name, why in record.left if why == ENDED), key=natural_key)
        if not ended or self._told_of_ended or self._ranks.rank:
            return
        self._told_of_ended = True
        _log.warning(
            "[jaxft %s] the loop of %s has ended at step %d, and this group's loop continues: they will hold other "
            "states. Let all loops end at the same step: give manager.steps the same total, and let a loop that ends "
            "early decide by the state alone, so that it also holds, say, the number of epochs without progress: a "
            "group that was restarted does not have the variables of the others",
            *(self._config.group, ", ".join(ended), step),
        )

    def _replayed(self, directive: Replay, call: Call, record: Record) -> bool:
        """Replay a step; return whether the call ends with it."""
        self._attempts.leave_quorum()
        if not self._catch_up.replay(directive, call, record):
            return False
        self._attempts.forget()
        return self._config.spare and self._held.step == directive.until

    def restore(self, state: Any, changed: Collection[str]) -> Any:
        """Before the first call: return the state of the newest checkpoint, or `state`."""
        found = self._saving.restore(state, changed)
        if self._held.step != self._config.step:
            self.loop.jumped("its state was restored from a checkpoint")
        return found

    def save_last(self) -> str:
        """Save the state at the end of this group's loop, or wait for another group; return why it is not saved."""
        return "" if self._programs is None else self._saving.save_last(self._programs)

    def save_leaving(self) -> None:
        """Save the state of a group that leaves its job before the end, if this group writes for the job."""
        if self._programs is not None and self._writer.name == self._config.group:
            self._saving.save_leaving(self._programs)

    def serve_until_left(self, timeout_s: float) -> None:
        """Take digests of the last state for joiners until this group has left the job."""
        self._attempts.leave_quorum()
        self._held.end_log()
        if not self._held.made:
            self._held.leaves = ()  # other code may have consumed the passed arrays
        deadline_s = time.monotonic() + timeout_s
        taken: Step | None = None
        while (step := self._session.wait_until_left(deadline_s, taken)) is not None:
            self._held.say_digest(step)
            taken = step

    def close(self) -> None:
        self._attempts.close()
        self._catch_up.close()

    def _finished_text(self, step: int) -> str:
        if self._held.step == step:
            return (
                f"job {self._config.job!r} finished at step {step}, the state of group {self._config.group!r}: it "
                "takes no further steps. To train on from its checkpoint, choose another job name and restore with "
                "changed={'job'}."
            )
        return (
            f"job {self._config.job!r} finished at step {step}, and all groups that held its state have left; group "
            f"{self._config.group!r} is at step {self._held.step}. For another run, choose another job name."
        )


class Writer:
    """Which group writes for the job: logs, plots, evaluations, files of the user's.

    It is the first member of the quorum that has committed the state, as for checkpoints. One quorum commits a state,
    so each step has at most one writer. A group that the job has since continued without, as during a long
    evaluation, is no longer the writer.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._name = ""

    @property
    def name(self) -> str:
        """The writer of the state that this group holds; "" if that is not known."""
        return self._name

    def committed(self, members: tuple[str, ...], step: int) -> None:
        """State `step` was committed by a quorum of these groups; of none, if this group has healed to it."""
        before, self._name = self._name, members[0] if members else ""
        if before == self._name or self._group not in (before, self._name):
            return
        now = "writes" if self._name == self._group else "no longer writes"
        why = {self._group: "", "": ": it has healed"}.get(self._name, f": {self._name} does")
        _log.info("[jaxft %s] %s for the job, from step %d on%s", self._group, now, step, why)

    def is_it(self, quorum: NewQuorum | None) -> bool:
        """Whether this group is the writer, and `quorum`, which is in force, still has it."""
        if self._name != self._group or quorum is None:
            return False
        return any(member.group == self._group for member in quorum.members)
