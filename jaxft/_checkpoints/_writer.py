"""One save, from the copy in host memory to the folder on disk. Runs in the background.

In a group of several processes, rank 0 makes a folder, every process writes its parts into it and syncs them, and
rank 0 completes and publishes it once all have. If one fails, or dies, nothing is published.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from jaxft._arrays._digest import digest_of_leaves
from jaxft._checkpoints import _beginning, _folder, _orbax, _sharing, _zarr
from jaxft._checkpoints._group import Group
from jaxft._checkpoints._host import HostCopy, filled, with_keys
from jaxft._checkpoints._manifest import Manifest, short_digest
from jaxft._checkpoints._orbax import STATE, describe, read_metadata
from jaxft._checkpoints._parts import PartsCopy

_log = logging.getLogger("jaxft")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint goes.

    Attributes:
        folder: of the job's checkpoints.
        keep: how many to keep, the new one included.
        damaged: the steps whose checkpoints this process has found damaged: they do not count, and are replaced.
        patience_s: for how long another process that saves may write nothing before this one saves, too.
    """

    folder: Path
    keep: int
    damaged: Set[int] = frozenset()
    patience_s: float = 0.0


def write(target: Target, manifest: Manifest, take: Callable[[], HostCopy]) -> None:
    """Write a checkpoint, unless the step has one, and delete all but the `keep` newest.

    Args:
        target: where.
        manifest: the checkpoint's manifest, without the digest.
        take: returns the copy of the state; called once.

    Raises:
        Exception: of the disk or of Orbax. Complete checkpoints have not been touched then.
    """
    with _turn(target, manifest) as mine:
        if not mine:
            return
        copy = take()
        # First, because folders of dead writers may be what fills the disk.
        _folder.sweep(target.folder)
        with _folder.unfinished(target.folder) as work:
            host = copy.join()
            digest = digest_of_leaves(copy.names, with_keys(host, copy.key_impls))
            manifest = dataclasses.replace(manifest, digest=digest)
            _orbax.write(work / str(manifest.step), filled(copy.skeleton, host), manifest.to_json())
            _publish(work, target, manifest.step)


def lead(
    target: Target, manifest: Manifest, take: Callable[[], PartsCopy], group: Group, number: int
) -> None:
    """In rank 0: as `write`, together with the other processes of the group, which `follow`.

    Raises:
        Exception: of the disk or of TensorStore, here or in another process.
    """
    step, began_ns = manifest.step, time.time_ns()
    begun = False
    try:
        with _turn(target, manifest) as mine:
            if not mine:
                return
            copy = take()
            _folder.sweep(target.folder)
            with _folder.unfinished(target.folder) as work:
                written = work / str(step)
                (written / STATE).mkdir(parents=True)
                begun = bool(group.save_begins(number, work.name))
                _write_together(written, lambda: copy, group, number)
                manifest = dataclasses.replace(manifest, digest=short_digest(copy.digest.result()))
                _zarr.merge(written / STATE, group.size)
                tree = filled(copy.skeleton, [None if 0 in array.type.shape else 0 for array in copy.arrays])
                describe(written, tree, manifest.to_json(), began_ns=began_ns)
                _publish(work, target, step)
    finally:
        if not begun:
            group.save_begins(number, "")


def follow(folder: Path, step: int, take: Callable[[], PartsCopy], group: Group, number: int) -> None:
    """In the other processes: write their parts into rank 0's folder. Raises as `lead`."""
    if work := group.save_begins(number, ""):
        _write_together(folder / work / str(step), take, group, number)


@contextlib.contextmanager
def _turn(target: Target, manifest: Manifest) -> Iterator[bool]:
    step, job = manifest.step, manifest.job

    def there() -> bool:
        return is_saved(target.folder, step, job, target.damaged)

    with _sharing.turn(target.folder, there, patience_s=target.patience_s) as mine:
        if mine:
            _log.debug("saves step %d", step)
        yield mine


def is_saved(folder: Path, step: int, job: str, damaged: Set[int]) -> bool:
    """Whether the step has a checkpoint, as of another group of the job. Raises FileExistsError: of another job."""
    if step not in set(_folder.steps(folder)) - damaged:
        return False
    there = folder / str(step)
    try:
        found = read_metadata(there).get("job", job)
    except (OSError, ValueError):  # it is damaged, or gone, which its reader reports
        return True
    if found != job:
        raise FileExistsError(
            f"{str(there)!r} is a checkpoint of the job {found!r}, and this is the job {job!r}. Two jobs in "
            "one folder delete each other's checkpoints: stop one of them, and give each its own folder"
        )
    return True


def _write_together(written: Path, take: Callable[[], PartsCopy], group: Group, number: int) -> None:
    """Write this process's parts. In rank 0, return once all processes have written theirs."""
    _log.debug("write step %s", written.name)
    failure, error = "", None
    try:
        _write_parts(written / STATE, take(), group.rank)
    except Exception as caught:  # all processes have to know; raised again below
        failure, error = f"{type(caught).__name__}: {caught}", caught
    # Also after a failure: the folder may go only once no process writes into it.
    failures = group.save_ends(number, failure)
    if error is not None:
        raise error
    if failures:
        raise OSError(failures[0])


def _write_parts(state: Path, copy: PartsCopy, rank: int) -> None:
    if not state.is_dir():
        raise FileNotFoundError(
            f"rank {rank} does not see the folder {str(state)!r}, which rank 0 has made: put the checkpoints on a "
            "file system that all processes share"
        )
    _zarr.write_parts(state, rank, copy.arrays, copy.take())
    # Rank 0 syncs all of them, but cannot sync what another host still holds in memory.
    _folder.sync(_zarr.own_folder(state, rank))


def _publish(work: Path, target: Target, step: int) -> None:
    """Publish the contents of an unfinished folder, and delete superseded checkpoints."""
    folder = target.folder
    if step in target.damaged:
        _folder.retire(folder, step, work)
    _folder.publish(work / str(step), folder, step)
    _log.info("saved step %d in %s", step, folder)
    _beginning.remove(folder)
    for old in superseded(_folder.steps(folder), step, target.keep, target.damaged):
        _folder.retire(folder, old, work)


def superseded(steps: list[int], step: int, keep: int, damaged: Set[int]) -> list[int]:
    """The older steps beyond `keep`. Newer ones are left to their writers.

    A damaged one does not count. It goes once it is older than all that is kept: one host may have found damage where
    there is none, and until there are enough others, it may be all that is left.
    """
    older = sorted((each for each in steps if each < step), reverse=True)
    kept = [each for each in older if each not in damaged][: keep - 1]
    oldest = min([step, *kept]) if len(kept) == keep - 1 else 0
    return sorted(each for each in older if each not in kept and (each < oldest or each not in damaged))
