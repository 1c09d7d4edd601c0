"""One group's work with the job's checkpoints: restore one, compare it with the step, and save new ones."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxft_protocol.messages import NewQuorum
from jaxft_protocol.names import done_again

from jaxft._arrays._device_digest import PendingDigest
from jaxft._checkpoints import Checkpoints, Restored, _beginning
from jaxft._checkpoints._manifest import LATER, differences, refusal
from jaxft._checkpoints._parts import check_storable
from jaxft._errors import ConfigurationError
from jaxft._programs._programs import Programs
from jaxft._ranks._ranks import Directing, Ranks
from jaxft._replica._config import GroupConfig
from jaxft._replica._held_state import HeldState
from jaxft._transport._sockets import Abort

_log = logging.getLogger("jaxft")


# Between two tries to save the last state.
_PAUSE_S = 5.0


class Saving:
    """The training thread owns it."""

    def __init__(self, config: GroupConfig, session: Directing, ranks: Ranks, held: HeldState) -> None:
        self.history = config.history  # of the checkpoint that the first state came from; 0: none
        # The first state is fresh although the job may have a checkpoint: other groups hold a newer state.
        self.left_to_others = False
        self._config = config
        self._session = session
        self._ranks = ranks
        self._group = Together(ranks, session, held)
        self._held = held
        self._restored: Restored | None = None
        self._changed: Collection[str] = ()
        self._asked = False  # the program has called `restore`
        self._frontier_step: int | None = None  # the job's frontier when this group joined
        self._settings: Mapping[str, str] = {}  # of the step, saved with each checkpoint

    # ---- restoring ----

    def restore(self, state: Any, changed: Collection[str]) -> Any:
        """Return the state of the newest checkpoint, or `state` (see `Manager.restore`)."""
        self._changed, self._asked = changed, True
        self._check_state(state, shapes=True)
        self._frontier_step, held = self._session.frontier  # rank 0 alone knows them
        if self._ranks.decide("restore: heal instead of reading a checkpoint", value=held):
            _log.info("[jaxft %s] reads no checkpoint: it heals from the job's groups", self._config.group)
            self.left_to_others = True  # they may be dead without being known to be
            return state
        return self.read(state)

    def check_folder(self) -> None:
        """Refuse to begin with a folder that takes no checkpoints, or holds some that the program has not asked for.

        Raises:
            ConfigurationError: the folder cannot be written to, or is another job's; or there are checkpoints, and
                `restore` was not called.
        """
        checkpoints = self._config.checkpoints
        if checkpoints is None:
            return
        checkpoints.claim(self._config.job, self._changed, self._group)
        if self._asked:
            return
        if found := checkpoints.steps():
            raise ConfigurationError(
                f"The folder {str(checkpoints.folder)!r} holds checkpoints up to step {found[-1]}, but "
                f"the program of group {self._config.group!r} has not restored one: it would begin again at step "
                f"{self._held.step}, and mix its checkpoints with those. Call `state = manager.restore(state)` "
                "inside the `with` block and before the first step, or name another folder for another run. Nothing "
                "was written."
            )

    def read(self, state: Any) -> Any:
        """Return the state of the newest checkpoint; `state` if there is none."""
        assert self._config.checkpoints is not None
        found = self._config.checkpoints.restore(
            state,
            job=self._config.job,
            settings=self._config.compared_settings,
            changed=self._changed,
            group=self._group,
        )
        group, self.left_to_others = self._config.group, False
        if found is None:
            _log.info("[jaxft %s] found no checkpoint: starts with the state that was passed", group)
            return state
        frontier = self._frontier_step or 0
        behind = frontier - found.step
        again = f"; the job had committed {frontier}: {done_again(behind)}" if behind > 0 else ""
        _log.info("[jaxft %s] restored step %d from %s%s", group, found.step, found.folder, again)
        self._restored, self.history, self._held.step = found, found.history, found.step
        return found.state

    def _check_state(self, state: Any, *, shapes: bool = False) -> None:
        """Refuse a state that no checkpoint can hold, before training and not at its first save."""
        if self._config.checkpoints is not None:
            check_storable(state, shapes=shapes)

    def check(self, present: Mapping[str, str]) -> None:
        """Compare the step with the checkpoint's step, and keep it for later checkpoints.

        Raises:
            ConfigurationError: they differ in something that was not changed on purpose, or no checkpoint can hold
                the state.
        """
        if self._held.programs is not None:
            self._check_state(self._held.programs.unflatten(self._held.leaves))
        self._settings = {name: value for name, value in present.items() if name in LATER}
        if self._restored is None or self._restored.settings is None:
            return
        saved = {name: value for name, value in self._restored.settings.items() if name in LATER}
        now = {name: present[name] for name in saved if name in present}
        if differing := differences(saved, now, self._changed):
            folder = str(self._restored.folder)
            raise ConfigurationError(refusal(folder, differing, self._held.step, self._changed))

    def warn_of_no_history(self) -> None:
        """Say at once what else shows only after all groups have died: the state of a step may be of any run."""
        if self.history or not self._held.step:
            return
        committed, _ = self._session.frontier  # rank 0 alone knows it
        if committed:
            _log.warning(
                "[jaxft %s] was given step=%d and no history: if no group is left that holds the state of job %r, "
                "which has committed %d steps, the job does not go on from this one. Save `manager.history` with "
                "each state, and pass it: jaxft.Manager(step=..., history=...)",
                *(self._config.group, self._held.step, self._config.job, committed),
            )

    # ---- a job without a checkpoint ----

    def history_of(self, digest: int) -> int:
        """The history of the first state: of its checkpoint, or of a job without a checkpoint that began with this
        digest.

        0 if the state is fresh.
        """
        checkpoints = self._config.checkpoints
        if self.history or checkpoints is None:
            return self.history
        begun = None if self._ranks.rank else _beginning.read(checkpoints.folder)  # rank 0 reports for all
        if begun is None or begun.job != self._config.job:
            return 0
        if (begun.step, begun.digest) == (self._held.step, digest):
            return begun.history
        _log.info(
            "[jaxft %s] comes with another state than the one with which job %r began: if all groups are lost "
            "before the first checkpoint, the job cannot begin again from it. Make the initial state from a seed",
            self._config.group,
            self._config.job,
        )
        return 0

    def note_beginning(self, quorum: NewQuorum) -> None:
        """Before the first step of a fresh state: let one group note with which state the job begins."""
        checkpoints, held = self._config.checkpoints, self._held
        if checkpoints is None or held.made or self.history:
            return
        if quorum.members[0].group != self._config.group:
            return
        digest = held.digest()  # of all ranks together
        if self._ranks.rank:
            return
        begun = _beginning.Beginning(self._config.job, quorum.history, held.step, digest)
        try:
            with self._session.in_step(now=False):
                _beginning.write(checkpoints.folder, begun)
        except OSError as error:
            _log.warning(
                "[jaxft %s] cannot write to the folder of the checkpoints, %r: %s. Training begins, but if all "
                "groups are lost before the first checkpoint, the job cannot begin again. Check that the disk is "
                "mounted, has space, and is writable",
                self._config.group,
                str(checkpoints.folder),
                error,
            )

    # ---- saving ----

    def save_if_due(self, programs: Programs, members: tuple[str, ...]) -> None:
        checkpoints = self._config.checkpoints
        if checkpoints is not None and checkpoints.due(self._held.step) and self._writes(members):
            with self._session.in_step(now=False):
                self._save(checkpoints, programs.unflatten(self._held.leaves))

    def save_last(self, programs: Programs) -> str:
        """Save the state at the end of this group's loop, or wait until another group has.

        Returns:
            Why it is not on the disk; "" if it is, or if there is nothing to save.
        """
        checkpoints, timeout_s = self._config.checkpoints, self._config.failure_timeout_s
        if checkpoints is None or not self._held.made:
            return ""
        if any(leaf.is_deleted() for leaf in self._held.leaves):
            return "other code consumed the state before the `with` block ended (a function with donate_argnums?)"
        checkpoints.finish(timeout_s)
        checkpoints.last_comes(timeout_s / 2)
        deadline_s = time.monotonic() + timeout_s
        while True:
            failure = self._group.agree("save the last state", self._saved_now(checkpoints, programs))
            again = bool(failure) and time.monotonic() < deadline_s
            if not self._ranks.decide("save the last state once more", value=again):
                return failure
            # The disk may have room again, or be back: this group holds the only copy.
            _log.warning(
                "[jaxft %s] the last state, of step %d, is not saved: %s. Tries again for %.0f s",
                *(self._config.group, self._held.step, failure, deadline_s - time.monotonic()),
            )
            time.sleep(min(_PAUSE_S, timeout_s / 10))

    def save_leaving(self, programs: Programs) -> None:
        """Save the state of a group that is drained or stopped, if it writes for the job: it may be the last one."""
        checkpoints, timeout_s = self._config.checkpoints, self._config.failure_timeout_s
        if checkpoints is None or not self._held.made or any(leaf.is_deleted() for leaf in self._held.leaves):
            return
        checkpoints.finish(timeout_s)
        checkpoints.last_comes(timeout_s / 2)
        _log.info("[jaxft %s] saves state %d before it leaves", self._config.group, self._held.step)
        self._saved_now(checkpoints, programs)

    def _saved_now(self, checkpoints: Checkpoints, programs: Programs) -> str:
        """Save the state that is held, and wait for it; return why it is not on the disk."""
        self._save(checkpoints, programs.unflatten(self._held.leaves))
        return checkpoints.finish(self._config.failure_timeout_s)

    def _writes(self, members: tuple[str, ...]) -> bool:
        """Whether this group writes for all: the first of the quorum at this step does."""
        return members[:1] == (self._config.group,)

    def _save(self, checkpoints: Checkpoints, state: Any) -> None:
        checkpoints.save(
            self._held.step,
            state,
            job=self._config.job,
            history=self._session.history,
            settings={**self._settings, **self._config.compared_settings},
            group=self._group,
        )


class Together:
    """The ranks of this group, as checkpoints need them (`_checkpoints._group`)."""

    def __init__(self, ranks: Ranks, session: Directing, held: HeldState) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self._ranks = ranks
        self._session = session
        self._held = held

    def choose(self, what: str, number: int) -> int:
        return self._ranks.choose(what, number)

    def agree(self, what: str, failure: str) -> str:
        with self._ranks.operation(what, Abort()) as operation:
            return operation.settle(failure).failure

    def got_on(self) -> None:
        self._session.got_on()

    def digest(self) -> PendingDigest:
        return self._held.pending_digest()

    def save_begins(self, number: int, folder: str) -> str:
        return self._ranks.save_begins(number, folder)

    def save_ends(self, number: int, failure: str) -> Sequence[str]:
        return self._ranks.save_ends(number, failure)
