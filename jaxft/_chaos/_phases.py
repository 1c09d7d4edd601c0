"""The phases in which faults can strike a group, as the library announces them on its logger."""

import re

# A member of the quorum goes through these in each step.
STEP_PHASES = ("compute", "exchange", "vote", "apply")
# A returning group goes through these, and holds nothing yet that the job could lose.
RETURN_PHASES = ("boot", "heal", "replay")
# At any time in a member's step.
ANY = "any"
PHASES = (*STEP_PHASES, *RETURN_PHASES, ANY)

_ANNOUNCED = re.compile(r"(compute|exchange|vote|apply|replay) step (\d+)")
_HEALS = re.compile(r"heals to step (\d+)")


def announced(message: str) -> tuple[str, int] | None:
    """Return the phase and the step that a line of the library's log announces, or None."""
    if found := _ANNOUNCED.match(message):
        return found.group(1), int(found.group(2))
    if found := _HEALS.search(message):
        return "heal", int(found.group(1))
    return None
