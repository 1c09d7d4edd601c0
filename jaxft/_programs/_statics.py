"""What of a call is part of the program: static arguments, and leaves of the state that are no arrays."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from jaxft._errors import ConfigurationError, StepError
from jaxft._programs._checks import short
from jaxft._programs._compat import PyTreeDef
from jaxft._programs._leaves import labels


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

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Given":
        """The arguments of a call after state and batch.

        Raises:
            ConfigurationError: one was not declared static, or is not hashable.
        """
        for number, value in enumerate(args, start=2):
            if number not in self.positions:
                raise ConfigurationError(
                    _undeclared(f"{short(value)} at position {number}", f"static_argnums={number}")
                )
        for name, value in kwargs.items():
            if name not in self.names:
                raise ConfigurationError(_undeclared(f"{name}={short(value)}", f"static_argnames={name!r}"))
        key = tuple((type(value), value) for value in args)
        key += tuple((name, type(value), value) for name, value in sorted(kwargs.items()))
        try:
            hash(key)
        except TypeError as error:
            raise ConfigurationError(
                "A fault-tolerant step takes a state, a batch, and static arguments, which must be hashable "
                f"({error}). Put arrays into the state or into the batch."
            ) from error
        return Given(key, tuple(args), kwargs)


def _undeclared(what: str, declaration: str) -> str:
    return (
        f"The step was called with the additional argument {what}. A step is called with a state, a batch and "
        f"static arguments: declare it ({declaration}) if it is part of the program. Otherwise put it into the "
        "batch, such as `(images, labels)`, or, if it lasts from step to step, into the state."
    )


class _Parameters(NamedTuple):
    """The arguments of a function, by its signature."""

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


_ARRAY: Final = object()


class Given(NamedTuple):
    """The static arguments of a call."""

    key: tuple[Any, ...]  # with their types: 1, 1.0 and True are equal but make different programs
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


NOTHING = Given((), (), {})


class StaticLeaves:
    """Takes them out of a state before a call of the step, and puts them back afterwards.

    They must stay as in the first state: they are traced as constants.
    """

    def __init__(self, is_array: Callable[[Any], bool] | None) -> None:
        if is_array is not None and not callable(is_array):  # pyright: ignore
            raise ConfigurationError(
                f"arrays is {short(is_array)}. It is a function of a leaf of the state that returns whether the leaf "
                "is an array that the step may change, such as `arrays=equinox.is_array`. The other leaves are part "
                "of the program."
            )
        self._is_array = is_array
        self._tree: PyTreeDef | None = None
        self._values: list[Any] = []  # of each leaf of the whole state: _ARRAY, or its value

    def without(self, state: Any) -> Any:
        """Return the state with None in the place of its static leaves.

        Raises:
            ConfigurationError: a static leaf differs from the first state's.
        """
        if self._is_array is None:
            return state
        arrays, tree, values = self._parted(state)
        if self._tree is None:
            self._tree, self._values = tree, values
        if (index := self._differing(tree, values)) is not None:
            raise ConfigurationError(
                f"The leaf {labels(state)[index]} of the state is {_named(values[index])}, but it was "
                f"{_named(self._values[index])} in the first call. By `arrays=` it is part of the program, which is "
                "compiled once. Make another step with jaxft.fault_tolerant, or make the leaf an array."
            )
        return arrays

    def whole(self, arrays: Any) -> Any:
        """Return the state that `without` made this of, with other arrays."""
        if self._tree is None:
            return arrays
        found = iter(jax.tree.leaves(arrays))
        return self._tree.unflatten([next(found) if value is _ARRAY else value for value in self._values])

    def wrapped(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step of states without static leaves."""
        if self._is_array is None:
            return train_step

        @functools.wraps(train_step)
        def step(state: Any, *args: Any, **kwargs: Any) -> Any:
            result = train_step(self.whole(state), *args, **kwargs)
            if not (isinstance(result, tuple) and len(result) == 2):
                return result  # refused where the step is traced
            new_state, metrics = result
            arrays, tree, values = self._parted(new_state)
            if (index := self._differing(tree, values)) is not None:
                raise StepError(
                    f"The step made the state's leaf {labels(new_state)[index]}, {_named(self._values[index])}, into "
                    f"{_named(values[index])}. By `arrays=` it is part of the program, which a step cannot change. "
                    "Make the leaf an array before the first step (`jnp.asarray`), or return it as it was."
                )
            return arrays, metrics

        return step

    def _parted(self, state: Any) -> tuple[Any, PyTreeDef, list[Any]]:
        """A state without its static leaves, its structure, and those leaves."""
        assert self._is_array is not None
        leaves, tree = jax.tree.flatten(state)
        values = [_ARRAY if self._is_array(leaf) else leaf for leaf in leaves]
        arrays = [leaf if value is _ARRAY else None for leaf, value in zip(leaves, values, strict=True)]
        return tree.unflatten(arrays), tree, values

    def _differing(self, tree: PyTreeDef, values: list[Any]) -> int | None:
        """The first leaf that is not as in the first state. Another structure is found where the step is traced."""
        if tree != self._tree:
            return None
        pairs = enumerate(zip(values, self._values, strict=True))
        return next((index for index, (one, other) in pairs if not _same(one, other)), None)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(np.all(one == other)))


def _named(value: Any) -> str:
    return "an array" if value is _ARRAY else short(value)
