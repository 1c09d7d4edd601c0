"""Faults that the simulation has found in the cores, planted once more."""

from dataclasses import replace
from typing import Any

from jaxft_protocol.coordinator import bounds, durable, progress, sessions
from jaxft_protocol.coordinator.job import Group, Job
from jaxft_protocol.messages import HistoryId, QuorumId
from jaxft_protocol.replica import sessions as replica_sessions

from ._mutant import mutant

# ---- faults that the simulation has found in the cores, planted once more ----


@mutant(Job, "empty")
def _a_founding_is_dropped_at_a_restart(_empty: Any) -> Any:
    """A job that a coordinator remembers is empty as long as nothing was committed and no group is there."""

    def mutated(job: Job) -> bool:
        return not job.groups and (job.frontier is None or job.frontier.founding)

    return property(mutated)


@mutant(durable, "emptied")
def _ids_of_a_forgotten_job_begin_anew(emptied: Any) -> Any:
    """A job that all have left before a commit forgets which quorum ids it has given out."""
    return lambda job: replace(emptied(job), last_quorum_id=QuorumId(0))


@mutant(progress, "UNMEASURED_PATIENCE", "coordinator", "stuck", "kill")
def _no_end_of_patience_before_a_step_was_measured(_patience: Any) -> Any:
    """After a restart a group that hangs before its vote is waited for without an end."""
    return float("inf")


@mutant(progress, "_waiting_joiner_s", "stuck", "kill")
def _one_alone_that_has_computed_may_hang(waiting: Any) -> Any:
    """A joiner that is ready counts as waiting only while none has computed."""
    return lambda draft: None if draft.job.ballot.computed else waiting(draft)


@mutant(sessions, "heal_failed", "kill", "crash", "stall", seeds=(1001844,))
def _what_a_joiner_has_healed_to_counts_as_fresh(heal_failed: Any) -> Any:
    """A joiner whose heal fails does not say of which history its state is by now."""
    return lambda draft, group, message: heal_failed(draft, group, replace(message, history=HistoryId(0)))


@mutant(sessions, "join", "coordinator", "kill", "crash")
def _founders_that_do_not_come_back_are_waited_for(join: Any) -> Any:
    """After a restart before the first commit the time of the first join is not noted."""

    def mutated(draft: Any, group: Any, message: Any) -> None:
        first_join_s, frontier = draft.job.first_join_s, draft.job.frontier
        join(draft, group, message)
        if frontier is not None:
            draft.update(first_join_s=first_join_s)

    return mutated


# ---- one job must not stop the others, nor itself for good ----


@mutant(sessions, "_end")
def _a_place_is_given_up_that_was_never_taken(_end: Any) -> Any:
    """Each group that leaves as finished counts as a participant: places become -1."""

    def mutated(draft: Any, _group: Group) -> None:
        draft.update(places=draft.job.places - 1, ended=draft.job.frontier.step)

    return mutated


@mutant(bounds, "forget", "kill", "crash", keeps_bytes=0)
def _those_who_are_here_are_forgotten_too(forget: Any) -> Any:
    """A bound on the memory of groups that are gone takes in groups that are here."""

    def mutated(job: Job) -> Job:
        kept = forget(job)
        if kept is job or kept.frontier is None:
            return kept
        return replace(kept, proven={}, frontier=replace(kept.frontier, holders=frozenset()))

    return mutated


@mutant(bounds, "forget", "kill", "crash", "leave")
def _to_forget_a_group_forgets_the_history(forget: Any) -> Any:
    """With a group that is forgotten goes the history that its state belongs to."""

    def mutated(job: Job) -> Job:
        kept = forget(job)
        return kept if kept is job else replace(kept, history=HistoryId(kept.history + 1))

    return mutated


@mutant(durable, "begun_again")
def _after_an_error_a_job_begins_from_nothing(_begun_again: Any) -> Any:
    """A job on which the coordinator has failed forgets its last record."""
    return lambda job, _now_s: durable.new(job.name, job.options)


@mutant(replica_sessions, "read_after_all")
def _a_checkpoint_is_left_to_readers_that_are_dead(_read: Any) -> Any:
    """A group that has left the checkpoint to others still waits when these are gone."""
    return lambda _draft, _why: None


@mutant(replica_sessions, "waiting", seeds=(52217,))
def _a_state_that_no_group_may_take_is_waited_with_forever(waiting: Any) -> Any:
    """A group still waits with the first state of a founding undone, though no group is left to heal from."""
    return lambda draft, reason, *, held, **_: waiting(draft, reason, held=held, fresh=False)
