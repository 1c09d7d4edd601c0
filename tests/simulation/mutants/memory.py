"""The coordinator's memory, and the terms and ids of its several lives."""

from dataclasses import replace
from typing import Any

from jaxft_protocol.coordinator import durable, machine, terms
from jaxft_protocol.coordinator.job import Job, Persist
from jaxft_protocol.messages import HealId, QuorumId
from jaxft_protocol.replica import sessions as replica_sessions

from ..coordinator import Life
from ._mutant import mutant

# ---- the coordinator's memory ----


@mutant(machine, "step")
def _told_before_it_is_durable(step: Any) -> Any:
    """A decision is sent first and written down afterwards."""

    def mutated(job: Job, event: Any, now_s: float) -> Any:
        after, effects = step(job, event, now_s)
        return after, tuple(sorted(effects, key=lambda effect: isinstance(effect, Persist)))

    return mutated


@mutant(durable, "restored")
def _the_frontier_is_not_restored(restored: Any) -> Any:
    """After a crash the coordinator remembers ids and settings, and not how far the job was."""
    return lambda saved, options, now_s: replace(restored(saved, options, now_s), frontier=None)


@mutant(durable, "restored")
def _quorum_ids_restart_at_zero(restored: Any) -> Any:
    """After a crash quorum ids begin again (TorchFT)."""
    return lambda saved, options, now_s: replace(restored(saved, options, now_s), last_quorum_id=QuorumId(0))


@mutant(replica_sessions, "welcome")
def _terms_are_not_looked_at(welcome: Any) -> Any:
    """A group follows a coordinator that another one has replaced."""
    return lambda draft, message: welcome(draft, replace(message, term=max(message.term, draft.replica.term)))


@mutant(replica_sessions, "welcome")
def _a_welcome_is_taken_for_the_decision(welcome: Any) -> Any:
    """A group infers from the frontier's number that its own vote counted."""

    def mutated(draft: Any, message: Any) -> None:
        vote = draft.replica.vote
        if vote is not None and vote.ok and message.frontier_step == vote.step + 1:
            message = replace(message, frontier_quorum_id=vote.quorum_id)
        welcome(draft, message)

    return mutated


@mutant(Life, "fenced")
def _a_fenced_coordinator_tells_all_the_same(_fenced: Any) -> Any:
    """An old coordinator whose record was refused sends what followed it."""

    def mutated(self: Life) -> None:
        self.tell_unwritten()

    return mutated


# ---- terms and ids of several lives ----


@mutant(terms, "turns_away", "coordinator", "break")
def _a_clock_that_is_behind_is_believed(_turns_away: Any) -> Any:
    """A coordinator without a store has the term of its clock, whatever its groups have met."""

    def mutated(draft: Any, _session: Any, _message: Any) -> bool:
        draft.update(term=draft.job.options.term)
        return False

    return mutated


@mutant(durable, "restored")
def _heal_ids_restart_at_one(restored: Any) -> Any:
    """After a crash heal ids begin again at one."""
    return lambda saved, options, now_s: replace(restored(saved, options, now_s), last_heal_id=HealId(0))
