"""The one module that knows Orbax: writes and reads one tree of numpy arrays, with a JSON beside it.

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
    """Raise ConfigurationError if Orbax is not installed. It is not imported."""
    try:
        found = importlib.util.find_spec("orbax.checkpoint") is not None
    except ModuleNotFoundError:  # not even the package above it
        found = False
    if not found:
        raise ConfigurationError(
            "Checkpoints need Orbax, which is not installed here: `pip install orbax-checkpoint`"
        )


def write(path: Path, tree: Any, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint, and return when it is complete. Whatever Orbax raises is let through."""
    v1 = _v1()
    # Made beside the writing, the folders are waited for by signals that go by a number which all saves of a process
    # share: two at once, of which one may be the user's own, write before their folders are there (0.12.8).
    context = v1.Context()
    context.asynchronous.create_directories_asynchronously = False
    with context:
        v1.save(path, _stored(tree), custom_metadata=dict(metadata))


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The JSON that was given to `write`; empty if there is none. Whatever Orbax raises is let through."""
    return _v1().checkpointables_metadata(path).custom_metadata or {}


def read(path: Path, like: Any) -> Any:
    """Read a tree of numpy arrays that has the structure, shapes and dtypes of `like`, whose values do not matter.

    Whatever Orbax raises is let through.
    """
    found = iter(jax.tree.leaves(_v1().load(path, _stored(like))))
    return jax.tree.map(
        lambda array: next(found).view(array.dtype) if array.size else np.array(array),
        like,
    )


def _stored(tree: Any) -> Any:
    """A tree as Orbax takes it: without arrays of no elements, and of dtypes that TensorStore knows.

    None keeps the place of an empty array, whose shape is known from elsewhere. Of other dtypes (uint4) the bytes are
    stored.
    """

    def stored(array: np.ndarray) -> np.ndarray | None:
        if not array.size:
            return None
        return array if _is_known(array.dtype.name) else array.view(f"uint{8 * array.itemsize}")

    return jax.tree.map(stored, tree)


@functools.cache
def _is_known(dtype: str) -> bool:
    tensorstore = importlib.import_module("tensorstore")
    try:
        tensorstore.dtype(dtype)
    except ValueError:
        return False
    return True


def _v1() -> Any:
    for home in _HOMES:
        try:
            return importlib.import_module(home)
        except ModuleNotFoundError as error:
            # What is missing may also be something that Orbax itself needs.
            if error.name is None or not home.startswith(error.name):
                raise
    raise ConfigurationError(
        "The Orbax that is installed here has no v1 API: `pip install --upgrade orbax-checkpoint`"
    )
