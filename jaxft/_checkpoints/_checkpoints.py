"""`Checkpoints`: saves the state to disk in the background, and restores the newest complete one."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxft._arrays._device_digest import PendingDigest
from jaxft._base import _calls
from jaxft._base._numbers import whole
from jaxft._base._room import start_thread
from jaxft._checkpoints import _folder, _marks, _orbax
from jaxft._checkpoints._group import Group, OneProcess
from jaxft._checkpoints._host import HostCopy
from jaxft._checkpoints._manifest import Damaged, Manifest, difference, digest_like, leaves_of
from jaxft._checkpoints._parts import PartsCopy, check_storable
from jaxft._checkpoints._readers import turn
from jaxft._checkpoints._reading import agreed, read, read_manifest
from jaxft._checkpoints._saver import HEAD_START_S, SaverLock
from jaxft._checkpoints._settings import LATER, check_changed, differences, refusal
from jaxft._checkpoints._slow import said_if_slow
from jaxft._checkpoints._writer import decline, follow, is_saved, lead, write
from jaxft._checkpoints._written import wait_while_written
from jaxft._errors import CannotRestore, ConfigurationError

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
        self._saver: SaverLock | None = None
        self._saving = 0  # the step that the thread saves
        self._saves = 0  # so many were begun
        self._synced = 0  # so many of their files are on the disk
        self._damaged: dict[int, _marks.Seen] = {}  # by step, what this group could not read

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
            with said_if_slow(self._folder, "list them"):
                return _folder.steps(self._folder)
        except NotADirectoryError as error:
            raise ConfigurationError(
                f"the folder of the checkpoints, {str(self._folder)!r}, is a file, or is in one. Name a folder on a "
                "disk that all groups share."
            ) from error
        except OSError as error:
            raise CannotRestore(
                f"The folder of the checkpoints, {str(self._folder)!r}, cannot be read: {type(error).__name__}: "
                f"{error}. Training does not start from scratch beside it. Let this process read it: check its "
                "permissions, and the disk."
            ) from error

    def reading(self, timeout_s: float) -> contextlib.AbstractContextManager[bool]:
        """Yield whether this process should read a checkpoint, or leave that to others that are reading now.

        Args:
            timeout_s: how long to wait for the others before this process reads itself.
        """
        return turn(self._folder, timeout_s=timeout_s) if self.steps() else contextlib.nullcontext(True)

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

        A checkpoint that cannot be read, or whose digest differs from that of the saved state, is skipped with a
        warning, and the one before it is tried. It is marked, unless the fault may be that of this host, so that
        whichever group saves next replaces it, or does not count it. Unfinished checkpoints are ignored.

        Args:
            like: a state with the wanted structure, shapes, dtypes and shardings; its values do not matter. The
                shardings may differ from those of the saved state, and so may the order of the leaves and what has
                no leaves.
            job: the job's name.
            settings: the settings that must equal those of the checkpoint, by name; None: nothing is compared.
            changed: names of settings that were changed on purpose; with "job", another job's checkpoint is accepted.
            group: the processes that hold the state; all of them call this, and get the same step. None: this one.

        Returns:
            The step and its state; None if there is no checkpoint.

        Raises:
            ConfigurationError: the checkpoint is of another job, of another model, or of other settings; the message
                says what differs. Or no checkpoint can hold such a state.
            CannotRestore: there are checkpoints, and none can be read. Training never starts from scratch by itself.
        """
        check_changed(changed)
        check_storable(like)
        group = group or OneProcess()
        found: list[int] = []
        unreadable = ""  # why a host cannot read the files of one
        for step in self._newest_first(group):
            found.insert(0, step)
            with _marks.held(self._folder / str(step)) as folder:
                try:
                    restored = self._read(step, like, job, settings, changed, group)
                except Damaged as error:
                    _log.warning("Skipped the checkpoint %s: %s", self._folder / str(step), error)
                    unreadable = self._remember(step, folder, group) or unreadable
                    continue
                if folder is not None and not group.rank:
                    _marks.unmark(folder)
                return restored
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

    def _remember(self, step: int, folder: int | None, group: Group) -> str:
        """Note that a checkpoint is damaged, and mark it for all groups unless the fault may be that of a host.

        Returns:
            Why a host of the group cannot read its files; "" if all can.
        """
        here = _marks.unreadable(folder, group.got_on, rank=group.rank, size=group.size)
        anywhere = group.agree("read the files of the damaged checkpoint", here)
        if folder is None:
            return anywhere
        if not anywhere and not group.rank:
            _marks.mark(folder)
        with contextlib.suppress(OSError):  # the folder is gone: then there is nothing to replace
            self._damaged[step] = _marks.seen(folder)
        return anywhere

    def _newest_first(self, group: Group) -> Iterator[int]:
        """The steps that have a complete checkpoint, as rank 0 sees them."""
        mine = iter(reversed(self.steps()))
        while (step := group.choose("the checkpoint to read", next(mine, -1) + 1) - 1) >= 0:
            yield step

    def _read(
        self,
        step: int,
        like: Any,
        job: str,
        settings: Mapping[str, str] | None,
        changed: Collection[str],
        group: Group,
    ) -> Restored:
        folder = self._folder / str(step)
        manifest = agreed(group, "read the manifest", lambda: read_manifest(folder, step, group))
        if manifest.job != job and "job" not in changed:
            raise ConfigurationError(
                f"The checkpoint {str(folder)!r} is of the job {manifest.job!r}, but this is the job {job!r}. "
                "Use a separate folder for each job; or, to continue from this checkpoint, add 'job' to `changed`."
            )
        self._compare(manifest, folder, settings, changed)
        if differs := difference(manifest.leaves, leaves_of(like)):
            raise ConfigurationError(
                f"The checkpoint {str(folder)!r} is of a different state: {differs}. Restore with the model and the "
                "optimizer that it was saved with, or choose another folder."
            )
        place = agreed(group, "read the state", lambda: read(folder, like, group))
        leaves = place()
        # In the order in which they were saved, which is that of the fields of the state's classes then.
        by_name = dict(zip((name for name, _ in leaves_of(like)), leaves, strict=True))
        names = [name for name, _ in manifest.leaves]
        found = digest_like(manifest.digest, names, [by_name[name] for name in names])
        agreed(group, "compare the digest", lambda: _check_digest(found, manifest.digest))
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Restored(step, state, manifest.history, manifest.digest, folder, manifest.settings)

    def _compare(
        self,
        manifest: Manifest,
        folder: Path,
        settings: Mapping[str, str] | None,
        changed: Collection[str],
    ) -> None:
        """Refuse a checkpoint with other settings. Settings known only to the caller's step are compared later."""
        if settings is None:
            return
        if manifest.settings is None:
            _log.warning(
                "The checkpoint %s does not store the settings that it was saved with, so it is restored without "
                "comparing them.",
                folder,
            )
            return
        users = {name: value for name, value in manifest.settings.items() if name not in LATER}
        if differing := differences(users, settings, changed):
            raise ConfigurationError(refusal(str(folder), differing, manifest.step, changed))

    def save(
        self,
        step: int,
        state: Any,
        *,
        job: str,
        history: int,
        settings: Mapping[str, str] | None = None,
        group: Group | None = None,
        digest: Callable[[], PendingDigest] | None = None,
    ) -> None:
        """Start to save a state; return as soon as the state may be donated.

        The caller waits for one copy to host memory; the writing goes on in the background. A failure is logged as an
        error, and the next due step is saved. While the previous save is still running, a new one is skipped with a
        warning. A step that already has a checkpoint, not known to be damaged, is not saved again.

        Args:
            step: the number of committed steps behind the state.
            state: a pytree of arrays.
            job: the job's name.
            history: a number that `restore` returns.
            settings: the settings that a run that continues from here is compared with, by name.
            group: the processes that hold the state; all of them call this, and each writes what it holds. None: this
                one.
            digest: if there are several, starts the digest of the state on its devices.

        Raises:
            ConfigurationError: two leaves would have the same name on disk, or there is no leaf.
        """
        check_storable(state)
        group = group or OneProcess()
        if group.choose("skip the save", self._thread is not None and self._thread.is_alive()):
            if group.rank == 0:
                _log.warning(
                    "Skipped the checkpoint of step %d: that of step %d is still being written. If this happens "
                    "often, save less often (every_steps is %d) or to a faster disk.",
                    step,
                    self._saving,
                    self._every_steps,
                )
            return
        if self._thread is not None:
            self._thread.join()  # rank 0 has heard from it that its part is written
        kept = None if settings is None else dict(settings)
        manifest = Manifest(step, job, history, "", leaves_of(state), kept)
        self._saving, self._saves = step, self._saves + 1
        saver, last = None, self._saver is not None
        if group.rank == 0 and not last:  # else it has the lock, for the last state
            saver = self._lock(step, job)
            saver.begin()
        # A daemon: a disk that hangs must not keep the process alive. `finish` waits for the thread.
        writing = self._writing(manifest, state, group, digest)
        self._thread = start_thread(self._write, writing, step, saver, last, name="jaxft-checkpoint")

    def _writing(
        self, manifest: Manifest, state: Any, group: Group, digest: Callable[[], PendingDigest] | None
    ) -> Callable[[], None]:
        """Copy a state; return what writes the copy, or what reports why there is none."""
        folder, keep, known, number = self._folder, self._keep, dict(self._damaged), self._saves
        # All processes compute it together, so no failure of one may keep it from beginning.
        pending = None if digest is None or group.size == 1 else digest()

        def find_damaged() -> frozenset[int]:
            return _marks.damaged(folder, known)

        try:
            if group.size == 1:
                whole = HostCopy(state)
                return lambda: write(folder, manifest, whole, keep=keep, find_damaged=find_damaged)
            assert pending is not None, "the state of several processes comes with its digest"
            parts = PartsCopy(state, pending)
        except Exception as caught:
            # Logged as any failed save. Most likely the host has no memory for the copy.
            error = caught.with_traceback(None)  # which holds what was copied
            return lambda: decline(group, number, error)
        if group.rank:
            return lambda: follow(folder, manifest.step, parts, group, number)
        return lambda: lead(folder, manifest, parts, group, number, keep=keep, find_damaged=find_damaged)

    def _write(self, writing: Callable[[], None], step: int, saver: SaverLock | None, last: bool) -> None:
        """The background thread. `last`: the loop has ended, so no step is due any more."""
        try:
            with _calls.told(self._got_on):
                writing()
        except BaseException as error:  # the top of a thread; a failed save must not end training
            then = "Training goes on, and the next due step is saved"
            if last:
                then = "It is the last state: unless another group saves it, no checkpoint has it"
            _log.error(
                "The checkpoint of step %d was not written to %s: %s: %s. %s; check that the disk is mounted, has "
                "space, and is writable, and that the host has memory for a copy of the state.",
                *(step, self._folder, type(error).__name__, error, then),
            )
        finally:
            if saver is not None:
                saver.close()

    def saves_last(self, step: int, *, job: str, writer: bool, timeout_s: float) -> bool:
        """Return whether this process should save the last state; if another group does, wait for that first.

        Args:
            step: the number of committed steps behind the state.
            job: the job's name.
            writer: whether this group saves the states that are due, and this one if the disk has no locks.
            timeout_s: for how long nothing may have been written meanwhile.
        """
        head_start_s = 0.0 if writer or not self.due(step) else HEAD_START_S
        saver = self._saver = self._lock(step, job, head_start_s=head_start_s)
        saver.begin()
        if not saver.wait(step, timeout_s):
            return False
        return writer if saver.error is not None else not saver.needless

    def _lock(self, step: int, job: str, *, head_start_s: float = 0.0) -> SaverLock:
        folder, known = self._folder, dict(self._damaged)

        def there() -> bool:
            return is_saved(folder, step, job, _marks.damaged(folder, known))

        return SaverLock(folder, there, head_start_s=head_start_s)

    def finish(self, timeout_s: float) -> None:
        """Wait for the running save, if any, as long as its bytes move; log a warning if it does not get on.

        Args:
            timeout_s: for how long nothing may have been written.
        """
        self._finish(timeout_s)
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _finish(self, timeout_s: float) -> None:
        thread = self._thread
        if thread is None or not thread.is_alive():
            return

        def say(waited_s: float, megabytes: float) -> None:
            waits = waited_s, self._saving, megabytes
            _log.info("waiting %.0f s for the checkpoint of step %d: %.0f MB are written", *waits)

        if not wait_while_written(thread, self._folder, timeout_s, say, got_on=lambda: self._synced):
            _log.warning(
                "The checkpoint of step %d is not complete, and nothing of it was written for %.0f s: if this "
                "process ends now, it is lost. Check the disk of %s.",
                *(self._saving, timeout_s, self._folder),
            )

    def _got_on(self) -> None:
        self._synced += 1


def _check_digest(read: str, saved: str) -> None:
    if read != saved:
        raise Damaged(f"the state read has the digest {read}, but the state saved had {saved}")
