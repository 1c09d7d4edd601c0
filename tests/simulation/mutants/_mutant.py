"""A planted bug, and the list of all."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    sentence: str
    owner: Any
    attribute: str
    wrap: Callable[[Any], Any]
    kinds: tuple[str, ...] = ()  # of faults, all others left out: if too rare among all
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])  # to the setting of each seed, too
    seeds: tuple[int, ...] = ()  # where even that is too rare: these alone

    def among(self, seeds: int) -> Sequence[int]:
        """Where to look for it, if this number of seeds is to be run."""
        return self.seeds or range(seeds)

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        original = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, self.wrap(original))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


MUTANTS: list[Mutant] = []


def mutant(
    owner: Any, attribute: str, *kinds: str, seeds: tuple[int, ...] = (), **changes: Any
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function that takes the original and returns what stands in its place; its docstring has the
    reason."""

    def register(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = wrap.__name__.removeprefix("_").replace("_", " ")
        sentence = " ".join((wrap.__doc__ or "").split())
        MUTANTS.append(Mutant(name, sentence, owner, attribute, wrap, kinds, changes, seeds))
        return wrap

    return register
