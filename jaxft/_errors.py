"""The exceptions that jaxft raises, in one small tree."""

from typing import ClassVar


class JaxftError(Exception):
    """Base of all errors of jaxft. The message has what happened, where, and what to do.

    Attributes:
        exit_status: the status with which a program should end that this error ends: what starts it then knows
            whether to start it again. `jaxft launch` gives it to programs that do not catch the error; a program that
            does, to log it, ends with `sys.exit(error.exit_status)`. Here 75: start me again (EX_TEMPFAIL of
            sysexits.h).
    """

    exit_status: ClassVar[int] = 75


class ConfigurationError(JaxftError):
    """The call, the step function or the job's settings are wrong. Nothing has changed."""

    exit_status = 1


class StepError(ConfigurationError):
    """The train step cannot be cut into compute and apply as written."""


class CoordinatorUnreachable(JaxftError):
    """The coordinator did not answer within the failure timeout."""


class JoinRefused(ConfigurationError):
    """The coordinator refused this group: its settings differ from the job's, or it does not know the job's token."""

    exit_status = 78  # do not: EX_CONFIG


class Evicted(JaxftError):
    """The coordinator does not let this group take part.

    Another process uses its name, an operator evicted it, or it edited the state otherwise than the majority.
    """


class SessionFailed(JaxftError):
    """The session thread ended with an unexpected error, which is the cause of this one."""


class CannotHeal(JaxftError):
    """No group that holds the job's committed state could be reached within the failure timeout."""


class CannotRestore(JaxftError):
    """There are checkpoints, but none of them can be read. Training does not restart from scratch by itself."""


class NotSaved(JaxftError):
    """The loop has ended, but the last state is not on the disk of the checkpoints: the job is not finished."""

    exit_status = 74  # EX_IOERR: start me again, and look at the disk


class Diverged(JaxftError):
    """The groups' states differ without a majority."""


class NonFinite(JaxftError):
    """The means of a step are not finite, and `nonfinite="raise"`. The step was not applied."""


class JobHalted(JaxftError):
    """The coordinator has stopped the job for all its groups; the message has the reason."""


class JobFinished(JaxftError, SystemExit):
    """The job has finished, and all groups that held its state have left: there is nothing left to do.

    A program that does not catch it ends with status 0, so that a supervisor does not start it again.
    """

    exit_status = 0

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = self.exit_status


class ExchangeFailed(JaxftError):
    """A peer was lost, or sent invalid data, during an exchange.

    Handled inside `jaxft.Manager`: the group votes "failed" and the step is retried under a new quorum.

    Attributes:
        peers: the groups that this group saw fail, by name; empty if the exchange was aborted.
    """

    def __init__(self, message: str, peers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers


class HealFailed(JaxftError):
    """All donors of a heal failed. The group asks the coordinator for others."""
