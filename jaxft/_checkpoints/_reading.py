"""Reads one checkpoint, by one process or by all processes of a group.

An error of the system (too many open files, a stale handle, an I/O error) says nothing about the checkpoint: reading
is tried again for a while. Damage is what a digest, a checksum or the format shows, and shows twice.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxft._arrays._lanes import Part
from jaxft._arrays._pieces import Pieces
from jaxft._arrays._placement import place
from jaxft._checkpoints import _folder, _zarr
from jaxft._checkpoints._group import Group
from jaxft._checkpoints._host import as_arrays
from jaxft._checkpoints._manifest import Damaged, Manifest, Unreadable
from jaxft._checkpoints._orbax import STATE, read_metadata
from jaxft._checkpoints._parts import Stored, stored_arrays
from jaxft._errors import ConfigurationError

_T = TypeVar("_T")


def read_manifest(folder: Path, step: int, group: Group) -> Manifest:
    """The description of a checkpoint. Raises Damaged."""

    def described() -> Manifest:
        if group.rank and not folder.is_dir():
            raise Damaged(
                f"rank {group.rank} does not see it, but rank 0 does: put the checkpoints on a file system that all "
                "processes share"
            )
        return Manifest.from_json(read_metadata(folder))

    manifest = _read("read the manifest of a checkpoint", described, group)
    if manifest.step != step:
        raise Damaged(f"its manifest is for step {manifest.step}")
    return manifest


def read(folder: Path, like: Any, group: Group) -> Callable[[], Sequence[jax.Array]]:
    """Read what this process needs of a state. Raises Damaged.

    Returns:
        What places the leaves like those of `like`, whose arrays it gives up one by one. All processes must call it.
    """
    arrays, stored, what = as_arrays(like), stored_arrays(like), f"read the checkpoint {folder}"
    if group.size == 1:
        whole = [
            Part(number, tuple((0, size) for size in one.type.shape)) for number, one in enumerate(stored)
        ]
        host = _read(what, lambda: _parts(folder, stored, whole, group), group)
        return lambda: place(host, arrays, range(len(arrays)))
    pieces = Pieces.of_arrays(arrays)
    parts = _read(what, lambda: _parts(folder, stored, pieces.parts, group), group)
    return lambda: pieces.place(parts, arrays, range(len(arrays)))


def _parts(folder: Path, stored: Sequence[Stored], parts: Sequence[Part], group: Group) -> list[np.ndarray]:
    found: dict[Part, np.ndarray] = {}
    for part, array in _zarr.read_parts(folder / STATE, stored, parts):
        found[part] = array
        group.got_on()
    return [found[part] for part in parts]


def _read(what: str, do: Callable[[], _T], group: Group) -> _T:
    """What `do` returns. Raises Damaged if what it reads is not right, and Unreadable if the system fails."""
    try:
        return _tried(what, do, group)
    except Unreadable:
        raise
    except Damaged:
        # Once more: a library may have swallowed an error of the system, and gone on without a file.
        return _tried(what, do, group)


def _tried(what: str, do: Callable[[], _T], group: Group) -> _T:
    try:
        return _folder.with_patience(what, do, group.got_on)
    except (ConfigurationError, MemoryError, Damaged):
        raise  # the first two are not the checkpoint's fault
    except Exception as error:  # TensorStore does not document its errors, and adds pages of its settings
        kind = Damaged if _folder.code_of_the_system(error) is None else Unreadable
        raise kind(f"reading it failed with {type(error).__name__}: {str(error)[:400]}") from error
