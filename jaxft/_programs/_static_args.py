"""Which additional arguments of a step are part of the program, declared as for `jax.jit`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxft._errors import ConfigurationError
from jaxft._programs._checks import short


@dataclass(frozen=True)
class Statics:
    """The declared static arguments: positions in the step's signature, and names."""

    positions: frozenset[int]
    names: frozenset[str]

    @staticmethod
    def none() -> "Statics":
        return Statics(frozenset(), frozenset())

    @staticmethod
    def of(
        function: Callable[..., Any], argnums: int | Sequence[int], argnames: str | Sequence[str]
    ) -> "Statics":
        """Complete positions from names and names from positions, using the signature.

        Raises:
            ConfigurationError: the state or the batch is declared static, or an argument does not exist.
        """
        known = _Parameters.of(function)
        positions = {argnums} if isinstance(argnums, int) else set(argnums)
        count = len(known.positional)
        positions = {number + count if -count <= number < 0 else number for number in positions}
        names = {argnames} if isinstance(argnames, str) else set(argnames)
        for name in names:
            if not known.takes(name):
                raise ConfigurationError(
                    f"static_argnames has {name!r}, but the train step has the arguments "
                    f"{', '.join((*known.positional, *known.named))}."
                )
        wrong = sorted(number for number in positions if number < 2)
        wrong += sorted(known.positional.index(name) for name in names if name in known.positional[:2])
        if wrong:
            raise ConfigurationError(
                f"Argument {wrong[0]} of the train step is declared static, but the first two are the state and the "
                "batch, which cannot be static. Positions are counted from 0 in the step's own signature."
            )
        names |= {known.positional[number] for number in positions if number < count}
        positions |= {known.positional.index(name) for name in names if name in known.positional}
        return Statics(frozenset(positions), frozenset(names))

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments after state and batch that were not declared static.

        Raises:
            ConfigurationError: names the first of them.
        """
        for number, value in enumerate(args, start=2):
            if number not in self.positions:
                raise ConfigurationError(
                    _undeclared(f"{short(value)} at position {number}", f"static_argnums={number}")
                )
        for name, value in kwargs.items():
            if name not in self.names:
                raise ConfigurationError(_undeclared(f"{name}={short(value)}", f"static_argnames={name!r}"))


def _undeclared(what: str, declaration: str) -> str:
    return (
        f"The step was called with the additional argument {what}. A step is called with a state, a batch and "
        f"static arguments: declare it ({declaration}) if it is part of the program. Otherwise put it into the "
        "batch, such as `(images, labels)`, or, if it lasts from step to step, into the state."
    )


class _Parameters(NamedTuple):
    """What a signature says of the arguments of a function."""

    positional: Sequence[str]
    named: Sequence[str]  # by name alone
    any_name: bool  # whether it takes others by name

    @staticmethod
    def of(function: Callable[..., Any]) -> "_Parameters":
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return _Parameters((), (), any_name=True)
        return _Parameters(
            [
                each.name
                for each in parameters
                if each.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            ],
            [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY],
            any_name=any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
        )

    def takes(self, name: str) -> bool:
        return self.any_name or name in (*self.positional, *self.named)
