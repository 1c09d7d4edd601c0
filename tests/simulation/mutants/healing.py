"""Healing, and a committed state that is near."""

from typing import Any

from jaxft_protocol.coordinator import donors, founding, progress, quorums, raising, sessions
from jaxft_protocol.coordinator.job import Group, GroupPhase
from jaxft_protocol.messages import HealId, Release, Stripe
from jaxft_protocol.replica import healing as replica_healing
from jaxft_protocol.replica import machine as replica
from jaxft_protocol.values import changed

from ._mutant import mutant
from ._settings import FOUR_THAT_DIFFER

# ---- healing ----


@mutant(donors, "candidates", "kill", "crash", **FOUR_THAT_DIFFER)
def _an_uncommitted_donor(candidates: Any) -> Any:
    """Any group that has joined may donate, whatever it holds (TorchFT)."""

    def mutated(draft: Any) -> list[Group]:
        held = candidates(draft)
        return held and draft.select(lambda group: group.phase is not GroupPhase.PRESENT)

    return mutated


@mutant(donors, "chosen")
def _all_donors_keep_the_same_stripe(chosen: Any) -> Any:
    """The donors of a heal copy the same part of the state, so that the rest is lost when they train on."""

    def mutated(draft: Any, joiner: Any, able: Any) -> Any:
        stripes = chosen(draft, joiner, able)
        return [(donor, Stripe(0, max(2, len(stripes)))) for donor, _ in stripes]

    return mutated


@mutant(sessions, "_holds_frontier")
def _an_equal_step_number_proves_enough(_holds: Any) -> Any:
    """A group that comes with the number of the frontier's step is taken for its holder (TorchFT)."""

    def mutated(draft: Any, group: Group) -> bool:
        return draft.job.frontier is not None and group.step == draft.job.frontier.step

    return mutated


@mutant(replica, "_heard")
def _pins_released_too_early(heard: Any) -> Any:
    """A donor that may let go of one heal's state lets go of all."""

    def mutated(draft: Any, message: Any) -> None:
        if type(message) is Release:
            for heal_id in sorted(draft.replica.pins - {message.heal_id}):
                heard(draft, Release(heal_id))
        heard(draft, message)

    return mutated


@mutant(replica_healing, "caught_up_to")
def _a_snapshot_is_taken_for_the_frontier(caught_up: Any) -> Any:
    """A joiner reports that it is ready as soon as it has the snapshot, before it has the sums since then."""

    def mutated(draft: Any, heal_id: HealId, number: Any) -> None:
        frontier = draft.replica.frontier_step
        if frontier is not None and number < frontier:
            number = frontier
        caught_up(draft, heal_id, number)

    return mutated


# ---- a committed state that is near ----


@mutant(sessions, "_nothing_was_done", seeds=(1304,))
def _founders_that_leave_end_a_job_that_has_not_begun(_nothing: Any) -> Any:
    """The last member that leaves as finished ends the job, also before the first commit."""
    return lambda _draft: False


@mutant(founding, "newer_may_come", "amnesia", "isolate", seeds=(6797,))
def _fresh_groups_of_one_quorum_wait_for_no_other(newer: Any) -> Any:
    """As many fresh groups as a quorum had begin at once, whichever they are."""

    def mutated(draft: Any, candidates: Any) -> bool:
        members = max(group.members for group in candidates)
        fresh = not any(group.history for group in candidates)
        return newer(draft, candidates) and not (fresh and 1 < members <= len(candidates))

    return mutated


@mutant(quorums, "_relieve", seeds=(755900, 852546))
def _a_spare_that_stands_by_again_keeps_the_digest_it_joined_with(relieve: Any) -> Any:
    """A relieved spare has a newer step with the digest of its first state, so the job's states seem to differ."""

    def mutated(draft: Any, quorum: Any) -> None:
        before = draft.job.groups
        relieve(draft, quorum)
        for group in draft.select(lambda group: group.phase is GroupPhase.READY):
            draft.put(group, digest=before[group.name].digest)

    return mutated


@mutant(progress, "measure", "hang", "stuck", seeds=(988,))
def _the_time_in_which_one_hung_is_what_steps_take(measure: Any) -> Any:
    """A step that counted late, because one hung before its vote, makes the job as patient."""

    def mutated(draft: Any) -> None:
        draft.update(ballot=changed(draft.job.ballot, last_voted_s=draft.now_s))
        measure(draft)

    return mutated


@mutant(raising, "_may_compute")
def _a_step_that_fails_in_every_group_is_tried_forever(_may_compute: Any) -> Any:
    """The job never halts for a shard that no group can read."""
    return lambda _draft, _group: True


@mutant(quorums, "_relieve")
def _a_relieved_spare_keeps_its_first_digest(relieve: Any) -> Any:
    """A spare that stands by again is known by its newest step and by the digest that it joined with."""

    def mutated(draft: Any, quorum: Any) -> None:
        known = {name: group.digest for name, group in draft.job.groups.items()}
        relieve(draft, quorum)
        for group in draft.select(lambda group: group.digest != known[group.name]):
            draft.put(group, digest=known[group.name])

    return mutated
