"""`Checkpoints`: saves the state to disk in the background, and restores the newest complete one."""

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jaxft._base._numbers import whole
from jaxft._base._room import start_thread
from jaxft._base._transfers import MAY_TRANSFER
from jaxft._checkpoints import _folder, _orbax, _sharing
from jaxft._checkpoints._group import Group, OneProcess
from jaxft._checkpoints._host import HostCopy
from jaxft._checkpoints._manifest import Damaged, Manifest, Unreadable, check_changed, leaves_of
from jaxft._checkpoints._parts import PartsCopy, check_storable
from jaxft._checkpoints._reading import Restored, Wanted, read_checkpoint
from jaxft._checkpoints._writer import Target, follow, lead, write
from jaxft._errors import CannotRestore, ConfigurationError

_T = TypeVar("_T")
_log = logging.getLogger("jaxft")

# A checkpoint may be deleted while it is read, because there is a newer one. This often, the newer one is tried.
_MOST_REPLACED = 100


class Checkpoints:
    """Saves the state of a job at regular steps, and restores the newest checkpoint.

    A lost group heals from its peers; checkpoints are for when no group is left. Each is a folder, named by its step,
    that plain Orbax can read. Creating a `Checkpoints` does not touch the disk.

    Not thread-safe: use it from the thread that calls the step.

    Args:
        folder: the folder for the job's checkpoints, and no other job's; on a disk that all groups share, so that
            any of them can write, and all can read. The first save creates it.
        every_steps: a checkpoint is due at each multiple of this.
        keep: how many complete checkpoints to keep; older ones are deleted once a newer one is complete.

    Raises:
        ConfigurationError: an argument is invalid, or Orbax is not installed.

    Example:
        >>> import jaxft
        >>> jaxft.Checkpoints("/no/such/folder", every_steps=50).due(100)
        True
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_steps: int = 100, keep: int = 3) -> None:
        if not isinstance(folder, str | os.PathLike):  # pyright: ignore
            raise ConfigurationError(
                f"folder must be a path, a str or a pathlib.Path, not {folder!r:.60}, a {type(folder).__name__}. "
                "Name a folder on a disk that all groups share."
            )
        if not os.fspath(folder):
            raise ConfigurationError(
                "folder must be a path, not the empty string. Name a folder on a disk that all groups share."
            )
        if "://" in os.fspath(folder):
            raise ConfigurationError(
                f"folder must be a path on a mounted disk, not {os.fspath(folder)!r}: a checkpoint is completed by "
                "renaming its folder, which object stores cannot do. Name a folder on a disk that all groups share."
            )
        self._every_steps = whole("every_steps, the number of steps between two saves,", every_steps, 1)
        self._keep = whole("keep, the number of complete checkpoints kept,", keep, 1)
        _orbax.require()
        self._folder = Path(folder).absolute()
        self._thread: threading.Thread | None = None
        self._saving = 0  # the step that the thread saves
        self._saves = 0  # how many were begun
        self._failure = ""  # of the last save that has ended
        # How long a save of another process is waited for, once the loop has ended.
        self._last_s: float | None = None
        self._damaged: set[int] = set()  # found by this process when it was started

    @property
    def folder(self) -> Path:
        """The folder, as an absolute path."""
        return self._folder

    def due(self, step: int) -> bool:
        """Whether the state after `step` committed steps should be saved."""
        return step > 0 and step % self._every_steps == 0

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending. Whether one is damaged shows when it is read.

        Raises:
            ConfigurationError: the folder is a file.
            CannotRestore: it cannot be read.
        """
        try:
            with _folder.said_if_slow(self._folder, "list them"):
                return _folder.with_patience("list the checkpoints", lambda: _folder.steps(self._folder))
        except NotADirectoryError as error:
            raise ConfigurationError(
                f"the folder of the checkpoints, {str(self._folder)!r}, is a file, or is in one. Name a folder on a "
                "disk that all groups share."
            ) from error
        except OSError as error:
            raise CannotRestore(
                f"The folder of the checkpoints, {str(self._folder)!r}, cannot be read: {type(error).__name__}: "
                f"{error}. Training does not start from scratch here. Let this process read it: check its "
                "permissions, and the disk."
            ) from error

    def claim(self, job: str, changed: Collection[str] = (), group: Group | None = None) -> None:
        """Try all that a save does, before the first step; and note that the folder is this job's.

        Args:
            job: the job's name.
            changed: as for `restore`.
            group: the processes that are to save together; all of them call this.

        Raises:
            ConfigurationError: the folder is another job's, or cannot hold checkpoints.
        """
        _sharing.claim_together(self._folder, job, group or OneProcess(), takes_over="job" in changed)

    @MAY_TRANSFER
    def restore(
        self,
        like: Any,
        *,
        job: str,
        settings: Mapping[str, str] | None = None,
        changed: Collection[str] = (),
        group: Group | None = None,
    ) -> Restored | None:
        """Read the newest intact checkpoint.

        A checkpoint that cannot be read, or whose digest differs from the saved state's, is skipped with a warning,
        and the checkpoint before it is tried. An error of the system is waited out first. The next save of a damaged
        step replaces it. Unfinished checkpoints are ignored.

        Args:
            like: a state with the wanted structure, shapes, dtypes and shardings, or such a tree
                of `jax.ShapeDtypeStruct`. Its arrays are given up as the new ones are placed. The saved state may
                have other shardings, another order of the leaves, and other nodes without leaves.
            job: the job's name.
            settings: settings that must equal the checkpoint's, by name; None: nothing is compared.
            changed: names of settings that were changed on purpose; with "job", another job's checkpoint is accepted.
            group: the processes that hold the state; all of them call this, and get the same step. None: this one.

        Returns:
            The step and its state; None if there is no checkpoint.

        Raises:
            ConfigurationError: the checkpoint is of another job, of another model, or of other settings, which the
                message names. Or no checkpoint can hold such a state.
            CannotRestore: there are checkpoints, and none can be read. Training never starts from scratch by itself.
        """
        check_changed(changed)
        group, wanted = group or OneProcess(), Wanted(job, settings, changed)
        check_storable(like, shapes=True)
        found: list[int] = []
        unreadable, replaced = "", 0  # why files of one cannot be read here
        while (step := self._newest(group, found)) is not None:
            found.insert(0, step)
            try:
                return read_checkpoint(self._folder / str(step), like, wanted, group)
            except Damaged as error:
                gone = not (self._folder / str(step)).is_dir() and replaced < _MOST_REPLACED
                if group.choose("the checkpoint is gone", int(gone)):
                    found.remove(step)  # a group that saves has replaced it by a newer one
                    replaced += 1
                    continue
                _log.warning("Skipped the checkpoint %s: %s", self._folder / str(step), error)
                if isinstance(error, Unreadable):
                    unreadable = str(error)
                else:
                    self._damaged.add(step)
        if not found:
            return None
        steps = ", ".join(map(str, found))
        if unreadable:
            raise CannotRestore(
                f"No checkpoint in {str(self._folder)!r} can be read here (steps {steps}); the log says why. They "
                f"may be intact: {unreadable}. Let this process read them: check their permissions, and the disk."
            )
        raise CannotRestore(
            f"All checkpoints in {str(self._folder)!r} are damaged (steps {steps}); the log says why. Restore an "
            "intact one from a backup, or move them away to start the job from scratch."
        )

    def _newest(self, group: Group, tried: Collection[int]) -> int | None:
        """The newest step with a complete checkpoint that was not tried yet, as rank 0 sees them now."""
        mine = max((step for step in self.steps() if step not in tried), default=-1)
        return None if (chosen := group.choose("the checkpoint to read", mine + 1)) == 0 else chosen - 1

    @MAY_TRANSFER
    def save(
        self,
        step: int,
        state: Any,
        *,
        job: str,
        history: int,
        settings: Mapping[str, str] | None = None,
        group: Group | None = None,
    ) -> None:
        """Start to save a state; return as soon as the state may be donated.

        The caller waits for one copy to host memory; the writing continues in the background. A failure is logged as
        an error, and the next due step is saved. While the previous save is still running, a new one is skipped with
        a warning. A step that already has a checkpoint, not known to be damaged, is not saved again. After
        `last_comes` the state is copied in the background, too, and must not be donated before `finish`.

        Args:
            step: the number of committed steps behind the state.
            state: a pytree of arrays.
            job: the job's name.
            history: a number that `restore` returns.
            settings: the settings that a run that continues from here is compared with, by name.
            group: the processes that hold the state; all of them call this, and each writes what it holds. None: this
                one.

        Raises:
            ConfigurationError: two leaves would have the same name on disk, or there is no leaf.
        """
        check_storable(state)
        group = group or OneProcess()
        if group.choose("skip the save", int(self._thread is not None and self._thread.is_alive())):
            if group.rank == 0:
                _log.warning(
                    "Skipped the checkpoint of step %d: the checkpoint of step %d is still being written. If this "
                    "happens often, save less often (every_steps is %d) or to a faster disk.",
                    *(step, self._saving, self._every_steps),
                )
            return
        if self._thread is not None:
            self._thread.join()  # rank 0 has heard from it that its part is written
        kept = None if settings is None else dict(settings)
        manifest = Manifest(step, job, history, "", leaves_of(state), kept)
        self._saving, self._saves = step, self._saves + 1
        # A daemon: a disk that hangs must not keep the process alive. `finish` waits for the thread.
        writing = self._writing(manifest, state, group)
        self._thread = start_thread(self._write, writing, step, name="jaxft-checkpoint")

    def _writing(self, manifest: Manifest, state: Any, group: Group) -> Callable[[], None]:
        """Copy a state, unless it is the last one; return what writes the copy, or what reports why there is none."""
        target = Target(self._folder, self._keep, frozenset(self._damaged), self._last_s or 0.0)
        now, number = self._last_s is None, self._saves
        if group.size == 1:
            take = _taking(partial(HostCopy, state), now=now)
            return lambda: write(target, manifest, take)
        # All processes compute it together, so no failure of one may keep it from beginning.
        parts = _taking(partial(PartsCopy, state, group.digest()), now=now)
        if group.rank:
            return lambda: follow(target.folder, manifest.step, parts, group, number)
        return lambda: lead(target, manifest, parts, group, number)

    @MAY_TRANSFER
    def _write(self, writing: Callable[[], None], step: int) -> None:
        """The background thread."""
        failure = ""
        try:
            writing()
            self._damaged.discard(step)
        except BaseException as error:  # the top of a thread; a failed save must not end training
            failure = f"{type(error).__name__}: {error}"
            then = (
                "Training continues, and the next due step is saved"
                if self._last_s is None
                else "It is the last one"
            )
            _log.error(
                "The checkpoint of step %d was not written to %s: %s. %s; check that the disk is mounted, has space, "
                "and is writable, and that the host has memory for a copy of the state.",
                *(step, self._folder, failure, then),
            )
        self._failure = failure

    def last_comes(self, patience_s: float) -> None:
        """The loop has ended: the next save is of the last state, which other groups may save, too.

        Args:
            patience_s: for how long another group that saves may write nothing before this one saves, too.
        """
        self._last_s = patience_s

    def finish(self, timeout_s: float) -> str:
        """Wait for the running save, if any, as long as its bytes move; log a warning if it does not get on.

        Args:
            timeout_s: for how long nothing may have been written.

        Returns:
            Why the state that was saved last is not on the disk; "" if it is.
        """
        thread = self._thread
        if thread is None:
            return ""

        def say(waited_s: float, megabytes: float) -> None:
            waits = waited_s, self._saving, megabytes
            _log.info("waiting %.0f s for the checkpoint of step %d: %.0f MB are written", *waits)

        if thread.is_alive() and not _sharing.wait_for(thread, self._folder, timeout_s, say):
            failure = f"nothing of it was written for {timeout_s:.0f} s"
            _log.warning(
                "The checkpoint of step %d is not complete, and %s: if this process ends now, it is lost. Check the "
                "disk of %s.",
                *(self._saving, failure, self._folder),
            )
            return failure
        return self._failure


def _taking(copy: Callable[[], _T], *, now: bool) -> Callable[[], _T]:
    """What returns a copy that is made now, or when it is asked for; or raises why it could not be made."""
    if not now:
        return copy
    try:
        copied = copy()
    except Exception as caught:
        # Logged as any failed save. Most likely the host has no memory for the copy.
        error = caught.with_traceback(None)  # which holds copied arrays

        def fail() -> _T:
            raise error

        return fail
    return lambda: copied
