"""Tells the errors that a failed collective raises from others: in a group of several processes a rank is gone."""

import re
from collections.abc import Iterator

import jax

from jaxft._ranks._link import end_with
from jaxft._ranks._ranks import Ranks

# XLA's statuses begin with their code (absl::StatusCode). Which Python type carries one depends on where JAX was when
# it saw it: a program's call raises `JaxRuntimeError`, a transfer of its result to the host `ValueError`.
_STATUS = re.compile(
    r"(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|UNAUTHENTICATED|"
    r"RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|"
    r"INVALID_ARGUMENT): "
)
_NO_MEMORY = "RESOURCE_EXHAUSTED: "
# What XLA writes where Gloo, NCCL or RCCL, which move the bytes of a collective, have failed.
_MOVING = re.compile(r"Gloo .+ failed: |NCCL operation .+ failed: ")


def end_if_lost(ranks: Ranks, group: str, error: BaseException | None) -> None:
    """If `error` shows that another rank is gone, or not reached by a collective, end this process with that status.

    The links get their time to notice first, for they know which rank it is, and why. If they notice nothing, the
    ranks all live, and only the connections of their collectives are broken: the program is not to blame.
    """
    if not came_from_xla(error):
        return
    ranks.await_loss()
    if failed := next((str(each) for each in _chain(error) if _MOVING.search(str(each))), ""):
        end_with(group, "another rank", f"it is not reached in a computation of all ranks: {failed}")


def came_from_xla(error: BaseException | None) -> bool:
    """Return whether `error`, or what it was raised from, is a failure of a running program.

    One for lack of memory is not: it is this rank's own, and no other rank is gone.
    """
    for each in _chain(error):
        if str(each).startswith(_NO_MEMORY):
            return False
        if isinstance(each, jax.errors.JaxRuntimeError) or _STATUS.match(str(each)):
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen: set[int] = set()  # what it was raised from may be itself
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
