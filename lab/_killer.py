"""The plan of kills from a seed, and a state machine that carries it out; neither reads a clock."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DELAY_STEPS = 2.0


@dataclass(frozen=True, slots=True)
class Strike:
    """A planned kill of a process: `delay_steps` step times after all groups have taken part in a step."""

    group: str
    delay_steps: float
    rank: int = 0


def plan_strikes(groups: Sequence[str], *, kills: int, seed: int, nproc: int = 1) -> tuple[Strike, ...]:
    """Return `kills` strikes. In each round, every process is struck once before any is struck again."""
    rng = random.Random(seed)
    processes = [(group, rank) for group in groups for rank in range(nproc)]
    victims: list[tuple[str, int]] = []
    while len(victims) < kills:
        victims += rng.sample(processes, len(processes))
    return tuple(Strike(group, rng.uniform(0, MAX_DELAY_STEPS), rank) for group, rank in victims[:kills])


class Killer:
    """Carries out the strikes of a plan one by one, each after a step in which every group took part."""

    def __init__(self, strikes: Sequence[Strike]) -> None:
        self._waiting = list(strikes)
        self._due_at_s: float | None = None

    def due(self, now_s: float, full_step_s: float | None) -> Strike | None:
        """Return the strike that is due now, if any.

        Args:
            now_s: the current time, in seconds on any clock.
            full_step_s: how long the last step took, if every group took part in it; otherwise None.
        """
        if not self._waiting:
            return None
        if self._due_at_s is None and full_step_s is not None:
            self._due_at_s = now_s + self._waiting[0].delay_steps * full_step_s
        if self._due_at_s is None or now_s < self._due_at_s:
            return None
        self._due_at_s = None
        return self._waiting.pop(0)
