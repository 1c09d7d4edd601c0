"""JAX in a fork of a warm process: imported long ago, and yet the program may set its variables before it imports it.

JAX reads most of its environment variables when it is imported. A program that sets one before (`JAX_ENABLE_X64`,
`JAX_NUM_CPU_DEVICES`) would train with other bits in a fork than alone. So `jax` is taken out of `sys.modules`, and
the program's first `import jax` returns the same module, after its options have followed the environment.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# As JAX reads them.
_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


class JaxAgain(Loader, MetaPathFinder):
    """A finder and loader of `jax`, for one import.

    Args:
        jax: the module.
        read: the environment that its options follow already.
    """

    def __init__(self, jax: ModuleType, read: Mapping[str, str]) -> None:
        self._jax = jax
        self._read = dict(read)
        self._spec = jax.__spec__

    def install(self) -> None:
        """Have the next `import jax` read the environment."""
        del sys.modules["jax"]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "jax" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._jax

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        follow(module, self._read)


def follow(jax: Any, read: Mapping[str, str]) -> None:
    """Set the options of JAX whose variables are not what JAX has read.

    Raises:
        ValueError: a variable has a value that its option cannot have, as when JAX reads it.
    """
    options = jax.config.values
    for name, text in os.environ.items():
        option = name.lower()
        if text != read.get(name) and option in options:
            jax.config.update(option, _value(name, text, options[option]))


def _value(name: str, text: str, now: Any) -> Any:
    """The value of an option that has the value `now`."""
    if isinstance(now, bool):
        return _truth(name, text)
    return type(now)(text) if type(now) in (int, float) else text


def _truth(name: str, text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"The environment variable {name} is {text!r}. It is true or false.")
    return text.lower() in _TRUE
