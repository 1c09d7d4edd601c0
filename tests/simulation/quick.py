"""A quicker `dataclasses.replace` for the cores, with the same result: half the time of a simulation went into it.

The cores copy a frozen value at every change. The library's `replace` asks each field for its properties each time;
here a copy is a function made once for each class, which moves the slots and nothing else.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_CORES = ("jaxft_coordinator.core.", "jaxft._replica._core")


def replace(value: T, /, **changes: Any) -> T:
    """As `dataclasses.replace`, for classes with slots, without `__post_init__`."""
    copy, setters = _copier(type(value))
    made = copy(value)
    for name, new in changes.items():
        setters[name](made, new)
    return made


@contextlib.contextmanager
def copies() -> Iterator[None]:
    """Let the cores use it, for the length of the context."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_CORES)]
    changed = [module for module in modules if getattr(module, "replace", None) is dataclasses.replace]
    for module in changed:
        vars(module)["replace"] = replace
    try:
        yield
    finally:
        for module in changed:
            vars(module)["replace"] = dataclasses.replace


@functools.cache
def _copier(kind: type[Any]) -> tuple[Callable[[Any], Any], dict[str, Callable[[Any, Any], None]]]:
    fields = dataclasses.fields(kind)
    assert not hasattr(kind, "__post_init__")
    assert all(field.init and hasattr(vars(kind)[field.name], "__set__") for field in fields)
    setters = {field.name: vars(kind)[field.name].__set__ for field in fields}
    names = list(setters)
    values = operator.attrgetter(*names) if len(names) > 1 else (lambda value: (getattr(value, names[0]),))
    new, all_setters = object.__new__, list(setters.values())
    call: Any = operator.call

    def copy(value: Any) -> Any:
        made = new(kind)
        collections.deque(map(call, all_setters, itertools.repeat(made), values(value)), 0)
        return made

    return copy, setters
