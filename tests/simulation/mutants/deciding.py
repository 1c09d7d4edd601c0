"""The decision on a step, and what one group contributes to it."""

from dataclasses import replace
from typing import Any

from jaxft_protocol.coordinator import digests, draft, progress, quorums
from jaxft_protocol.coordinator.job import Group
from jaxft_protocol.replica import quorums as replica_quorums
from jaxft_protocol.replica import state as r

from ..trainer import Trainer
from ._mutant import mutant

# ---- the decision ----


@mutant(replica_quorums, "cast")
def _commit_decided_per_group(cast: Any) -> Any:
    """A group applies as soon as its own exchange has succeeded (TorchFT)."""

    def mutated(draft: Any, vote: Any) -> None:
        cast(draft, vote)
        if vote.ok and draft.replica.phase is r.Phase.VOTED:
            draft.enter(r.Phase.APPLYING, commit_heard=True)

    return mutated


@mutant(quorums, "_living")
def _a_majority_of_votes_is_enough(living: Any) -> Any:
    """A step counts though a member that lives has not voted yet."""

    def mutated(quorum: Any, ballot: Any) -> int:
        everyone = living(quorum, ballot)
        ok = ballot.ok & everyone
        return ok if 2 * ok.bit_count() > everyone.bit_count() else everyone

    return mutated


@mutant(quorums, "vote")
def _a_stale_vote_counts(vote: Any) -> Any:
    """The id of the quorum that a vote names is not looked at (TorchFT)."""

    def mutated(draft: Any, group: Any, message: Any) -> None:
        quorum = draft.job.quorum
        vote(draft, group, message if quorum is None else replace(message, quorum_id=quorum.quorum_id))

    return mutated


@mutant(progress, "fresh_ballot")
def _votes_outlive_a_quorum(fresh: Any) -> Any:
    """The ok votes are kept when a step is tried again."""
    return lambda draft, retries=0: replace(fresh(draft, retries), ok=draft.job.ballot.ok)


@mutant(quorums, "_bit")
def _positions_in_string_order(_bit: Any) -> Any:
    """Votes are counted by positions in the order of strings, where group-10 comes before group-9 (TorchFT)."""

    def mutated(draft: Any, name: str) -> int:
        return 1 << sorted(draft.job.positions).index(name) if name in draft.job.positions else 0

    return mutated


@mutant(quorums, "natural_key")
def _members_in_string_order(_natural_key: Any) -> Any:
    """Members stand in a quorum in the order of strings (TorchFT)."""
    return lambda name: name


@mutant(digests, "odd_ones")
def _the_majority_of_states_is_ignored(_odd_ones: Any) -> Any:
    """States that differ are not compared."""
    return lambda _given: ()


@mutant(draft.Draft, "distrust")
def _the_odd_one_is_believed(_distrust: Any) -> Any:
    """A group whose state is corrupt is evicted, and taken back with the state that it holds."""
    return lambda _self, _name, _incarnation: None


@mutant(Trainer, "_finds_nonfinite")
def _one_group_alone_finds_what_is_not_finite(_finds: Any) -> Any:
    """A group looks at its contribution, and not at the means."""

    def mutated(self: Trainer, step: int, **_: bool) -> bool:
        return self.world.setting.bad_shard(step) in self.computed[step]

    return mutated


@mutant(Trainer, "_finds_nonfinite")
def _a_replay_applies_a_step_that_was_skipped(finds: Any) -> Any:
    """A group that joins does not look at the means that it replays."""
    return lambda self, step, *, replayed: not replayed and finds(self, step, replayed=False)


@mutant(quorums, "vote")
def _only_the_last_vote_says_that_the_means_are_not_finite(vote: Any) -> Any:
    """The note of an earlier vote on the means is forgotten, and the last vote has none."""

    def mutated(draft: Any, group: Group, message: Any) -> None:
        vote(draft, group, replace(message, nonfinite=""))

    return mutated


# ---- the group's own part ----


@mutant(Trainer, "fingerprint", "break", "detour", "kill")
def _a_vote_loses_its_fingerprint(fingerprint: Any) -> Any:
    """The fingerprint belongs to work that is dropped when shards have been given away."""

    def mutated(self: Trainer, step: Any) -> int | None:
        quorum = self.replica.quorum
        mine = [m.shards for m in quorum.members if m.group == self.name] if quorum is not None else []
        return fingerprint(self, step) if not mine or self.computed[step] <= set(mine[0]) else None

    return mutated


@mutant(Trainer, "contributes", "kill", "crash")
def _what_was_computed_for_an_old_place_is_counted(contributes: Any) -> Any:
    """Where each member has one shard, a survivor gives its work for the old place at a new one."""

    def mutated(self: Trainer, step: Any, shards: Any) -> list[int]:
        if self.world.setting.shards is not None:
            return contributes(self, step, shards)
        return [self.first[step]] if step in self.first else contributes(self, step, shards)

    return mutated
