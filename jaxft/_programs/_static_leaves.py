"""Leaves of a state that are part of the program: functions and settings that a module holds beside its arrays."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np

from jaxft._errors import ConfigurationError, StepError
from jaxft._programs._checks import short
from jaxft._programs._compat import PyTreeDef
from jaxft._programs._leaves import labels

_ARRAY: Final = object()


class StaticLeaves:
    """Takes them out of a state before a call of the step, and puts them back afterwards.

    Those of the first state are those of all: they are traced as constants.

    Args:
        is_array: whether a leaf belongs to the state, such as `equinox.is_array`; None: every leaf does.
    """

    def __init__(self, is_array: Callable[[Any], bool] | None) -> None:
        if is_array is not None and not callable(is_array):  # pyright: ignore
            raise ConfigurationError(
                f"arrays is {short(is_array)}. It is a function that says of each leaf of the state whether it is an "
                "array that the step may change, such as `arrays=equinox.is_array`. The other leaves are part of the "
                "program."
            )
        self._is_array = is_array
        self._tree: PyTreeDef | None = None
        self._values: list[Any] = []  # of each leaf of the whole state: _ARRAY, or its value

    def without(self, state: Any) -> Any:
        """Return the state with None in the place of its static leaves.

        Raises:
            ConfigurationError: a static leaf differs from that of the first state.
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
