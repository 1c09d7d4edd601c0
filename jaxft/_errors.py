"""Every error that jaxft raises on purpose, in one small tree."""


class JaxftError(Exception):
    """Base of all errors of jaxft. Its text says what happened, where, and what to do."""


class ConfigurationError(JaxftError):
    """The call, the step function or the job's settings are wrong; nothing has been changed."""


class StepError(ConfigurationError):
    """The train step cannot be cut into compute and apply as written."""


class CoordinatorUnreachable(JaxftError):
    """The coordinator did not answer within the failure timeout."""


class JoinRefused(ConfigurationError):
    """The coordinator refused this group: its settings differ from the job's, or it does not know the job's token."""


class Evicted(JaxftError):
    """The coordinator put this group out for good: another process goes by its name."""


class SessionFailed(JaxftError):
    """The thread that speaks with the coordinator has ended by an unexpected error, which is this error's cause."""


class CannotHeal(JaxftError):
    """No group that holds the job's committed state could be reached within the failure timeout."""


class CannotRestore(JaxftError):
    """There are checkpoints, but all of them are damaged. Training does not start anew by itself."""


class Diverged(JaxftError):
    """The groups' states differ, and no majority says which is right: nobody knows the truth any more."""


class NonFinite(JaxftError):
    """The means of a step are not finite, with `nonfinite="raise"`. Nothing of that step was applied."""


class JobHalted(JaxftError):
    """The coordinator has stopped the job for all its groups; the text says why."""


class JobFinished(JaxftError):
    """The job has reached its end and every group that holds its state has left."""


class ExchangeFailed(JaxftError):
    """A peer was lost, or sent what it should not, while contributions were being summed.

    Handled inside `jaxft.Manager`: the group votes "failed" and the step is tried again under a new quorum.

    Attributes:
        peers: the groups that this group saw fail, by name; empty if it was told to stop.
    """

    def __init__(self, message: str, peers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers


class HealFailed(JaxftError):
    """No donor of a heal could be used any more. The group asks the coordinator for other donors."""
