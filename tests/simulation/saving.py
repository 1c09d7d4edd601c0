"""Checkpoints: which one a group begins with, who writes the next, and how that goes.

The writer of a state is the first member of the quorum that has committed it. A checkpoint takes time. In a group of
several processes each rank writes its part, and it is published once all have: if anything fails, there is none.
Before a group ends, the job's last state is saved, by one group while the others wait.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxft_protocol.messages import HistoryId, NewQuorum, QuorumId, Step
from jaxft_protocol.replica import state as r

from .truth import Violation

if TYPE_CHECKING:
    from .trainer import Trainer
    from .world import World

# Of a checkpoint from before the coordinator's first life.
OLD_ROOT = -1
COMMON_ROOT = 0  # of groups that begin with equal states
_OLD_HISTORY = HistoryId(999)
LAST_AGAIN_S = 0.05  # how often a group looks whether the last state is saved


@dataclass(frozen=True, slots=True)
class Checkpoint:
    state: tuple[QuorumId, ...]
    history: HistoryId
    root: int = 0
    skipped: frozenset[int] = frozenset()
    old: bool = False  # from before the coordinator's first life
    edits: tuple[tuple[int, int], ...] = ()
    missing: int = 0  # parts that were not written

    @staticmethod
    def from_before(steps: int) -> "Checkpoint":
        state = tuple(QuorumId(-1 - step) for step in range(steps))
        return Checkpoint(state, _OLD_HISTORY, OLD_ROOT, old=True)


class Saving:
    """A part of a group's training thread."""

    def __init__(self, process: "Trainer", world: "World") -> None:
        self.writer = ""  # of the state that this group holds; "": not known
        self._process = process
        self._world = world

    # ---- the first state ----

    def prepare(self) -> None:
        """Begin with a fresh state, or with the newest checkpoint."""
        process, world = self._process, self._world
        checkpoints = world.checkpoints
        fresh = process.replica.frontier_held and world.random() < 0.5
        if checkpoints and checkpoints[-1].old and not world.calm:
            fresh = fresh or world.random() < 0.5
        heals_only = bool(checkpoints) and not fresh and self._others_read()
        self.bring(read=not fresh and not heals_only, heals_only=heals_only)

    def bring(self, *, read: bool, heals_only: bool = False) -> None:
        """Say with which state it comes: the newest checkpoint's, if it reads one."""
        process, world, saved = self._process, self._world, 0
        checkpoints = world.checkpoints
        if checkpoints and read:
            newest = checkpoints[-1]
            if newest.missing:
                raise Violation(
                    "a checkpoint is whole", f"{newest.missing} parts of {len(newest.state)} are missing"
                )
            process.root, process.history, saved = newest.root, list(newest.state), newest.history
            process.skipped, process.edits = newest.skipped, dict(newest.edits)
        if not checkpoints and (begun := world.begun) is not None and self.is_first_state(begun):
            saved = begun.history
            world.sometimes.note("begins again")
        step, digest = Step(len(process.history)), process.told_digest()
        setting = world.setting
        shards, weight = setting.shards, setting.weight_of(process.incarnation)
        process.crew.bring()
        least, history = setting.min_replicas, HistoryId(saved)
        process.post(r.Prepared(step, digest, {}, least, history, process.spare, heals_only, shards, weight))

    def _others_read(self) -> bool:
        """Whether this group leaves it to others to read the checkpoint: of a job that continues, while others do."""
        newest = self._world.checkpoints[-1]
        others = self._world.processes.values()
        read = [other for other in others if not other.dead and other.replica.history == newest.history]
        # Without a draw of numbers, so that what else a seed stands for stays as it was.
        return bool(read) and bool(self._process.replica.frontier_step) and self._process.incarnation % 2 == 0

    def is_first_state(self, begun: Checkpoint) -> bool:
        return begun.root == self._process.root and not self._process.flipped

    def note_beginning(self, quorum: NewQuorum) -> None:
        """The first of the quorum notes with which state the job begins, until there is a checkpoint."""
        process = self._process
        if quorum.members[0].group == process.name and not process.history and not process.flipped:
            self._world.begun = Checkpoint((), quorum.history, process.root, frozenset())

    # ---- writing ----

    def committed(self, quorum: NewQuorum | None) -> None:
        """The group has applied a step that this quorum has committed; None: it has healed."""
        process, world = self._process, self._world
        self.writer = "" if quorum is None else self.writer_of(quorum)
        step = len(process.history)
        if self.writer:
            world.truth.check_writer(self.writer, (step, process.history[-1]))
        if self.writer != process.name or process.flipped or step % world.setting.saves_every:
            return
        self._write()

    def writer_of(self, quorum: NewQuorum) -> str:
        return quorum.members[0].group

    def _write(self) -> None:
        """Write the group's current state."""
        process, setting = self._process, self._world.setting
        copy = Checkpoint(
            tuple(process.history),
            process.replica.job_history,
            process.root,
            process.skipped,
            edits=tuple(process.edits.items()),
            missing=process.crew.size,
        )
        if not setting.saving_s:
            self._publish(copy, 0)
            return
        world = self._world
        times = sorted(world.random() * setting.saving_s for _ in range(process.crew.size))
        fails = not world.calm and world.random() < setting.saving_fails
        ends = self._failed if fails else self._part_written
        for left, seconds in enumerate(reversed(times)):
            world.after(seconds, ends, copy, left)

    def _failed(self, _copy: Checkpoint, _left: int) -> None:
        self._world.sometimes.note("checkpoint failed")

    def _part_written(self, copy: Checkpoint, left: int) -> None:
        if self._process.dead and not self._process.over:
            self._world.sometimes.note("died as it saved")
        elif self.may_publish(left):
            self._publish(copy, left)

    def may_publish(self, left: int) -> bool:
        """Whether a checkpoint is complete, of which `left` parts are still to be written."""
        return not left

    def _publish(self, copy: Checkpoint, left: int) -> None:
        checkpoints = self._world.checkpoints
        if not checkpoints or checkpoints[-1].old or len(copy.state) > len(checkpoints[-1].state):
            checkpoints.append(replace(copy, missing=left))

    # ---- the end ----

    def ends_loop(self) -> None:
        """Leave, once the last state is saved."""
        process, world = self._process, self._world
        if not world.setting.saves_last or process.flipped:
            self._leave()
            return
        if process.away_until_s < float("inf"):
            process.away, process.away_until_s = True, float("inf")
            self._until_saved()

    def _until_saved(self) -> None:
        """Save the last state, unless another group does."""
        process, world = self._process, self._world
        if process.replica.failure is not None or self._last_is_saved():
            process.away_until_s = world.now_s
            self._leave()
            process.look_again()
            return
        if self.may_save_last(world.last_saver):
            world.last_saver = process
            self._write()
        elif world.last_saver is not process:
            world.one_has_finished(process.name)
        world.after(LAST_AGAIN_S, process.act, self._until_saved)

    def _leave(self) -> None:
        self._process.leave(finished=True)
        self._world.one_has_finished(self._process.name)

    def may_save_last(self, saver: "Trainer | None") -> bool:
        """Whether the group that saves the last state, if any, is gone."""
        return saver is None or saver.dead

    def _last_is_saved(self) -> bool:
        checkpoints = self._world.checkpoints
        return (
            bool(checkpoints)
            and not checkpoints[-1].old
            and len(checkpoints[-1].state) >= len(self._process.history)
        )
