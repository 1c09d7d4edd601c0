"""The only module that calls Orbax: writes and reads one tree of numpy arrays, with JSON beside it.

Orbax takes most of a second to import, so it is imported when a checkpoint is first read or written.
"""

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxft._errors import ConfigurationError

# Where the v1 API lives; in 0.12 it is still under "experimental".
_HOMES = ("orbax.checkpoint.v1", "orbax.checkpoint.experimental.v1")


def require() -> None:
    """Raise ConfigurationError if Orbax is not installed. Does not import it."""
    try:
        found = importlib.util.find_spec("orbax.checkpoint") is not None
    except ModuleNotFoundError:  # not even the package above it
        found = False
    if not found:
        raise ConfigurationError(
            "Checkpoints need Orbax, which is not installed: run `pip install orbax-checkpoint`."
        )


def write(path: Path, tree: Any, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint, and return when it is complete. Orbax's errors propagate."""
    v1 = _v1()
    # If folders are created asynchronously, Orbax waits for them by signals with a number that all saves of a process
    # share: of two saves at once, one perhaps the user's own, one may write before its folder exists (0.12.8).
    context = v1.Context()
    context.asynchronous.create_directories_asynchronously = False
    with context:
        v1.save(path, _stored(tree), custom_metadata=dict(metadata))


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The JSON that was passed to `write`; empty if there is none. Orbax's errors propagate."""
    return _v1().checkpointables_metadata(path).custom_metadata or {}


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a checkpoint, by their names on disk. Orbax's errors propagate."""
    # In the structure on disk: Orbax refuses any other, also one that differs in nothing but empty containers.
    found = jax.tree_util.tree_leaves_with_path(_v1().load(path))
    return {
        jax.tree_util.keystr(keys, simple=True, separator="."): np.asarray(array) for keys, array in found
    }


def _stored(tree: Any) -> Any:
    """A tree as Orbax accepts it: without empty arrays, and only with dtypes that TensorStore knows.

    An empty array is stored as None; its shape is known from elsewhere.
    """
    return jax.tree.map(lambda array: as_stored(array) if array.size else None, tree)


def as_stored(array: np.ndarray) -> np.ndarray:
    """An array as TensorStore accepts it: one of another dtype (uint4) as its bytes."""
    dtype = stored_dtype(array.dtype.name)
    return array if dtype == array.dtype.name else array.view(dtype)


@functools.cache
def stored_dtype(dtype: str) -> str:
    """The dtype with which arrays of this dtype are stored."""
    tensorstore = importlib.import_module("tensorstore")
    try:
        tensorstore.dtype(dtype)
    except ValueError:
        return f"uint{8 * np.dtype(dtype).itemsize}"
    return dtype


def _v1() -> Any:
    for home in _HOMES:
        try:
            return importlib.import_module(home)
        except ModuleNotFoundError as error:
            # The missing module may also be a dependency of Orbax.
            if error.name is None or not home.startswith(error.name):
                raise
    raise ConfigurationError(
        "The installed Orbax has no v1 API: run `pip install --upgrade orbax-checkpoint`."
    )
