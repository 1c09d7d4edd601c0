"""Who takes part in a step."""

from typing import Any

from jaxft_protocol.coordinator import assign, quorums, sessions
from jaxft_protocol.messages import QuorumId
from jaxft_protocol.replica import quorums as replica_quorums
from jaxft_protocol.replica import state as r

from ._mutant import mutant


@mutant(quorums, "commit")
def _a_fast_path_without_min_replicas(commit: Any) -> Any:
    """After a commit the job continues with however many are left (TorchFT)."""

    def mutated(draft: Any, quorum: Any) -> None:
        least = draft.job.min_replicas
        draft.update(min_replicas=0)
        commit(draft, quorum)
        draft.update(min_replicas=least)

    return mutated


@mutant(quorums, "_install")
def _a_retry_keeps_the_quorum_id(install: Any) -> Any:
    """The quorum of a retry has the id of the quorum that failed."""

    def mutated(draft: Any, members: Any, *, again: bool, announce: bool) -> Any:
        if again and draft.job.last_quorum_id:
            draft.update(last_quorum_id=QuorumId(draft.job.last_quorum_id - 1))
        return install(draft, members, again=again, announce=announce)

    return mutated


@mutant(assign, "after_loss")
def _shards_dealt_anew_in_a_retry(_after_loss: Any) -> Any:
    """Those who keep their shards are dealt others as well."""

    def mutated(total: int, members: Any, held: Any) -> Any:
        fresh = assign.at_boundary(total, members)
        return {name: tuple(sorted({*held.get(name, ()), *fresh[name]})) for name in members}

    return mutated


@mutant(assign, "after_loss")
def _shards_of_the_dead_are_left_out(_after_loss: Any) -> Any:
    """A step that is tried again is summed without the shards of those who died."""
    return lambda _total, members, held: {name: held.get(name, ()) for name in members}


@mutant(replica_quorums, "new_quorum")
def _a_joiner_one_step_behind(new_quorum: Any) -> Any:
    """A group takes part in a quorum though it lacks the last sum."""

    def mutated(draft: Any, quorum: Any) -> None:
        new_quorum(draft, quorum)
        if draft.replica.phase is r.Phase.FOLLOWING and draft.replica.quorum is quorum:
            draft.enter(r.Phase.WORKING, vote=None)

    return mutated


@mutant(quorums, "_has_gathered", "kill", "break")
def _each_loss_makes_a_quorum(_has_gathered: Any) -> Any:
    """A step is tried again at the first of many losses, and at each that follows."""
    return lambda _draft, _quorum: True


@mutant(sessions, "_turn_away", "double")
def _the_newer_process_wins(turn_away: Any) -> Any:
    """A second process puts the first process of its group out, which may hold the only state."""

    def mutated(draft: Any, session: Any, message: Any, known: Any) -> None:
        draft.expel(known, "another process takes part", may_return=False)
        quorums.lose(draft, known.name)
        turn_away(draft, session, message, known)

    return mutated
