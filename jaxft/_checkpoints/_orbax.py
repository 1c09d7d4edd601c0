"""Orbax's format: one tree of numpy arrays, and JSON files.

Orbax writes it for a group of one process. A group of several writes the same files itself (`describe`, `_zarr`); the
tests compare the two. Orbax takes most of a second to import, so it is imported when a checkpoint is first written.
"""

import functools
import importlib
import importlib.util
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxft._errors import ConfigurationError

# Where the v1 API lives; in 0.12 it is still under "experimental".
_HOMES = ("orbax.checkpoint.v1", "orbax.checkpoint.experimental.v1")

_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_METADATA = "_CHECKPOINT_METADATA"
_SEQUENCE, _MAPPING = 1, 2
# Where the arrays lie.
STATE = "state"


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


def _stored(tree: Any) -> Any:
    """A tree as Orbax accepts it: without empty arrays, and only with dtypes that TensorStore knows.

    An empty array is stored as None; its shape is known from elsewhere.
    """
    return jax.tree.map(lambda array: as_stored(array) if array.size else None, tree)


def as_stored(array: np.ndarray) -> np.ndarray:
    """An array as TensorStore accepts it: an unknown dtype (uint4) as bytes."""
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


def describe(written: Path, tree: Any, metadata: Mapping[str, Any], *, began_ns: int) -> None:
    """Make a folder with the arrays of a checkpoint a checkpoint of Orbax. Raises OSError.

    Args:
        written: the folder of the checkpoint.
        tree: the state as dicts, lists and tuples, with None for leaves that are not stored as arrays.
        metadata: what `read_metadata` returns.
        began_ns: when the save began, in nanoseconds since 1970.
    """
    (written / STATE / "_METADATA").write_text(json.dumps(tree_metadata(tree)))
    fields = {
        "item_handlers": {STATE: _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": began_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": dict(metadata),
    }
    (written / _METADATA).write_text(json.dumps(fields))
    (written / "commit_success.txt").write_text(f"Checkpoint commit was successful to {written}")
    (written / "orbax.checkpoint").touch()


def read_metadata(folder: Path) -> Mapping[str, Any]:
    """The JSON that was passed to `describe`, or to Orbax; empty if there is none. Raises OSError, ValueError."""
    return json.loads((folder / _METADATA).read_text()).get("custom_metadata") or {}


def tree_metadata(tree: Any) -> dict[str, Any]:
    """The structure of a tree, as JSON."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty)
    return {
        "tree_metadata": dict(_entry(path, node) for path, node in found),
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _entry(path: Any, node: Any) -> tuple[str, dict[str, Any]]:
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    kinds = [_SEQUENCE if isinstance(key, jax.tree_util.SequenceKey) else _MAPPING for key in path]
    value = _empty_name(node) if _is_empty(node) else "np.ndarray"
    return str(names), {
        "key_metadata": [{"key": name, "key_type": kind} for name, kind in zip(names, kinds, strict=True)],
        "value_metadata": {"value_type": value, "skip_deserialize": _is_empty(node)},
    }


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def _empty_name(node: Any) -> str:
    if node is None or hasattr(node, "_fields"):
        return "None"
    return "Dict" if isinstance(node, dict) else type(node).__name__.capitalize()
