"""One save, from the copy in host memory to the folder on disk. Runs in the background."""

import dataclasses
from collections.abc import Set
from pathlib import Path

from jaxft._arrays._digest import digest_of_leaves
from jaxft._checkpoints import _folder, _orbax
from jaxft._checkpoints._host import HostCopy, filled, with_keys
from jaxft._checkpoints._manifest import Manifest


def write(folder: Path, manifest: Manifest, copy: HostCopy, *, keep: int, damaged: Set[int]) -> None:
    """Write a checkpoint, unless the step has one, and delete what is older than the `keep` newest.

    Args:
        folder: the folder of the job's checkpoints.
        manifest: the checkpoint's manifest, without the digest.
        copy: the state.
        keep: how many to keep, this one included.
        damaged: steps whose checkpoints could not be read. They do not count, and are replaced.

    Raises:
        Exception: what the disk or Orbax raised. Complete checkpoints have not been touched then.
    """
    step = manifest.step
    if step in set(_folder.steps(folder)) - damaged:
        return
    # First, because folders of dead writers may be what fills the disk.
    _folder.sweep(folder)
    with _folder.unfinished(folder) as work:
        host = copy.join()
        digest = digest_of_leaves(copy.names, with_keys(host, copy.key_impls))
        manifest = dataclasses.replace(manifest, digest=digest)
        _orbax.write(work / str(step), filled(copy.skeleton, host), manifest.to_json())
        if step in damaged:
            _folder.retire(folder, step, work)
        _folder.publish(work / str(step), folder, step)
        for old in _superseded(_folder.steps(folder), step, keep, damaged):
            _folder.retire(folder, old, work)


def _superseded(steps: list[int], step: int, keep: int, damaged: Set[int]) -> list[int]:
    """The older steps beyond `keep`, and the damaged older steps. Newer ones are left to their writers."""
    older = {each for each in steps if each < step}
    newest_first = sorted(older - damaged, reverse=True)
    return sorted(older - set(newest_first[: keep - 1]))
