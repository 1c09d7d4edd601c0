"""JAX in a fork of a warm process: imported long ago, and yet the program may set its variables before it imports it.

JAX reads most of its environment variables when it is imported. A program that sets one before (`JAX_ENABLE_X64`,
`JAX_NUM_CPU_DEVICES`) would train with other bits in a fork than alone. So JAX is taken out of `sys.modules`, and the
program's first import of it returns the same modules, after the options have followed the environment.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What launchers set for each group, and what JAX makes of it.
_PLAIN = {
    "JAX_PLATFORMS": str,
    "JAX_CUDA_VISIBLE_DEVICES": str,
    "JAX_ROCM_VISIBLE_DEVICES": str,
    "JAX_NUM_CPU_DEVICES": int,
}
# How long a fresh interpreter may take, also on a busy machine: it needs half a second.
_IMPORT_S = 300.0
_ASK = (
    "import jax, sys; kinds = (bool, int, float, str, type(None)); "
    "sys.stdout.write(repr({name: value for name, value in jax.config.values.items() if type(value) in kinds}))"
)


class JaxAgain(Loader, MetaPathFinder):
    """A finder and loader of `jax`, for one import."""

    def __init__(self, read: Mapping[str, str]) -> None:
        self._modules = {
            name: module for name, module in sys.modules.items() if name == "jax" or name.startswith("jax.")
        }
        self._read = dict(read)
        self._spec = self._modules["jax"].__spec__

    def install(self) -> None:
        """Have the next import of `jax`, or of a module of it, read the environment."""
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "jax" or self._spec is None:
            return None  # of a module within, `jax` is imported first
        spec = ModuleSpec(name, self, origin=self._spec.origin)
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        module.__spec__ = self._spec
        follow(module, self._read)


def follow(jax: Any, read: Mapping[str, str]) -> None:
    """Set the options of JAX whose variables are not what JAX has read.

    Raises:
        ValueError: a variable has a value that JAX refuses.
        subprocess.TimeoutExpired: a fresh interpreter has not imported JAX within `_IMPORT_S`.
    """
    names = {name for name in (*os.environ, *read) if name.startswith("JAX_")}
    changed = [name for name in names if os.environ.get(name) != read.get(name)]
    if not changed:
        return
    if all(name in _PLAIN and name in os.environ for name in changed):
        values: Mapping[str, Any] = {name.lower(): _PLAIN[name](os.environ[name]) for name in changed}
    else:
        values = _as_jax_reads_them()
    for option in map(str.lower, changed):
        if option in values and values[option] != jax.config.values[option]:
            jax.config.update(option, values[option])


def _as_jax_reads_them() -> Mapping[str, Any]:
    """JAX's options in a fresh interpreter with this environment: each option has its own rules."""
    command = [sys.executable, "-P", "-c", _ASK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_S)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"JAX cannot be imported with these environment variables: {reason}")
    return ast.literal_eval(done.stdout)
