"""States of streams on a disk that all groups share, so that a group that starts later finds its place in them."""

import base64
import contextlib
import importlib
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_log = logging.getLogger("jaxft")


class Kept(NamedTuple):
    """The state of a stream before batch `position`, and the digest of that batch."""

    position: int
    state: Any
    digest: str


# So many of each shard are kept: the job may go back to a checkpoint.
KEPT = 8


class States:
    """The states of one job's streams: `folder/shard-3/1200.json` is that of shard 3 before batch 1200."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the program may change its working folder
        self._refused = False
        self._warned = False
        self.proven = False  # a stream that was restored went on with the batch that it should

    def refuse(self, why: str) -> None:
        """Neither save nor use a state any more."""
        self._refused = True
        _log.warning(
            "states of streams in %s are not used: %s. A group that starts later finds its place in a stream without "
            "them: by `skip`, or by reading all batches before it",
            *(self._folder, why),
        )

    def save(self, shard: int, kept: Kept) -> None:
        """Write a state. One that is not JSON and bytes is left out, and so is one that the disk does not take.

        Each has one warning: a state only saves time later, and is no reason to stop training.
        """
        if self._refused:
            return
        try:
            text = json.dumps({"state": kept.state, "digest": kept.digest}, default=_encoded)
        except (TypeError, ValueError) as error:
            self.refuse(str(error))
            return
        path = self._path(shard, kept.position)
        try:
            if not path.exists():
                _write(path, text)
                self._forget_old(shard)
        except OSError as error:
            self._warn(path, error)

    def _warn(self, path: Path, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        _log.warning(
            "the state of a stream was not written to %s: %s: %s. Training goes on, and the next states are tried "
            "without another warning; a group that starts later may have to read more batches. Check that the disk "
            "is mounted, has space, and is writable.",
            *(path, type(error).__name__, error),
        )

    def _forget_old(self, shard: int) -> None:
        for old in self._positions(shard)[:-KEPT]:
            self._path(shard, old).unlink(missing_ok=True)

    def newest(self, shard: int, position: int) -> Kept | None:
        """The last state at or before `position`."""
        try:
            positions = [] if self._refused else self._positions(shard)
        except OSError as error:  # as if none had been written
            _log.warning("the states of shard %d in %s cannot be read: %s", shard, self._folder, error)
            return None
        for found in reversed(positions):
            if found > position:
                continue
            try:
                read = json.loads(self._path(shard, found).read_text(), object_hook=_decoded)
                return Kept(found, read["state"], read["digest"])
            except (
                OSError,
                ValueError,
                KeyError,
            ) as error:  # another group has deleted it, or the disk has damaged it
                _log.warning("the state of shard %d before batch %d cannot be read: %s", shard, found, error)
        return None

    def _positions(self, shard: int) -> list[int]:
        names = self._path(shard, 0).parent.glob("*.json")
        return sorted(int(path.stem) for path in names if path.stem.isdecimal())

    def _path(self, shard: int, position: int) -> Path:
        return self._folder / f"shard-{shard}" / f"{position}.json"


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
    try:
        with unfinished.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the error before it says what is wrong with the disk
            unfinished.unlink(missing_ok=True)
        raise


def _encoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if callable(getattr(value, "numpy", None)):  # a tensor of torch, such as the state of a torch.Generator
        array: np.ndarray = value.numpy()
        return {"__tensor__": [str(array.dtype), array.shape, array.tobytes()]}
    raise TypeError(f"a {type(value).__name__} in the state of the stream cannot be written as JSON")


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() == {"__bytes__"}:
        return base64.b64decode(value["__bytes__"])
    if value.keys() == {"__tensor__"}:
        dtype, shape, content = value["__tensor__"]
        torch = importlib.import_module("torch")
        return torch.from_numpy(np.frombuffer(content, dtype).reshape(shape).copy())
    return value
