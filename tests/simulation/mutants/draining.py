"""Drains and pauses."""

from typing import Any

from jaxft_protocol.coordinator import draining, quorums, sessions
from jaxft_protocol.coordinator.job import GroupPhase
from jaxft_protocol.replica import sessions as of_a_group
from jaxft_protocol.replica.state import Phase

from ._mutant import mutant


@mutant(draining, "ask", "drain")
def _a_drained_group_is_taken_out_at_once(ask: Any) -> Any:
    """A drain takes effect in the middle of a step, as a loss would."""

    def mutated(draft: Any, name: Any, reason: str) -> None:
        ask(draft, name, reason)
        group = draft.job.groups.get(name)
        if group is not None and group.phase is GroupPhase.MEMBER and draft.job.quorum is not None:
            draining._step_down(draft, group)
            quorums.lose(draft, name)

    return mutated


@mutant(draining, "step_down", "drain")
def _the_boundary_forgets_the_drain(_step_down: Any) -> Any:
    """A drained group takes part in the next step too."""
    return lambda _draft: None


@mutant(sessions, "finish", "drain")
def _goodbye_comes_before_the_last_step_is_applied(finish: Any) -> Any:
    """The coordinator does not wait for the Leave of a drained group."""

    def mutated(draft: Any) -> None:
        leaving = [group for group in draft.job.groups.values() if group.phase is GroupPhase.LEAVING]
        draft.put_all(leaving, draining=False)
        finish(draft)

    return mutated


@mutant(of_a_group, "drain", "drain")
def _a_group_that_leaves_its_round_forgets_to_end(drain: Any) -> Any:
    """It takes no further part, and nothing tells its training thread to leave the job."""

    def mutated(draft: Any, *, at_once: bool) -> None:
        if at_once and draft.replica.phase is Phase.WORKING:
            draft.enter(Phase.DRAINED, drains=True)
        else:
            drain(draft, at_once=at_once)

    return mutated


@mutant(quorums, "form", "hold")
def _a_paused_job_forms_its_next_quorum(form: Any) -> Any:
    """The pause ends the quorum, and the next one begins at once."""

    def mutated(draft: Any) -> None:
        paused = draft.job.paused
        draft.update(paused=False)
        form(draft)
        draft.update(paused=paused)

    return mutated
