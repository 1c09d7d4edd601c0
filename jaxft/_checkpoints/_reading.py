"""Reads one checkpoint, by one process or by all processes of a group."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxft._arrays._lanes import Part
from jaxft._arrays._pieces import Pieces
from jaxft._arrays._placement import place
from jaxft._checkpoints import _orbax, _zarr
from jaxft._checkpoints._description import STATE, read_metadata
from jaxft._checkpoints._group import Group
from jaxft._checkpoints._host import as_arrays
from jaxft._checkpoints._manifest import Damaged, Manifest
from jaxft._checkpoints._parts import Stored, stored_arrays
from jaxft._errors import ConfigurationError

_T = TypeVar("_T")


def agreed(group: Group, what: str, do: Callable[[], _T]) -> _T:
    """What `do` returns, if it returns in every process of the group. Raises Damaged if it does so in any."""
    found: list[_T] = []
    failure, error = "", None
    try:
        found.append(do())
    except Damaged as caught:
        failure, error = str(caught), caught
    if failure := group.agree(what, failure):
        raise Damaged(failure) from error
    return found[0]


def read_manifest(folder: Path, step: int, group: Group) -> Manifest:
    """The description of a checkpoint. Raises Damaged."""
    if group.rank and not folder.is_dir():
        raise Damaged(
            f"rank {group.rank} does not see it, but rank 0 does: put the checkpoints on a file system that all "
            "processes share"
        )
    manifest = Manifest.from_json(_or_damaged(lambda: _metadata(folder, group)))
    if manifest.step != step:
        raise Damaged(f"its manifest is for step {manifest.step}")
    return manifest


def read(folder: Path, like: Any, group: Group) -> Callable[[], Sequence[jax.Array]]:
    """Read what this process needs of a state. Raises Damaged.

    Returns:
        What places the leaves like those of `like`. All processes must call it.
    """
    arrays = as_arrays(like)
    if group.size == 1:
        host = _or_damaged(lambda: _read_all(folder, stored_arrays(like)))
        return lambda: place(host, arrays)
    pieces = Pieces.of_arrays(arrays)
    parts = _or_damaged(lambda: _read_parts(folder, like, pieces, group))
    return lambda: pieces.place(parts, arrays)


def _metadata(folder: Path, group: Group) -> Mapping[str, Any]:
    # Orbax lets the processes of a group wait for each other here.
    return _orbax.read_metadata(folder) if group.size == 1 else read_metadata(folder)


def _read_all(folder: Path, arrays: Sequence[Stored]) -> list[np.ndarray]:
    found = _orbax.read(folder)
    return [
        np.empty(one.type.shape, one.type.dtype)
        if 0 in one.type.shape  # it is stored as None
        else found.pop(one.name).view(one.type.dtype)
        for one in arrays
    ]


def _read_parts(folder: Path, like: Any, pieces: Pieces, group: Group) -> list[np.ndarray]:
    found: dict[Part, np.ndarray] = {}
    for part, array in _zarr.read_parts(folder / STATE, stored_arrays(like), pieces.parts):
        found[part] = array
        group.got_on()
    return [found[part] for part in pieces.parts]


def _or_damaged(read: Callable[[], _T]) -> _T:
    """What `read` returns; Damaged if it raises."""
    try:
        return read()
    except (ConfigurationError, MemoryError):
        raise  # not the checkpoint's fault
    except Exception as error:  # Orbax and TensorStore do not document their errors
        # TensorStore appends all its settings, several pages of them.
        text = str(error)[:400]
        raise Damaged(f"reading it failed with {type(error).__name__}: {text}") from error
