"""The exception that the user sees for each failure of the protocol."""

from collections.abc import Mapping

from jaxft_protocol.replica.state import Failure, FailureKind

from jaxft._errors import (
    CannotHeal,
    CoordinatorUnreachable,
    Diverged,
    Evicted,
    JaxftError,
    JobHalted,
    JoinRefused,
    NonFinite,
)

_ERRORS: Mapping[FailureKind, type[JaxftError]] = {
    FailureKind.COORDINATOR_UNREACHABLE: CoordinatorUnreachable,
    FailureKind.JOIN_REFUSED: JoinRefused,
    FailureKind.EVICTED: Evicted,
    FailureKind.CANNOT_HEAL: CannotHeal,
    FailureKind.DIVERGED: Diverged,
    FailureKind.NONFINITE: NonFinite,
    FailureKind.JOB_HALTED: JobHalted,
}


def error_of(failure: Failure) -> JaxftError:
    return _ERRORS[failure.kind](failure.text)
