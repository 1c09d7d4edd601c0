"""`Checkpoints`: the newest complete state on disk, written beside the training."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxft._arrays._digest import digest
from jaxft._checkpoints import _folder, _orbax
from jaxft._checkpoints._host import HostCopy, key_impls, placed, template, with_keys
from jaxft._checkpoints._manifest import Damaged, Manifest, difference, leaves_of
from jaxft._checkpoints._readers import turn
from jaxft._checkpoints._settings import LATER, check_changed, differences, refusal
from jaxft._checkpoints._writer import write
from jaxft._errors import CannotRestore, ConfigurationError

_log = logging.getLogger("jaxft")


@dataclass(frozen=True, slots=True)
class Restored:
    """What `Checkpoints.restore` found.

    Attributes:
        step: the number of committed steps behind the state.
        state: the state, like the one that was given.
        history: the number that was given to `save`.
        digest: `jaxft.digest` of the state, when it was saved and again when it was read.
        folder: where it lies.
        settings: those of the job that saved it, by name; None if it was saved before these were kept.
    """

    step: int
    state: Any
    history: int
    digest: str
    folder: Path
    settings: Mapping[str, str] | None = None


class Checkpoints:
    """Saves the state of a job every so many steps, and finds the newest one again.

    A lost group heals from its peers; checkpoints are for when none is left. Each is a folder, named by its step,
    that plain Orbax reads. Making one opens and writes nothing.

    Not for several threads: whoever calls the step calls this.

    Args:
        folder: where the job's checkpoints lie, one job's only; on a disk that all groups see, so that any of them
            can write, and all can read. It is made by the first save.
        every_steps: a checkpoint is due at each multiple of it.
        keep: how many complete checkpoints are kept; older ones are deleted once a newer one is complete.

    Raises:
        ConfigurationError: for an argument that cannot be right, or if Orbax is not installed.

    Example:
        >>> import jaxft
        >>> jaxft.Checkpoints("/no/such/folder", every_steps=50).due(100)
        True
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_steps: int = 100, keep: int = 3) -> None:
        if not os.fspath(folder):
            raise ConfigurationError("folder must be a path, not the empty string")
        if "://" in os.fspath(folder):
            raise ConfigurationError(
                f"folder must be a path on a mounted disk, not {os.fspath(folder)!r}: a checkpoint is finished by "
                "renaming its folder, which object stores cannot do"
            )
        if every_steps < 1:
            raise ConfigurationError(f"every_steps must be at least 1, not {every_steps}")
        if keep < 1:
            raise ConfigurationError(f"keep must be at least 1, not {keep}")
        _orbax.require()
        self._folder = Path(folder).absolute()
        self._every_steps = every_steps
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._saving = 0  # the step that the thread saves
        self._damaged: set[int] = set()

    def due(self, step: int) -> bool:
        """Whether the state after `step` committed steps should be saved."""
        return step > 0 and step % self._every_steps == 0

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending. Whether one is damaged shows when it is read."""
        return _folder.steps(self._folder)

    def reading(self, timeout_s: float) -> contextlib.AbstractContextManager[bool]:
        """Yield whether this process should read a checkpoint, or leave that to others that do so right now.

        Args:
            timeout_s: how long to wait for those others; then it should.
        """
        return turn(self._folder, timeout_s=timeout_s) if self.steps() else contextlib.nullcontext(True)

    def restore(
        self,
        like: Any,
        *,
        job: str,
        settings: Mapping[str, str] | None = None,
        changed: Collection[str] = (),
    ) -> Restored | None:
        """Read the newest checkpoint that is whole.

        One that cannot be read, or whose digest is not that of the state that was saved, is skipped with a warning,
        and the one before it is tried. One that was never finished is not looked at.

        Args:
            like: a state with the structure, shapes, dtypes and shardings that are wanted; its values do not
                matter. The shardings need not be those from which it was saved.
            job: the job's name.
            settings: what must be as it was when the checkpoint was saved, by name; None: nothing is compared.
            changed: names of settings that were changed on purpose; "job" among them lets another job's pass.

        Returns:
            The step and its state; None if there is no checkpoint.

        Raises:
            ConfigurationError: the checkpoint is another job's, of another model, or of other settings: what differs
                is said.
            CannotRestore: there are checkpoints, and all are damaged. Training does not start anew by itself.
        """
        check_changed(changed)
        found = self.steps()
        for step in reversed(found):
            try:
                return self._read(step, like, job, settings, changed)
            except Damaged as error:
                self._damaged.add(step)
                _log.warning("checkpoint %s is skipped: %s", self._folder / str(step), error)
        if not found:
            return None
        raise CannotRestore(
            f"All checkpoints in {str(self._folder)!r} are damaged (steps {', '.join(map(str, found))}); the log "
            "says how. Put back a whole one from a backup; or, to start the job anew on purpose, move them away."
        )

    def _read(
        self,
        step: int,
        like: Any,
        job: str,
        settings: Mapping[str, str] | None,
        changed: Collection[str],
    ) -> Restored:
        folder = self._folder / str(step)
        manifest = Manifest.from_json(_or_damaged(_orbax.read_metadata, folder))
        if manifest.step != step:
            raise Damaged(f"it says that it is of step {manifest.step}")
        if manifest.job != job and "job" not in changed:
            raise ConfigurationError(
                f"The checkpoint {str(folder)!r} is of the job {manifest.job!r}, and this is the job {job!r}. "
                "Give each job a folder of its own; or, to go on from it on purpose, add 'job' to `changed`."
            )
        self._compare(manifest, folder, settings, changed)
        if differs := difference(manifest.leaves, leaves_of(like)):
            raise ConfigurationError(
                f"The checkpoint {str(folder)!r} is of another state: {differs}. Restore with the model and the "
                "optimizer that it was saved with, or choose another folder."
            )
        host = _or_damaged(_orbax.read, folder, template(like))
        if (read := digest(with_keys(host, key_impls(like)))) != manifest.digest:
            raise Damaged(f"the digest of what was read is {read}, and of what was saved {manifest.digest}")
        state = placed(host, like)
        return Restored(step, state, manifest.history, manifest.digest, folder, manifest.settings)

    def _compare(
        self,
        manifest: Manifest,
        folder: Path,
        settings: Mapping[str, str] | None,
        changed: Collection[str],
    ) -> None:
        """Refuse a checkpoint of other settings. Those that only the caller's step knows are compared later."""
        if settings is None:
            return
        if manifest.settings is None:
            _log.warning(
                "the checkpoint %s does not say with which settings it was saved: it is restored without comparing "
                "them",
                folder,
            )
            return
        users = {name: value for name, value in manifest.settings.items() if name not in LATER}
        if differing := differences(users, settings, changed):
            raise ConfigurationError(refusal(str(folder), differing, manifest.step, changed))

    def save(
        self, step: int, state: Any, *, job: str, history: int, settings: Mapping[str, str] | None = None
    ) -> None:
        """Begin to save a state, and return as soon as it may be donated.

        The caller waits for one copy to host memory; the writing goes on in the background. If it fails, that is
        logged as an error, and the next due step is saved. If the save before is still running, this one is left
        out, with a warning. A step that has a complete checkpoint already is not saved again.

        Args:
            step: the number of committed steps behind the state.
            state: a pytree of arrays, wholly in this process.
            job: the job's name.
            history: a number that `restore` gives back.
            settings: what a run that goes on from here is compared with, by name.
        """
        if self._thread is not None and self._thread.is_alive():
            _log.warning(
                "the checkpoint of step %d is left out: that of step %d is still being written. If this happens "
                "often, save less often (every_steps is %d) or to a faster disk",
                step,
                self._saving,
                self._every_steps,
            )
            return
        copy = HostCopy(state)
        kept = None if settings is None else dict(settings)
        manifest = Manifest(step, job, history, "", leaves_of(state), kept)
        self._saving = step
        # A daemon: a disk that hangs must not keep the process from ending. `finish` is the orderly way.
        self._thread = threading.Thread(
            target=self._write, args=(manifest, copy), name="jaxft-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, manifest: Manifest, copy: HostCopy) -> None:
        """The background thread."""
        try:
            write(self._folder, manifest, copy, keep=self._keep, damaged=frozenset(self._damaged))
            self._damaged.discard(manifest.step)
        except BaseException as error:  # the top of a thread; training goes on whatever became of this
            _log.error(
                "the checkpoint of step %d was not written to %s: %s: %s. Training goes on, and the next due step "
                "is tried again; check that the disk is there, has room, and may be written to",
                manifest.step,
                self._folder,
                type(error).__name__,
                error,
            )

    def finish(self, timeout_s: float) -> None:
        """Wait until the save that is running, if any, is done; if it takes longer than that, say so in the log."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "the checkpoint of step %d is not complete after %.0f s; if this process ends now, it is lost",
                self._saving,
                timeout_s,
            )


def _or_damaged(read: Callable[..., Any], *arguments: Any) -> Any:
    """What `read` returns; Damaged if it raises."""
    try:
        return read(*arguments)
    except (ConfigurationError, MemoryError):
        raise  # these say nothing about the checkpoint
    except Exception as error:  # Orbax and TensorStore promise no types of errors
        # TensorStore appends all its settings, several pages of them.
        text = str(error)[:400]
        raise Damaged(f"reading it failed with {type(error).__name__}: {text}") from error
