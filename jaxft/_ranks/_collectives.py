"""Tells the errors that a failed collective raises from others: in a group of several processes a rank is gone."""

import re

import jax

# XLA's statuses begin with their code (absl::StatusCode). Which Python type carries one depends on where JAX was when
# it saw it: a program's call raises `JaxRuntimeError`, a transfer of its result to the host `ValueError`.
_STATUS = re.compile(
    r"(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|UNAUTHENTICATED|"
    r"RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|"
    r"INVALID_ARGUMENT): "
)
_NO_MEMORY = "RESOURCE_EXHAUSTED: "


def came_from_xla(error: BaseException | None) -> bool:
    """Return whether `error`, or what it was raised from, is a failure of a running program.

    One for lack of memory is not: it is this rank's own, and no other rank is gone.
    """
    seen: set[int] = set()  # what it was raised from may be itself
    while error is not None and id(error) not in seen:
        if str(error).startswith(_NO_MEMORY):
            return False
        if isinstance(error, jax.errors.JaxRuntimeError) or _STATUS.match(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
