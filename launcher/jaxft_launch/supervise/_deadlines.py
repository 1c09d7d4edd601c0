"""How long a process may stay in each phase before its supervisor ends it. Pure functions.

The coordinator has long gone on without such a group, so a deadline only decides when the group is restarted. It is
far above what a healthy program needs: compiling takes minutes, and a false alarm costs a restart. A process that
waits for other groups (`wait`, `vote`) may be the last one that holds the job's state, so these phases have no
deadline. A process that is stopped, or does not let its threads run, is found by its silence in any phase.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxft_launch.processes._checks import LaunchError

# From the start of the process to its first announced phase: imports, restore, compilation.
BOOT = "boot"
# Phases in which a process may be waiting for other groups.
WAITS = ("wait", "exchange", "vote")
# Since the last sign of life, in any phase.
SILENCE = "silence"
# After another process of its group has ended with status 0.
END = "end"

DEFAULTS: Mapping[str, float] = MappingProxyType(
    {
        BOOT: 3600.0,
        "wait": math.inf,
        "compute": 600.0,
        "exchange": 600.0,
        "vote": math.inf,
        "apply": 600.0,
        "heal": 600.0,
        "replay": 600.0,
        # Between two calls of the step: evaluation, input, checkpoints.
        "outside": math.inf,
        SILENCE: 60.0,
        END: 600.0,
    }
)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A phase that takes too long: for how long it has lasted, and its deadline."""

    phase: str
    step: int
    lasted_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The last sign of life of a process: its phase, since when, and when it was last alive, on one clock.

    `members`: the groups of the last step that it took part in; `committed`: the committed steps behind that one.
    """

    phase: str
    step: int
    since_t_s: float
    alive_t_s: float
    members: int = 0
    committed: int = 0


def overdue(
    sign: Sign | None, *, started_t_s: float, now_t_s: float, deadlines: Mapping[str, float]
) -> Overdue | None:
    """Return what a process has exceeded, or None. `sign`: None until it has announced a phase."""
    if sign is None:
        return _if_late(BOOT, 0, now_t_s - started_t_s, deadlines)
    silent = _if_late(SILENCE, sign.step, now_t_s - sign.alive_t_s, deadlines)
    return silent or _if_late(sign.phase, sign.step, now_t_s - sign.since_t_s, deadlines)


def parse_deadlines(text: str) -> dict[str, float]:
    """Return the deadlines in seconds by phase: the defaults, changed by `PHASE=SECONDS,...`; 0 means none.

    Raises:
        LaunchError: there is no such phase, or a time is not a number of seconds.
    """
    found = dict(DEFAULTS)
    for word in (word.strip() for word in text.split(",") if word.strip()):
        phase, _, value = word.partition("=")
        if phase not in DEFAULTS:
            raise LaunchError(
                f"--deadlines {word}: there is no phase {phase!r}. Phases: {', '.join(DEFAULTS)}."
            )
        found[phase] = _seconds(word, value) or math.inf
    return found


def _seconds(word: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise LaunchError(f"--deadlines {word}: write PHASE=SECONDS, with 0 for no deadline.")
    return seconds


def _if_late(phase: str, step: int, lasted_s: float, deadlines: Mapping[str, float]) -> Overdue | None:
    deadline_s = deadlines.get(phase, math.inf)
    return Overdue(phase, step, lasted_s, deadline_s) if lasted_s > deadline_s else None
