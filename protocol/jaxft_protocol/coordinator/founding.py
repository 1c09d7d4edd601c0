"""Choose the state from which a job starts, or resumes after all groups that held its frontier are gone.

*Which state.* The one with the highest step; at equal steps, a committed state before a fresh one. Groups with a
committed state of that step must agree on its digest, or a majority of them must: the lowest name proves nothing.
Without a majority the job halts. Fresh states may differ, because each group initializes its own: the most common one
is chosen, then the lowest name. All groups that hold the chosen state are founders.

*When.* Not at once: groups with a newer state may be about to connect, and a coordinator that has lost its store does
not know about them. The best state must have been present for `heartbeat_timeout_s`; or, if it is committed, as many
groups that took part in its history must have joined as its last quorum had members. The job waits for compiling
groups, for up to `join_timeout_s`. If all states are fresh, it waits for a busy group that holds a committed state as
long as that group lives.

*Resuming.* In a job that has committed something, a fresh state never becomes the frontier. But when no group is left
that holds the frontier, groups with a state of the same history (from a checkpoint, or because they took part before)
may continue from the newest of these. This is the only way in which a frontier goes back. The job first waits for
`heartbeat_timeout_s`, so that a holder that has only lost its connection can return. If no group brings such a state,
or too few groups are there, and a member ended its loop at the frontier, the job is finished: it does not matter
which came first, the end of that member or the death of the others. Groups that have finished do not come again, so
the job might never have enough. For the same reason it is finished if those others have healed from the groups that
ended their loop, and are too few (`sessions.finish`).

*Replacing a founding.* A group with a state that was unknown here may still come later. A history is named after the
incarnation that founded it. If the coordinator has lost its store and a fresh group was quicker than the groups with
a history, the fresh founding is undone, as long as nothing has been committed on it; its groups are refused if their
settings are others (`settings`). If a group brings a higher step of the job's own history, it is newer than the job:
all other groups report their states again, and the job resumes from the newest one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from jaxft_protocol.coordinator import digests, halting, progress
from jaxft_protocol.coordinator.draft import Draft, names_text
from jaxft_protocol.coordinator.job import Ballot, Frontier, Group, GroupPhase, Holder, Job
from jaxft_protocol.messages import HistoryId, Join, QuorumId, Step
from jaxft_protocol.names import done_again, natural_key

# After a restart the coordinator waits this many times as long: holders of the frontier may not have noticed yet that
# their old connection is dead.
AFTER_RESTART = 4


def found(draft: Draft) -> None:
    """Found or resume the job if it is time."""
    _note_orphaned(draft)
    job = draft.job
    if job.frontier is not None and not _founders_are_gone(draft):
        _resume(draft, job.frontier)
        return
    if draft.select(lambda group: bool(group.history)):
        draft.update(committed_seen_s=draft.now_s)
    if job.first_join_s is None:
        return
    joined = draft.select(has_joined)
    if not joined:
        forget_settings(draft)
        return
    timed_out = draft.now_s - job.first_join_s >= job.options.join_timeout_s
    if len(joined) < job.min_replicas or (not timed_out and draft.select(compiles)):
        return
    if newer_may_come(draft, joined):
        return
    founders = _go_on_from(draft, joined)
    if founders:
        draft.log(f"founded at step {founders[0].step} by {names_text(founders)}")
    _refuse_other_histories(draft)


def forget_settings(draft: Draft) -> None:
    """All groups that had joined are gone: their settings no longer apply."""
    draft.update(settings=None, total_shards=None, min_replicas=0, first_join_s=None)


def newer_may_come(draft: Draft, candidates: Sequence[Group]) -> bool:
    """Return whether to wait before starting: more groups with the best of these states, or a newer one, may come."""
    best = _best(candidates)
    since_s = min(group.came_s for group in best)
    if not best[0].history and draft.job.committed_seen_s is not None:
        # Its holder is busy, or lost its connection and may redial. After a fresh founding it would be refused.
        since_s = max(since_s, draft.job.committed_seen_s)
    if draft.now_s - since_s >= draft.job.options.newer_may_come_s:
        return False
    if not best[0].history:
        # None of them knows how its quorum ended: another member may have committed a step and continued.
        return True
    # Groups that healed to this state but never took part do not count as earlier members.
    took_part = [g for g in candidates if g.history == best[0].history and g.members]
    # A quorum of one proves nothing: the others may have continued without a slow group.
    return not 1 < max(group.members for group in best) <= len(took_part)


def hold_committed(draft: Draft) -> list[Group]:
    """Return the groups that are busy and hold a committed state of this job, while the job has none."""
    return draft.select(lambda group: compiles(group) and bool(group.history))


def foreign_state(job: Job, group: Group) -> str:
    """Return why a group's state cannot belong to this job; "" if it can."""
    if job.frontier is None or group.history == job.history:
        return ""
    if group.history:
        return (
            f"group {group.name!r} brings step {group.step} of another history of job {job.name!r} (history "
            f"{group.history:016x}; this one is {job.history:016x}): the job has been started again since that "
            "state was saved. Use that run's checkpoints under another job name, or start without them"
        )
    if group.step > job.frontier.step:
        return (
            f"group {group.name!r} holds step {group.step}, but job {job.name!r} is only at step "
            f"{job.frontier.step}: this looks like another run; give it another job name"
        )
    return ""


def is_undone(job: Job, step: Step, history: HistoryId) -> bool:
    """Return whether a state is the first of a founding that was undone before any commit: it counts as fresh."""
    return step == 0 and job.frontier is not None and history not in (0, job.history)


def is_newer(job: Job, message: Join) -> bool:
    """Return whether a group brings a newer state of this job than its frontier."""
    if job.frontier is None or job.finished is not None or not job.frontier.holders:
        return False
    return message.history == job.history != 0 and message.step > job.frontier.step


def go_back_for_newer(draft: Draft, comer: Group, message: Join) -> None:
    """Make all groups reconnect and report their states, so that the job resumes from the newest one."""
    frontier = draft.job.frontier
    assert frontier is not None
    text = (
        f"{comer.name} brings step {message.step} of this run, but the coordinator only knew step {frontier.step}: "
        "all groups report their states again, and the job resumes from the newest one"
    )
    draft.log(text)
    for group in draft.select(
        lambda group: group.phase in (GroupPhase.MEMBER, GroupPhase.READY, GroupPhase.HEALING)
    ):
        draft.expel(group, text, may_return=True)
    none: frozenset[Holder] = frozenset()
    frontier = replace(frontier, holders=none, digest=None)
    draft.update(quorum=None, ballot=Ballot(), frontier=frontier, proven={}, orphaned_s=draft.now_s)


def gives_way_to(draft: Draft, message: Join) -> bool:
    """Return whether a group with a history replaces a fresh founding on which nothing is committed."""
    frontier = draft.job.frontier
    # A group of the job's own history has healed to the founding state.
    brings = message.history not in (0, draft.job.history)
    return frontier is not None and frontier.founding and frontier.fresh and brings


def give_way(draft: Draft) -> None:
    """Undo a founding on which nothing has been committed."""
    draft.log("undoes the fresh founding: a group brings a committed state")
    for group in draft.select(
        lambda group: group.phase in (GroupPhase.MEMBER, GroupPhase.READY, GroupPhase.HEALING)
    ):
        draft.put(draft.release_heal(group), phase=GroupPhase.STALE, history=HistoryId(0))
    draft.update(frontier=None, quorum=None, ballot=Ballot(), history=HistoryId(0), proven={})


def reunites(draft: Draft) -> bool:
    """Return whether a coordinator that has just restarted still waits for earlier members.

    They have computed their shards already, and without this wait a single member might continue alone. A member that
    has not reconnected has `heartbeat_timeout_s`; a busy one `join_timeout_s`.
    """
    job = draft.job
    if job.restored_s is None or job.frontier is None:
        return False
    waited_s = draft.now_s - job.restored_s
    here = {group.holder: group.phase for group in job.groups.values()}
    if waited_s < job.options.heartbeat_timeout_s and not job.frontier.holders <= here.keys():
        return True
    busy = any(here.get(holder) is GroupPhase.PRESENT for holder in job.frontier.holders)
    return busy and waited_s < job.options.join_timeout_s


def end_reunion(draft: Draft) -> None:
    """Stop keeping a restored job for its earlier members if none has come back for long enough."""
    job = draft.job
    if job.restored_s is None or job.groups:
        return
    if draft.now_s - job.restored_s > AFTER_RESTART * job.options.heartbeat_timeout_s:
        draft.update(restored_s=None)


def has_joined(group: Group) -> bool:
    return group.phase is GroupPhase.STALE


def compiles(group: Group) -> bool:
    return group.phase is GroupPhase.PRESENT


def _note_orphaned(draft: Draft) -> None:
    """Note since when no group has held the frontier."""
    job = draft.job
    orphaned = (
        job.frontier is not None and job.quorum is None and job.finished is None and not draft.holders()
    )
    if orphaned != (job.orphaned_s is not None):
        draft.update(orphaned_s=draft.now_s if orphaned else None)


def _resume(draft: Draft, frontier: Frontier) -> None:
    job = draft.job
    wait_s = job.options.heartbeat_timeout_s * (1 if job.restored_s is None else AFTER_RESTART)
    if job.orphaned_s is None or draft.now_s - job.orphaned_s < wait_s:
        return
    patience_s = max(job.options.join_timeout_s, progress.patience_s(job) or 0.0)
    coming = (g for g in job.groups.values() if g.holder in frontier.holders)
    if any(draft.now_s - group.came_s < patience_s for group in coming):
        return  # it is back, and joins once it has applied the commit that it missed
    if following := draft.select(lambda group: group.phase in (GroupPhase.HEALING, GroupPhase.READY)):
        _ask_again(draft, following)
        return
    joined = draft.select(has_joined)
    of_history = [group for group in joined if group.history == job.history != 0]
    if not of_history or len(joined) < job.min_replicas:
        if joined and job.ended == frontier.step and not _one_compiles(draft, joined):
            _finish(draft)
        return
    if _one_compiles(draft, of_history):
        return  # it may bring a newer one
    if newer_may_come(draft, of_history):
        return
    founders = _go_on_from(draft, of_history)
    if not founders:
        return
    again = frontier.step - founders[0].step
    draft.log(
        f"resumes at step {founders[0].step} with the state of {names_text(founders)}: no group is left that held "
        f"step {frontier.step}" + (f"; {done_again(again)}" if again >= 0 else "")
    )


def _one_compiles(draft: Draft, joined: Sequence[Group]) -> bool:
    """Return whether these groups wait for a group that still compiles, which may bring a state."""
    waited_s = draft.now_s - min(group.joined_s for group in joined)
    return waited_s < draft.job.options.join_timeout_s and bool(draft.select(compiles))


def _finish(draft: Draft) -> None:
    """Finish the job where a member has ended its loop: the others died at that step, and cannot resume it."""
    draft.finish(": a group has ended its loop there, and no other is left that holds it")


def _ask_again(draft: Draft, following: Sequence[Group]) -> None:
    """Make groups that still follow a lost group reconnect and report their states: one may be the newest.

    Their donor may still be alive but unreachable, and send them sums of steps that the job is about to repeat.
    """
    for group in following:
        draft.expel(group, "its donors are no longer in the job", may_return=True)
    draft.update(orphaned_s=draft.now_s)  # they have as much time to come back as the others had


def _go_on_from(draft: Draft, joined: Sequence[Group]) -> list[Group]:
    """Make the best of these states the frontier; return the groups that hold it, or none if the job had to halt."""
    best = _best(joined)
    truth = _truth(best)
    if truth is None:
        halting.no_majority(draft, best)
        return []
    founders = [group for group in joined if group is truth or _is_alike(group, truth)]
    held = frozenset(group.holder for group in founders)
    history = truth.history or HistoryId(truth.incarnation)
    # If nothing was ever committed, a state of this founding counts as fresh. If the coordinator knows no founding,
    # so does a state of step 0: it has the history of a founding that was forgotten.
    before = draft.job.frontier
    of_it = truth.step == 0 if before is None else before.fresh and history == draft.job.history
    fresh = not truth.history or of_it
    if before is None or before.step != truth.step:
        draft.update(raised={}, tried=False)  # that was in another step
    draft.update(
        frontier=Frontier(truth.step, QuorumId(0), truth.digest, held, fresh=fresh),
        history=history,
        proven=dict(sorted(held)),  # a set's order differs between processes
        held={},
        places=0,
        orphaned_s=None,
    )
    draft.put_all([group for group in founders if not group.spare], phase=GroupPhase.MEMBER)
    draft.put_all([group for group in founders if group.spare], phase=GroupPhase.READY)
    return founders


def _best(candidates: Sequence[Group]) -> list[Group]:
    """Return the groups at the highest step; of these, only those with a committed state, if there are any."""
    step = max(group.step for group in candidates)
    highest = [group for group in candidates if group.step == step]
    return [group for group in highest if group.history] or highest


def _truth(best: Sequence[Group]) -> Group | None:
    """Return a group whose state is chosen, by majority. None if committed states differ without a majority.

    A group whose digest is unknown has no vote and is not a founder, unless all digests are unknown.
    """
    in_order = sorted(best, key=lambda group: natural_key(group.name))
    known = [group for group in in_order if group.digest is not None]
    if not known:
        return in_order[0]
    if not known[0].history:
        votes = Counter(group.digest for group in known)
        return max(known, key=lambda group: votes[group.digest])  # at equal counts, the first in order
    odd = digests.odd_ones({group.name: (group.digest, group.history) for group in known})
    if odd is None:
        return None
    return next(group for group in known if group.name not in odd)


def _is_alike(group: Group, truth: Group) -> bool:
    """Return whether a group holds the chosen state. A state with an unknown digest is not equal to any other."""
    return truth.digest is not None and (group.step, group.digest) == (truth.step, truth.digest)


def _refuse_other_histories(draft: Draft) -> None:
    """Refuse groups that bring another run's state: a heal would silently overwrite it."""
    for group in draft.select(has_joined):
        if is_undone(draft.job, group.step, group.history):
            draft.put(group, history=HistoryId(0))
        elif problem := foreign_state(draft.job, group):
            draft.refuse(group, problem)


def _founders_are_gone(draft: Draft) -> bool:
    """Return whether the founders are gone before any commit, while another group holds a state of the same step."""
    frontier = draft.job.frontier
    if frontier is None or not (frontier.founding and frontier.fresh):
        return False
    if draft.job.quorum is not None or draft.holders():
        return False
    if reunites(draft):
        return False
    groups = draft.job.groups.values()
    return not any(group.phase in (GroupPhase.HEALING, GroupPhase.READY) for group in groups) and any(
        has_joined(group) and group.step == frontier.step for group in groups
    )
