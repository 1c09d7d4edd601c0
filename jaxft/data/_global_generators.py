"""The generators that a whole process shares, and which of them a function seeds."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np


class _Generator(NamedTuple):
    seeded_by: str
    draw: Callable[[], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


@contextmanager
def seeded(found: list[str]) -> Iterator[None]:
    """Add to `found` by which functions the block has seeded a global generator, to what it was when the block began.

    What the block leaves alone is afterwards as it was before.
    """
    before = [(generator, generator.state()) for generator in _generators()]
    for generator, _ in before:
        generator.draw()
    drawn = [_bits(generator.state()) for generator, _ in before]
    yield
    for (generator, state), untouched in zip(before, drawn, strict=True):
        after = _bits(generator.state())
        if after == untouched:
            generator.restore(state)
        elif after == _bits(state):
            found.append(generator.seeded_by)


def _generators() -> list[_Generator]:
    generators = [
        _Generator("random.seed", random.random, random.getstate, random.setstate),
        _Generator("numpy.random.seed", np.random.random, np.random.get_state, np.random.set_state),
    ]
    torch: Any = sys.modules.get("torch")  # a source of torch has imported it
    if hasattr(torch, "set_rng_state"):
        states = torch.get_rng_state, torch.set_rng_state
        generators.append(_Generator("torch.manual_seed", lambda: torch.rand(()), *states))
    return generators


def _bits(state: Any) -> Any:
    """What can be compared of a generator's state: a tensor, or a tuple with at most one array."""
    if hasattr(state, "numpy"):
        return state.numpy().tobytes()
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in state]
