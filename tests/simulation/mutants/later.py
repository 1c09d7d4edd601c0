"""Edits, checkpoints, the ends of loops, sessions that stand still alone, and many groups."""

from typing import Any

from jaxft_coordinator.shell._jobs import Jobs
from jaxft_protocol.coordinator import draining, quorums, sessions
from jaxft_protocol.coordinator.job import Received
from jaxft_protocol.messages import Heartbeat

from ..saving import Saving
from ..trainer import Trainer
from ._mutant import mutant
from ._settings import ELEVEN, THREE_THAT_EDIT, THREE_THAT_SAVE, of

# ---- edits ----


@mutant(quorums, "_edited_alike", **THREE_THAT_EDIT)
def _edits_are_not_compared(_alike: Any) -> Any:
    """A group that makes another edit of the state than the others commits with them."""
    return lambda _draft, _quorum: True


@mutant(Trainer, "replays_edit", "kill", **(THREE_THAT_EDIT | {"edits_otherwise": ""}))
def _a_replay_forgets_the_edit(_replays: Any) -> Any:
    """A joiner replays the means of a step on the state before the job's edit."""
    return lambda _self, _step: 0


@mutant(quorums, "_voters", "kill", "crash", **(THREE_THAT_EDIT | {"edits_otherwise": ""}))
def _the_dead_count_as_members_without_an_edit(_voters: Any) -> Any:
    """A member that was lost before its vote counts as a member without an edit."""
    return lambda quorum, _ballot: [member.group for member in quorum.members]


# ---- drains ----


@mutant(draining, "ask", "drain", "break")
def _a_drain_is_told_and_forgotten(_ask: Any) -> Any:
    """An operator hears that a group is drained, and nothing remembers it."""
    return lambda _draft, _name, _reason: None


# ---- sessions that stand still alone ----


@mutant(Jobs, "_alive_s", "deaf", "stuck", **of(4, storm_s=3.0))
def _an_answer_to_a_ping_is_taken_for_progress(alive_s: Any) -> Any:
    """A group whose process lives is waited for without an end, though its session is silent."""

    def mutated(self: Jobs) -> Any:
        for name, job in list(self._jobs.items()):
            for session in job.sessions if job.quorum is not None else ():
                self.step(name, Received(session, Heartbeat(moves=True)))
        return alive_s(self)

    return mutated


# ---- checkpoints ----


@mutant(Saving, "may_publish", "wipe", "kill", **(THREE_THAT_SAVE | {"ranks": (2, 2, 2)}))
def _published_before_all_ranks_have_written(_may_publish: Any) -> Any:
    """The first part of a checkpoint that is written makes it a checkpoint."""
    return lambda _self, _left: True


@mutant(Saving, "writer_of", "kill", "crash", "leave", **THREE_THAT_SAVE)
def _the_writer_is_the_first_of_the_quorum_in_force(writer_of: Any) -> Any:
    """A group that has applied late finds another writer of the same state than a group that was quick."""

    def mutated(self: Saving, quorum: Any) -> str:
        return writer_of(self, self._process.replica.quorum or quorum)

    return mutated


@mutant(
    Saving, "may_save_last", **(THREE_THAT_SAVE | {"die_at_end": True, "saving_s": 0.5, "saves_every": 1000})
)
def _the_last_state_is_left_to_a_group_that_has_died(_may_save_last: Any) -> Any:
    """Groups wait for the saver of the last state, though it is gone."""
    return lambda _self, saver: saver is None


# ---- loops that end at different steps ----


@mutant(sessions, "_end", **of(4, early=(0, 0, 0, 3), min_replicas=1, faults=()))
def _the_first_loop_that_ends_ends_the_job(end: Any) -> Any:
    """A member that ends its loop finishes the job for all."""

    def mutated(draft: Any, group: Any) -> None:
        end(draft, group)
        draft.finish()

    return mutated


# ---- many groups ----


@mutant(quorums, "_candidates", "kill", "leave", **ELEVEN)
def _all_spares_are_called_for_one_place(candidates: Any) -> Any:
    """A spare that stands by takes part, whether a place is free or not."""

    def mutated(draft: Any) -> Any:
        places = draft.job.places
        regular = draft.select(lambda group: not group.spare and group.phase.value in ("member", "ready"))
        short = places > len(regular)
        draft.update(places=places + 1 if short else places)
        found = candidates(draft)
        draft.update(places=places)
        return found

    return mutated
