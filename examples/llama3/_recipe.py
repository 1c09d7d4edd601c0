"""The recipe of each size, which flags override, and the resulting optimizer settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from examples.llama3._config import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Defaults for the flags of the same names."""

    learning_rate: float
    warmup_steps: int
    final_fraction: float = 0.1


# Of 8B, 70B and 405B, those that "The Llama 3 Herd of Models" states; 1B and 3B were distilled, so they take 8B's.
# debug and 50m are for runs of a few hundred steps.
_SHORT = Recipe(learning_rate=1e-3, warmup_steps=10)
_LONG = Recipe(learning_rate=3e-4, warmup_steps=2000)
RECIPES: Mapping[Size, Recipe] = MappingProxyType(
    {
        "debug": _SHORT,
        "50m": _SHORT,
        "1B": _LONG,
        "3B": _LONG,
        "8B": _LONG,
        "70B": Recipe(learning_rate=1.5e-4, warmup_steps=2000),
        "405B": Recipe(learning_rate=8e-5, warmup_steps=8000, final_fraction=0.01),
    }
)
