"""Planted bugs: small changes of one function each, which the simulation must find.

`python -m tests.simulation.mutants` prints in how many seeds each is found, and by which invariant.
Many are faults that others have had: TorchFT's are marked with its name.
"""

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxft_protocol.coordinator import (
    assign,
    bounds,
    digests,
    donors,
    draft,
    draining,
    durable,
    founding,
    machine,
    progress,
    quorums,
    raising,
    sessions,
    terms,
)
from jaxft_protocol.coordinator.job import Group, GroupPhase, Job, Persist
from jaxft_protocol.messages import HealId, HistoryId, QuorumId, Release, Stripe
from jaxft_protocol.ranks import follower, lanes, leader
from jaxft_protocol.ranks.messages import Outcome, StopWork, Verdict
from jaxft_protocol.replica import healing as replica_healing
from jaxft_protocol.replica import machine as replica
from jaxft_protocol.replica import quorums as replica_quorums
from jaxft_protocol.replica import sessions as replica_sessions
from jaxft_protocol.replica import state as r
from jaxft_protocol.values import changed

from jaxft._launch._die_with_parent import bind_to

from .campaign import Finding, run_seeds
from .coordinator import Life
from .exchange import Hub
from .process import Process
from .trainer import Trainer

SEEDS = 1500
# Settings in which rare faults meet.
_FIVE_ALIKE: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(5)),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "differ": False,
    "one_differs": False,
    "leaves_early": False,
    "starts_s": 0.2,
    "founding_wait_s": 0.02,
    "flaky": 0.0,
}
_FOUR_THAT_DIFFER: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(4)),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "differ": True,
    "one_differs": False,
    "leaves_early": False,
    "flaky": 0.0,
}
_THREE_OF_TWO_RANKS: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(3)),
    "ranks": (2, 2, 2),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "one_differs": False,
    "leaves_early": False,
    "unreadable": None,
    "drift": 0.0,
    "flaky": 0.0,
}
_RANKS_THAT_DIFFER: dict[str, Any] = _THREE_OF_TWO_RANKS | {"ranks": (1, 2, 4)}
_FOUR_THAT_HEAL_SLOWLY: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(4)),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "one_differs": False,
    "leaves_early": False,
    "founding_wait_s": 0.02,
    "flaky": 0.0,
    "saves_every": 1,
    "fetch_s": 6.0,
    "storm_s": 3.0,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    sentence: str
    owner: Any
    attribute: str
    wrap: Callable[[Any], Any]
    kinds: tuple[str, ...] = ()  # of faults, all others left out: for one that is too rare among all of them
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])  # to the setting of each seed, too
    seeds: tuple[int, ...] = ()  # where even that is too rare: these alone

    def among(self, seeds: int) -> Sequence[int]:
        """Where to look for it, if so many seeds are to be run."""
        return self.seeds or range(seeds)

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        original = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, self.wrap(original))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


MUTANTS: list[Mutant] = []


def mutant(
    owner: Any, attribute: str, *kinds: str, seeds: tuple[int, ...] = (), **changes: Any
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function that takes the original and returns what stands in its place; its docstring tells why."""

    def register(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = wrap.__name__.removeprefix("_").replace("_", " ")
        sentence = " ".join((wrap.__doc__ or "").split())
        MUTANTS.append(Mutant(name, sentence, owner, attribute, wrap, kinds, changes, seeds))
        return wrap

    return register


# ---- drains and pauses ----


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
def _the_boundary_forgets_the_drain(step_down: Any) -> Any:
    """A drained group takes part in the next step too."""
    return lambda draft: None


@mutant(sessions, "finish", "drain")
def _goodbye_comes_before_the_last_step_is_applied(finish: Any) -> Any:
    """The coordinator does not wait for the Leave of a drained group."""

    def mutated(draft: Any) -> None:
        leaving = [group for group in draft.job.groups.values() if group.phase is GroupPhase.LEAVING]
        draft.put_all(leaving, draining=False)
        finish(draft)

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


# ---- the decision ----


@mutant(replica_quorums, "cast")
def _commit_decided_per_group(cast: Any) -> Any:
    """A group applies as soon as its own exchange has succeeded (TorchFT)."""

    def mutated(draft: Any, vote: Any) -> None:
        cast(draft, vote)
        if vote.ok and draft.replica.phase is r.GroupPhase.VOTED:
            draft.enter(r.GroupPhase.APPLYING, commit_heard=True)

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
    """The votes that said ok are kept when a step is tried again."""
    return lambda draft, retries=0: replace(fresh(draft, retries), ok=draft.job.ballot.ok)


@mutant(quorums, "_bit")
def _positions_in_string_order(bit: Any) -> Any:
    """Votes are counted by positions in the order of strings, where group-10 comes before group-9 (TorchFT)."""

    def mutated(draft: Any, name: str) -> int:
        return 1 << sorted(draft.job.positions).index(name) if name in draft.job.positions else 0

    return mutated


@mutant(quorums, "natural_key")
def _members_in_string_order(natural_key: Any) -> Any:
    """Members stand in a quorum in the order of strings (TorchFT)."""
    return lambda name: name


@mutant(digests, "odd_ones")
def _the_majority_of_states_is_ignored(odd_ones: Any) -> Any:
    """States that differ are not compared."""
    return lambda given: ()


@mutant(draft.Draft, "distrust")
def _the_odd_one_is_believed(distrust: Any) -> Any:
    """A group whose state is corrupt is evicted, and taken back with the state that it holds."""
    return lambda self, name, incarnation: None


@mutant(Trainer, "_finds_nonfinite")
def _one_group_alone_finds_what_is_not_finite(finds: Any) -> Any:
    """A group looks at what it has contributed, and not at the means."""

    def mutated(self: Trainer, step: int, *, replayed: bool) -> bool:
        return self.world.setting.bad_shard(step) in self.computed[step]

    return mutated


@mutant(Trainer, "_finds_nonfinite")
def _a_replay_applies_a_step_that_was_skipped(finds: Any) -> Any:
    """A group that joins does not look at the means that it replays."""
    return lambda self, step, *, replayed: not replayed and finds(self, step, replayed=False)


@mutant(quorums, "vote")
def _only_the_last_vote_says_that_the_means_are_not_finite(vote: Any) -> Any:
    """What an earlier vote has said of the means is forgotten, and the last one says nothing of them."""

    def mutated(draft: Any, group: Group, message: Any) -> None:
        vote(draft, group, replace(message, nonfinite=""))

    return mutated


# ---- the quorum ----


@mutant(quorums, "commit")
def _a_fast_path_without_min_replicas(commit: Any) -> Any:
    """After a commit the job goes on with however many are left (TorchFT)."""

    def mutated(draft: Any, quorum: Any) -> None:
        least = draft.job.min_replicas
        draft.update(min_replicas=0)
        commit(draft, quorum)
        draft.update(min_replicas=least)

    return mutated


@mutant(quorums, "_install")
def _a_retry_keeps_the_quorum_id(install: Any) -> Any:
    """The quorum of a retry has the id of the one that failed."""

    def mutated(draft: Any, members: Any, *, again: bool, announce: bool) -> Any:
        if again and draft.job.last_quorum_id:
            draft.update(last_quorum_id=QuorumId(draft.job.last_quorum_id - 1))
        return install(draft, members, again=again, announce=announce)

    return mutated


@mutant(assign, "after_loss")
def _shards_dealt_anew_in_a_retry(after_loss: Any) -> Any:
    """Those who keep their shards are dealt others beside them."""

    def mutated(total: int, members: Any, held: Any) -> Any:
        fresh = assign.at_boundary(total, members)
        return {name: tuple(sorted({*held.get(name, ()), *fresh[name]})) for name in members}

    return mutated


@mutant(assign, "after_loss")
def _shards_of_the_dead_are_left_out(after_loss: Any) -> Any:
    """A step that is tried again is summed without the shards of those who died."""
    return lambda total, members, held: {name: held.get(name, ()) for name in members}


@mutant(replica_quorums, "new_quorum")
def _a_joiner_one_step_behind(new_quorum: Any) -> Any:
    """A group takes part in a quorum though it lacks the last sum."""

    def mutated(draft: Any, quorum: Any) -> None:
        new_quorum(draft, quorum)
        if draft.replica.phase is r.GroupPhase.FOLLOWING and draft.replica.quorum is quorum:
            draft.enter(r.GroupPhase.WORKING, vote=None)

    return mutated


@mutant(quorums, "_has_gathered", "kill", "break")
def _each_loss_makes_a_quorum(has_gathered: Any) -> Any:
    """A step is tried again at the first of many losses, and at each that follows."""
    return lambda draft, quorum: True


# ---- healing ----


@mutant(donors, "candidates", "kill", "crash", **_FOUR_THAT_DIFFER)
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
def _an_equal_step_number_proves_enough(holds: Any) -> Any:
    """A group that comes with the number of the frontier's step is taken for one that holds it (TorchFT)."""

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
    """A joiner says that it is ready as soon as it has the snapshot, before it has the sums since then."""

    def mutated(draft: Any, heal_id: HealId, number: Any) -> None:
        frontier = draft.replica.frontier_step
        if frontier is not None and number < frontier:
            number = frontier
        caught_up(draft, heal_id, number)

    return mutated


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
def _the_end_is_lost_with_the_last_who_holds_it(finish: Any) -> Any:
    """A group that dies at the last step, when another has ended its loop and left, waits for that state forever."""
    return lambda draft: None


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


# ---- long steps, slow links, pauses ----


@mutant(Hub, "waits")
def _an_exchange_waits_no_longer_than_its_timeout(waits: Any) -> Any:
    """The deadline of an exchange runs from a member's own start, though others still compute."""

    def mutated(self: Hub, attempt: Any, process: Any) -> None:
        waits(self, attempt, process)
        timeout_s = process.clock.real(self.world.setting.exchange_timeout_s)
        self.world.after(timeout_s, self.time_out, attempt, process, process.token)

    return mutated


@mutant(progress, "heard")
def _a_pause_between_two_steps_is_taken_for_a_hang(heard: Any) -> Any:
    """A group that evaluates is evicted and blamed, as one whose step hangs."""
    return lambda draft, group, message: heard(draft, group, replace(message, away=False))


@mutant(
    progress,
    "heard",
    exchange_s=3.0,
    slow_from_s=1.5,
    heartbeat_timeout_s=0.5,
    storm_s=6.0,
    flaky=0.0,
    faults=(),
    slow="",
    drift=0.0,
    brings=0,
    raises=False,
)
def _bytes_that_move_do_not_count(heard: Any) -> Any:
    """A group over whose slow link the sum still comes is evicted when others hold it."""
    return lambda draft, group, message: heard(draft, group, replace(message, moves=False))


@mutant(progress, "_tell_if_all_have", "link")
def _nobody_hears_that_all_have_computed(tell: Any) -> Any:
    """Time never begins to count in an exchange, so a link that carries nothing is never found out."""
    return lambda draft, quorum: None


@mutant(progress, "tell_over", "hang", min_replicas=2, heartbeat_timeout_s=0.5, storm_s=5.0)
def _nobody_hears_that_a_quorum_has_ended(tell: Any) -> Any:
    """Members wait in the exchange of a quorum that is no more, and do nothing else that is asked of them."""
    return lambda draft, quorum: None


@mutant(progress, "_spared")
def _a_group_that_is_needed_is_stood_aside(spared: Any) -> Any:
    """A group that is away loses its place though the job cannot go on without it."""
    return lambda draft, found, living: found


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
    """Where each member has one shard, a survivor gives what it has computed for its old place at a new one."""

    def mutated(self: Trainer, step: Any, shards: Any) -> list[int]:
        if self.world.setting.shards is not None:
            return contributes(self, step, shards)
        return [self.first[step]] if step in self.first else contributes(self, step, shards)

    return mutated


# ---- whose state is the truth ----


@mutant(founding, "newer_may_come", "amnesia", "kill", "break")
def _the_first_to_come_founds_at_once(newer: Any) -> Any:
    """A coordinator without memory begins with the state of the first group that comes (TorchFT)."""
    return lambda draft, candidates: False


@mutant(founding, "is_newer", "amnesia", "isolate", min_replicas=1, founding_wait_s=0.02)
def _a_newer_state_that_comes_late_is_healed_back(newer: Any) -> Any:
    """A group that holds a later step of this run than the job has to heal to the job's."""
    return lambda job, message: False


@mutant(founding, "_truth", "amnesia", "flip", **_FIVE_ALIKE, shard_s=0.08)
def _the_lowest_name_is_the_truth(truth: Any) -> Any:
    """Of states at one step that of the lowest name is taken, whatever the others hold."""
    return lambda best: min(best, key=lambda group: int(group.name.rpartition("-")[2]))


@mutant(replica_sessions, "join_or_wait", "amnesia", "kill", **_FOUR_THAT_HEAL_SLOWLY)
def _one_that_left_the_checkpoint_to_others_founds_the_job(join_or_wait: Any) -> Any:
    """A group that has a fresh state because others have read joins a coordinator that knows nothing of the job."""

    def mutated(draft: Any) -> None:
        prepared = draft.replica.prepared
        if prepared is not None:
            draft.update(prepared=replace(prepared, heals_only=False))
        join_or_wait(draft)
        draft.update(prepared=prepared)

    return mutated


@mutant(sessions, "_pin", "flip", "kill", **_FIVE_ALIKE, shard_s=0.4, heartbeat_timeout_s=1.0, storm_s=3.0)
def _donors_are_not_compared(pin: Any) -> Any:
    """A joiner gets its donors before these have reported their digests."""

    def mutated(draft: Any, joiner: Any, step: Any, stripes: Any) -> None:
        pin(draft, joiner, step, stripes)
        joiner = draft.job.groups[joiner.name]
        if joiner.pinned_step is not None:
            serving = [donor for donor, _ in stripes]
            sessions._tell_heal(draft, joiner, serving)  # pyright: ignore[reportPrivateUsage]

    return mutated


# ---- liveness ----


@mutant(progress, "late")
def _a_heartbeat_is_taken_for_progress(hung: Any) -> Any:
    """A group whose training hangs stays in the quorum as long as its heart beats (TorchFT)."""
    return lambda draft: []


@mutant(Process, "_step")
def _a_session_that_fails_as_it_greets_ends_in_silence(step: Any) -> Any:
    """An error ends the session's thread: it neither dials again nor times out, and its group waits for it."""

    def mutated(self: Process, event: Any) -> None:
        ended = self.replica.phase is r.Phase.GREETING and type(event) in (r.Disconnected, r.Tick)
        if not ended:
            step(self, event)

    return mutated


@mutant(replica_quorums, "applied")
def _applied_again_after_a_reconnect(applied: Any) -> Any:
    """What was applied is not forgotten, and done once more after the next Welcome."""

    def mutated(draft: Any, number: Any) -> None:
        vote, heard = draft.replica.vote, draft.replica.commit_heard
        applied(draft, number)
        draft.update(vote=draft.replica.vote or vote, commit_heard=draft.replica.commit_heard or heard)

    return mutated


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
    """A group infers from the frontier's number that its own vote was the one that counted."""

    def mutated(draft: Any, message: Any) -> None:
        vote = draft.replica.vote
        if vote is not None and vote.ok and message.frontier_step == vote.step + 1:
            message = replace(message, frontier_quorum_id=vote.quorum_id)
        welcome(draft, message)

    return mutated


@mutant(Life, "fenced")
def _a_fenced_coordinator_tells_all_the_same(fenced: Any) -> Any:
    """An old coordinator whose record was refused sends what followed it."""

    def mutated(self: Life) -> None:
        self.tell_unwritten()

    return mutated


# ---- faults that the simulation has found in the cores, planted once more ----


@mutant(Job, "empty")
def _a_founding_is_dropped_at_a_restart(empty: Any) -> Any:
    """A job that a coordinator remembers is empty as long as nothing was committed and no group is there."""

    def mutated(job: Job) -> bool:
        return not job.groups and (job.frontier is None or job.frontier.founding)

    return property(mutated)


@mutant(durable, "emptied")
def _ids_of_a_forgotten_job_begin_anew(emptied: Any) -> Any:
    """A job that all have left before a commit forgets which quorum ids it has given out."""
    return lambda job: replace(emptied(job), last_quorum_id=QuorumId(0))


@mutant(progress, "UNMEASURED_PATIENCE", "coordinator", "stuck", "kill")
def _no_end_of_patience_before_a_step_was_measured(patience: Any) -> Any:
    """After a restart one that hangs before its vote is waited for without an end."""
    return float("inf")


@mutant(progress, "_waiting_joiner_s", "stuck", "kill")
def _one_alone_that_has_computed_may_hang(waiting: Any) -> Any:
    """A joiner that is ready counts as one that waits only while none has computed."""
    return lambda draft: None if draft.job.ballot.computed else waiting(draft)


@mutant(sessions, "heal_failed", "kill", "crash", "stall", seeds=(1702,))
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
def _a_place_is_given_up_that_was_never_taken(end: Any) -> Any:
    """Each group that leaves as finished counts as one that has taken part: places become -1."""

    def mutated(draft: Any, group: Group) -> None:
        draft.update(places=draft.job.places - 1, ended=draft.job.frontier.step)

    return mutated


@mutant(bounds, "forget", "kill", "crash", keeps_bytes=0)
def _those_who_are_here_are_forgotten_too(forget: Any) -> Any:
    """A bound on what is remembered of groups that are gone takes in those that are here."""

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
def _after_an_error_a_job_begins_from_nothing(begun_again: Any) -> Any:
    """A job on which the coordinator has failed forgets its last record."""
    return lambda job, now_s: durable.new(job.name, job.options)


@mutant(replica_sessions, "read_after_all")
def _a_checkpoint_is_left_to_readers_that_are_dead(read: Any) -> Any:
    """A group that has left the checkpoint to others goes on waiting when these are gone."""
    return lambda draft, why: None


@mutant(replica_sessions, "waiting", seeds=(52217,))
def _a_state_that_no_group_may_take_is_waited_with_forever(waiting: Any) -> Any:
    """A group goes on waiting with the first state of a founding undone, though no group is left to heal from."""
    return lambda draft, reason, held, fresh: waiting(draft, reason, held=held, fresh=False)


# ---- late messages ----


@mutant(sessions, "_is_late", seeds=(582725,), die_at_end=False)
def _a_late_greeting_takes_the_place_of_a_later_one(is_late: Any) -> Any:
    """A Hello that the network held back ends the stream that its process has opened since."""
    return lambda known, message: False


# ---- a committed state that is near ----


@mutant(sessions, "_nothing_was_done", seeds=(107615, 147508))
def _founders_that_leave_end_a_job_that_has_not_begun(nothing: Any) -> Any:
    """The last member that leaves as finished ends the job, also before the first commit."""
    return lambda draft: False


@mutant(founding, "newer_may_come", seeds=(119372,))
def _fresh_groups_of_one_quorum_wait_for_no_other(newer: Any) -> Any:
    """As many fresh groups as a quorum had begin at once, whichever they are."""

    def mutated(draft: Any, candidates: Any) -> bool:
        members = max(group.members for group in candidates)
        fresh = not any(group.history for group in candidates)
        return newer(draft, candidates) and not (fresh and 1 < members <= len(candidates))

    return mutated


@mutant(founding, "newer_may_come", seeds=(152330,), ranks=())
def _one_that_is_busy_holds_nothing(newer: Any) -> Any:
    """Fresh groups begin although one holds a committed state, and is busy or has just lost its connection."""

    def mutated(draft: Any, candidates: Any) -> bool:
        draft.update(committed_seen_s=None)
        return newer(draft, candidates)

    return mutated


@mutant(quorums, "_relieve", seeds=(755900, 852546))
def _a_spare_that_stands_by_again_keeps_the_digest_it_joined_with(relieve: Any) -> Any:
    """A relieved spare has a newer step beside the digest of its first state, so the job's states seem to differ."""

    def mutated(draft: Any, quorum: Any) -> None:
        before = draft.job.groups
        relieve(draft, quorum)
        for group in draft.select(lambda group: group.phase is GroupPhase.READY):
            draft.put(group, digest=before[group.name].digest)

    return mutated


@mutant(progress, "measure", seeds=(126928,))
def _the_time_in_which_one_hung_is_what_steps_take(measure: Any) -> Any:
    """A step that counted late, because one hung before its vote, makes the job as patient."""

    def mutated(draft: Any) -> None:
        draft.update(ballot=changed(draft.job.ballot, last_voted_s=draft.now_s))
        measure(draft)

    return mutated


@mutant(raising, "_may_compute")
def _a_step_that_fails_in_every_group_is_tried_forever(may_compute: Any) -> Any:
    """The job never halts for a shard that no group can read."""
    return lambda draft, group: True


@mutant(quorums, "_relieve")
def _a_relieved_spare_keeps_its_first_digest(relieve: Any) -> Any:
    """A spare that stands by again is known by its newest step and by the digest that it joined with."""

    def mutated(draft: Any, quorum: Any) -> None:
        known = {name: group.digest for name, group in draft.job.groups.items()}
        relieve(draft, quorum)
        for group in draft.select(lambda group: group.digest != known[group.name]):
            draft.put(group, digest=known[group.name])

    return mutated


# ---- terms and ids of several lives ----


@mutant(terms, "turns_away", "coordinator", "break")
def _a_clock_that_is_behind_is_believed(turns_away: Any) -> Any:
    """A coordinator without a store has the term that its clock tells, whatever its groups have met."""

    def mutated(draft: Any, session: Any, message: Any) -> bool:
        draft.update(term=draft.job.options.term)
        return False

    return mutated


@mutant(durable, "restored")
def _heal_ids_restart_at_one(restored: Any) -> Any:
    """After a crash heal ids begin again at one."""
    return lambda saved, options, now_s: replace(restored(saved, options, now_s), last_heal_id=HealId(0))


# ---- groups of several processes ----


@mutant(leader, "_looked", "rank", "numb", **_THREE_OF_TWO_RANKS)
def _a_verdict_before_all_ranks_have_the_means(looked: Any) -> Any:
    """Rank 0 goes on as soon as its own part of the exchange is done, and all ranks apply."""

    def mutated(state: Any, now_s: float) -> Any:
        if state.own is not None:
            done = Outcome(state.what, Verdict())
            told = tuple(replace(rank, outcomes=rank.outcomes or (done,)) for rank in state.ranks)
            state = changed(state, ranks=told)
        return looked(state, now_s)

    return mutated


@mutant(leader, "_verdict", "rank", "link", **_THREE_OF_TWO_RANKS)
def _a_vote_with_the_failed_exchange_of_one_rank(verdict: Any) -> Any:
    """Rank 0 votes by its own part of the exchange, whatever the others report."""
    return lambda state, own: replace(own, stopped=state.redirected)


@mutant(follower, "take", **_THREE_OF_TWO_RANKS)
def _a_follower_is_one_order_behind(take: Any) -> Any:
    """A rank takes an order only once the next one has come."""

    def mutated(state: Any, kind: Any, about: str) -> Any:
        return take(state, kind, about) if len(state.orders) > 1 else (state, None)

    return mutated


@mutant(follower, "step", **_THREE_OF_TWO_RANKS)
def _the_newest_order_first(step: Any) -> Any:
    """A rank that falls behind takes the newest order, and then the older ones."""

    def mutated(state: Any, event: Any) -> Any:
        match event:
            case follower.Heard(message) if not isinstance(message, StopWork):
                return changed(state, orders=(message, *state.orders)), ()
            case _:
                return step(state, event)

    return mutated


@mutant(leader, "_looked", "rank", "link", "numb", **_THREE_OF_TWO_RANKS)
def _the_others_are_not_stopped(looked: Any) -> Any:
    """A rank whose exchange goes on waits though another rank's has failed."""

    def mutated(state: Any, now_s: float) -> Any:
        after, effects = looked(changed(state, stops=True), now_s)
        return changed(after, stops=state.stops), effects

    return mutated


@mutant(leader, "step", **(_THREE_OF_TWO_RANKS | {"exchange_s": 8.0, "storm_s": 8.0, "faults": ()}))
def _what_other_ranks_move_does_not_count(step: Any) -> Any:
    """A group whose rank 0 waits for the slower lanes of another rank seems to hang."""

    def mutated(state: Any, event: Any, now_s: float) -> Any:
        after, effects = step(state, event, now_s)
        return after, tuple(effect for effect in effects if not isinstance(effect, leader.GetsOn))

    return mutated


@mutant(lanes, "rank_of", **_RANKS_THAT_DIFFER)
def _lanes_mixed_up(rank_of: Any) -> Any:
    """A group asks the wrong rank of another group for its lanes."""
    return lambda lane, ranks, count: ranks - 1 - rank_of(lane, ranks, count)


@mutant(lanes, "span_of", **_RANKS_THAT_DIFFER)
def _a_rank_takes_the_lanes_of_the_next(span_of: Any) -> Any:
    """Ranks are counted from 1 where lanes are dealt, and from 0 where they are asked for."""
    return lambda rank, ranks, count: span_of((rank + 1) % ranks, ranks, count)


@mutant(lanes, "spans", **_RANKS_THAT_DIFFER)
def _spans_as_in_the_own_group(spans: Any) -> Any:
    """A group does not see that one of its ranks meets several ranks of a larger group."""
    return lambda own, sizes, count: (own,)


@mutant(sessions, "dismiss", "double", **_THREE_OF_TWO_RANKS)
def _two_leaders(dismiss: Any) -> Any:
    """When a second process leads a group, the first one is not told, and goes on with its ranks."""

    def mutated(draft: Any, group: Any, reason: str, *, may_return: bool) -> None:
        if "another process has joined" in reason:
            sessions.remove(draft, group, reason)
        else:
            dismiss(draft, group, reason, may_return=may_return)

    return mutated


# ---- the table ----


def hunt(name: str, seeds: int) -> tuple[str, list[Finding]]:
    """Look for one mutant in so many seeds. What the cores do without it as well is not due to it."""
    (found,) = (mutant for mutant in MUTANTS if mutant.name == name)
    with found.planted():
        findings = run_seeds(found.among(seeds), kinds=found.kinds, changes=found.changes).findings
    return name, [finding for finding in findings if is_due_to(found, finding)]


def is_due_to(found: Mutant, finding: Finding) -> bool:
    """Whether nothing is found in this seed without the planted bug."""
    return not run_seeds([finding.seed], kinds=found.kinds, changes=found.changes).findings


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a mutant was not found."""
    parser = argparse.ArgumentParser("python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args(arguments)
    mutants = {mutant.name: mutant for mutant in MUTANTS if options.only in mutant.name}
    missed = 0
    say(f"{'mutant':48}  found in  first seed  by")
    for name, findings in _hunts(list(mutants), options.seeds, options.jobs):
        missed += not findings
        by = Counter(finding.invariant for finding in findings).most_common(3)
        words = ", ".join(f"{what} ({number})" for what, number in by) or "NOT FOUND"
        first = findings[0].seed if findings else "-"
        among = len(mutants[name].among(options.seeds))
        say(f"{name:48}  {len(findings):4d}/{among:<4d} {first!s:>10}  {words}")
    say(f"{len(mutants) - missed} of {len(mutants)} mutants found")
    return 1 if missed else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _hunts(names: list[str], seeds: int, jobs: int) -> Iterator[tuple[str, list[Finding]]]:
    if jobs == 1:
        yield from (hunt(name, seeds) for name in names)
        return
    with concurrent.futures.ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=bind_to,
        initargs=(os.getpid(),),
    ) as pool:
        for future in [pool.submit(hunt, name, seeds) for name in names]:
            yield future.result()


if __name__ == "__main__":
    # The pool's processes import this module by its name; the registry must be the same one here.
    from tests.simulation.mutants import main as run

    sys.exit(run())
