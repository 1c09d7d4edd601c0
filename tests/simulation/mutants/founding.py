"""How a job begins and continues, and whose state is the truth."""

from dataclasses import replace
from typing import Any

from jaxft_protocol.coordinator import founding, sessions
from jaxft_protocol.messages import HistoryId
from jaxft_protocol.replica import sessions as replica_sessions

from ..saving import Saving
from ._mutant import mutant
from ._settings import FIVE_ALIKE, FOUR_THAT_HEAL_SLOWLY

# ---- founding, resuming ----


@mutant(founding, "_founders_are_gone")
def _a_fresh_state_becomes_the_truth(gone: Any) -> Any:
    """When no group is left that holds the frontier, the next group that comes founds the job again (TorchFT)."""

    def mutated(draft: Any) -> bool:
        return gone(draft) or (draft.job.quorum is None and not draft.holders())

    return mutated


@mutant(founding, "_resume")
def _resumes_while_holders_are_there(resume: Any) -> Any:
    """A job resumes from a checkpoint as soon as it has no quorum, though groups hold the frontier."""

    def mutated(draft: Any, frontier: Any) -> None:
        if draft.job.quorum is None and draft.job.orphaned_s is None:
            draft.update(orphaned_s=-1e9)
        resume(draft, replace(frontier, holders=frozenset()))

    return mutated


@mutant(founding, "_resume", "wipe", "kill")
def _a_job_never_begins_again(resume: Any) -> Any:
    """All groups die before there is a checkpoint, and those with its first state wait forever."""

    def mutated(draft: Any, frontier: Any) -> None:
        for group in draft.select(lambda group: founding.has_joined(group) and not group.step):
            draft.put(group, history=HistoryId(0))
        resume(draft, frontier)

    return mutated


@mutant(Saving, "is_first_state", "wipe", "kill", differ=True)
def _any_first_state_is_the_jobs(_original: Any) -> Any:
    """A group begins the job again from another first state than the others have trained on."""
    return lambda _self, _begun: True


@mutant(
    founding,
    "_finish",
    die_at_end=True,
    saves_every=1000,
    brings=0,
    faults=(),
    storm_s=1.0,
    raises=False,
    flaky=0.0,
)
def _the_end_is_lost_with_the_last_who_holds_it(_finish: Any) -> Any:
    """A group that dies at the last step, when another has ended its loop and left, waits for that state forever."""
    return lambda _draft: None


@mutant(
    sessions,
    "_too_few_are_left",
    names=tuple(f"group-{number}" for number in range(5)),
    spares=frozenset({"group-4"}),
    min_replicas=4,
    die_at_end=True,
    faults=(),
    storm_s=1.0,
    raises=False,
    flaky=0.0,
)
def _those_who_come_back_at_the_end_wait_for_those_who_do_not(left: Any) -> Any:
    """Only spares that are left end a job, not groups that died at the last step and healed from the finished."""
    return lambda draft: not draft.select(lambda group: not group.spare) and left(draft)


# ---- whose state is the truth ----


@mutant(founding, "newer_may_come", "amnesia", "kill", "break")
def _the_first_to_come_founds_at_once(_newer: Any) -> Any:
    """A coordinator without memory begins with the state of the first group that comes (TorchFT)."""
    return lambda _draft, _candidates: False


@mutant(founding, "is_newer", "amnesia", "isolate", min_replicas=1, founding_wait_s=0.02)
def _a_newer_state_that_comes_late_is_healed_back(_newer: Any) -> Any:
    """A group that holds a later step of this run than the job has to heal to the job's."""
    return lambda _job, _message: False


@mutant(founding, "_truth", "amnesia", "flip", **FIVE_ALIKE, shard_s=0.08)
def _the_lowest_name_is_the_truth(_truth: Any) -> Any:
    """Of states at one step the lowest name's is taken, whatever the others hold."""
    return lambda best: min(best, key=lambda group: int(group.name.rpartition("-")[2]))


@mutant(replica_sessions, "join_or_wait", "amnesia", "kill", **FOUR_THAT_HEAL_SLOWLY)
def _one_that_left_the_checkpoint_to_others_founds_the_job(join_or_wait: Any) -> Any:
    """A group that has a fresh state because others have read joins a coordinator that knows nothing of the job."""

    def mutated(draft: Any) -> None:
        prepared = draft.replica.prepared
        if prepared is not None:
            draft.update(prepared=replace(prepared, heals_only=False))
        join_or_wait(draft)
        draft.update(prepared=prepared)

    return mutated


@mutant(sessions, "_pin", "flip", "kill", **FIVE_ALIKE, shard_s=0.4, heartbeat_timeout_s=1.0, storm_s=3.0)
def _donors_are_not_compared(pin: Any) -> Any:
    """A joiner gets its donors before these have reported their digests."""

    def mutated(draft: Any, joiner: Any, step: Any, stripes: Any) -> None:
        pin(draft, joiner, step, stripes)
        joiner = draft.job.groups[joiner.name]
        if joiner.pinned_step is not None:
            serving = [donor for donor, _ in stripes]
            sessions._tell_heal(draft, joiner, serving)  # pyright: ignore[reportPrivateUsage]

    return mutated
