"""The files beside the arrays of a checkpoint, as Orbax writes them (0.12).

Orbax itself writes those of a group of one process; the tests compare the two.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_METADATA = "_CHECKPOINT_METADATA"
_SEQUENCE, _MAPPING = 1, 2
# Where the arrays lie.
STATE = "state"


def describe(written: Path, tree: Any, metadata: Mapping[str, Any], *, began_ns: int) -> None:
    """Make a folder with the arrays of a checkpoint a checkpoint of Orbax. Raises OSError.

    Args:
        written: the folder of the checkpoint.
        tree: the state as dicts, lists and tuples, with None for what is not stored as an array.
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
