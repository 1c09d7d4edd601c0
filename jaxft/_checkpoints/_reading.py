"""Reads one checkpoint, by one process or by all processes of a group.

An error of the system (too many open files, a stale handle, an I/O error) does not mean that a checkpoint is damaged:
reading is tried again for a while. Damage shows in a digest, a checksum or the format, and shows twice.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxft._arrays._lanes import Part
from jaxft._arrays._pieces import Pieces
from jaxft._arrays._placement import place
from jaxft._checkpoints import _folder, _zarr
from jaxft._checkpoints._group import Group, agreed
from jaxft._checkpoints._host import as_arrays
from jaxft._checkpoints._manifest import (
    LATER,
    Damaged,
    Manifest,
    Unreadable,
    difference,
    differences,
    digest_like,
    leaves_of,
    refusal,
)
from jaxft._checkpoints._orbax import STATE, read_metadata
from jaxft._checkpoints._parts import Stored, stored_arrays
from jaxft._errors import ConfigurationError

_T = TypeVar("_T")
_log = logging.getLogger("jaxft")


@dataclass(frozen=True, slots=True)
class Restored:
    """What `Checkpoints.restore` found.

    Attributes:
        step: the number of committed steps behind the state.
        state: the state, structured and placed like the one passed in.
        history: the number passed to `save`.
        digest: a digest of the state, equal when it was saved and when it was read: `jaxft.digest`, or 16 digits
            computed on its devices if a group of several processes saved it.
        folder: the folder of the checkpoint.
        settings: the settings of the job that saved it, by name; None if it was saved before these were stored.
    """

    step: int
    state: Any
    history: int
    digest: str
    folder: Path
    settings: Mapping[str, str] | None = None


class Wanted(NamedTuple):
    """The checkpoint to restore: of which job, and with which settings, by name; None: any."""

    job: str
    settings: Mapping[str, str] | None
    changed: Collection[str]


def read_checkpoint(folder: Path, like: Any, wanted: Wanted, group: Group) -> Restored:
    """Read a checkpoint like the state `like`, whose arrays are given up.

    Raises:
        Damaged: it cannot be used.
        ConfigurationError: it is another job's, of another model, or of other settings.
    """
    step = int(folder.name)
    manifest = agreed(group, "read the manifest", lambda: read_manifest(folder, step, group))
    _compare(manifest, folder, wanted)
    if differs := difference(manifest.leaves, leaves_of(like)):
        raise ConfigurationError(
            f"The checkpoint {str(folder)!r} is of a different state: {differs}. Restore with the model and the "
            "optimizer that it was saved with, or choose another folder."
        )
    place = agreed(group, "read the state", lambda: read(folder, like, group))
    leaves = place()
    # In the order in which they were saved: of the fields of the state's classes at that time.
    by_name = dict(zip((name for name, _ in leaves_of(like)), leaves, strict=True))
    names = [name for name, _ in manifest.leaves]
    found = digest_like(manifest.digest, names, [by_name[name] for name in names])
    agreed(group, "compare the digest", lambda: _check_digest(found, manifest.digest))
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return Restored(step, state, manifest.history, manifest.digest, folder, manifest.settings)


def _compare(manifest: Manifest, folder: Path, wanted: Wanted) -> None:
    """Refuse another job's checkpoint, or other settings. Settings of the caller's step are compared later."""
    if manifest.job != wanted.job and "job" not in wanted.changed:
        raise ConfigurationError(
            f"The checkpoint {str(folder)!r} is of the job {manifest.job!r}, but this is the job {wanted.job!r}. "
            "Use a separate folder for each job; or, to continue from this checkpoint, add 'job' to `changed`."
        )
    if wanted.settings is None:
        return
    if manifest.settings is None:
        _log.warning(
            "The checkpoint %s does not store the settings that it was saved with, so it is restored without "
            "comparing them.",
            folder,
        )
        return
    users = {name: value for name, value in manifest.settings.items() if name not in LATER}
    if differing := differences(users, wanted.settings, wanted.changed):
        raise ConfigurationError(refusal(str(folder), differing, manifest.step, wanted.changed))


def _check_digest(read: str, saved: str) -> None:
    if read != saved:
        raise Damaged(f"the state read has the digest {read}, but the state saved had {saved}")


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
    """Read this process's parts of a state. Raises Damaged.

    Returns:
        A function that places the leaves like `like`, whose arrays it gives up. All processes must call it.
    """
    arrays, stored, what = as_arrays(like), stored_arrays(like), f"read the checkpoint {folder}"
    if group.size == 1:
        whole = [
            Part(number, tuple((0, size) for size in array.type.shape)) for number, array in enumerate(stored)
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
    """Return the result of `do`. Raises Damaged if the files are not right, and Unreadable if the system fails."""
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
