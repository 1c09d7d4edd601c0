"""Choosing the state from which a job goes on: its first, or the best that is left when all who held it are gone.

*Which state.* The highest step; a state that was committed before a fresh one of the same step. Those who bring a
committed state of that step must agree on its digest, or a majority of them must: "the lowest name" is not the
truth. Without a majority the job halts. Fresh states may differ, since each group draws its own: there the
commonest one is taken, then the lowest name. All who hold the chosen state are founders.

*When.* Not at once: those who hold a newer state may be on their way, and a coordinator that has lost its memory
cannot know of them. The best state that is here must have been here for `heartbeat_timeout_s`, or, of a committed
one, as many groups that took part in its history must have come as its last quorum had members. Groups that
compile are waited for up to `join_timeout_s`. Where all states are fresh, one that holds a committed state, and is
busy still, is waited for as long as it lives.

*Resuming.* Of a job that has committed something, a fresh state never becomes the truth. But when no group is left
that holds the frontier, groups that bring a state of the same history (from a checkpoint, or because they took
part once) may go on from the newest of these. That is the only way in which a frontier goes back. It waits for
`heartbeat_timeout_s`, so that a holder that has only lost its connection comes first.

*Giving way.* A group may still come later with what no group here knew of. A history is named after the
incarnation that founded it. Where the coordinator has lost its memory and a fresh group was quicker than those
with a history, the fresh founding gives way as long as nothing has been committed on it. A group that brings a
higher step of the job's own history is newer than the job: all others are sent to say what they hold, and the job
resumes from the newest state.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from jaxft_protocol.coordinator import digests, halting, progress
from jaxft_protocol.coordinator.draft import Turn, names_text
from jaxft_protocol.coordinator.job import Ballot, Frontier, Group, Holder, Job, Phase
from jaxft_protocol.messages import HistoryId, Join, QuorumId
from jaxft_protocol.names import done_again, natural_key

# After its own start the coordinator waits so many times as long: those who hold the frontier may not know yet that
# their old connection is dead.
AFTER_RESTART = 4


def found(turn: Turn) -> None:
    """Found the job, or let it resume, if the time has come."""
    _note_orphaned(turn)
    job = turn.job
    if job.frontier is not None and not _founders_are_gone(turn):
        _resume(turn, job.frontier)
        return
    if turn.select(lambda group: bool(group.history)):
        turn.update(committed_seen_s=turn.now_s)
    if job.first_join_s is None:
        return
    joined = turn.select(has_joined)
    if not joined:
        # Whoever had joined is gone: what it asked for binds nobody.
        turn.update(settings=None, total_shards=None, min_replicas=0, first_join_s=None)
        return
    timed_out = turn.now_s - job.first_join_s >= job.options.join_timeout_s
    if len(joined) < job.min_replicas or (not timed_out and turn.select(compiles)):
        return
    if newer_may_come(turn, joined):
        return
    founders = _go_on_from(turn, joined)
    if founders:
        turn.report(f"founded at step {founders[0].step} by {names_text(founders)}")
    _refuse_other_histories(turn)


def newer_may_come(turn: Turn, candidates: Sequence[Group]) -> bool:
    """Whether it is too early to begin with the best of these states: its peers, or a newer one, may be coming."""
    best = _best(candidates)
    since_s = min(group.came_s for group in best)
    if not best[0].history and turn.job.committed_seen_s is not None:
        # It is busy, or has lost its connection and may dial again. Later it would be refused.
        since_s = max(since_s, turn.job.committed_seen_s)
    if turn.now_s - since_s >= turn.job.options.newer_may_come_s:
        return False
    if not best[0].history:
        # None of them knows what came of its quorum: another may have committed a step and gone on.
        return True
    # Those that have healed to this state and never took part say nothing of how many did.
    took_part = [g for g in candidates if g.history == best[0].history and g.members]
    # One that was alone may be a laggard that the others have left behind.
    return not 1 < max(group.members for group in best) <= len(took_part)


def hold_committed(turn: Turn) -> list[Group]:
    """Groups that are busy with something else, and hold a committed state of this job while the job has none."""
    return turn.select(lambda group: compiles(group) and bool(group.history))


def foreign_state(job: Job, group: Group) -> str:
    """Why the state with which a group joins cannot be of this job; "" if it can."""
    if job.frontier is None or group.history == job.history:
        return ""
    if group.history:
        return (
            f"group {group.name!r} brings step {group.step} of another history of job {job.name!r} (history "
            f"{group.history:016x}; this one is {job.history:016x}): the job was started anew since that state was "
            "saved. Use the other run's checkpoints under a job name of its own, or start without them"
        )
    if group.step > job.frontier.step:
        return (
            f"group {group.name!r} holds step {group.step}, but job {job.name!r} is only at step "
            f"{job.frontier.step}: this looks like another run; give it a job name of its own"
        )
    return ""


def is_newer(job: Job, message: Join) -> bool:
    """Whether a group brings a later state of this job than the job itself knows of."""
    if job.frontier is None or job.finished is not None or not job.frontier.holders:
        return False
    return message.history == job.history != 0 and message.step > job.frontier.step


def go_back_for_newer(turn: Turn, comer: Group, message: Join) -> None:
    """Send all who take part to say again what they hold, so that the job resumes from the newest state."""
    frontier = turn.job.frontier
    assert frontier is not None
    text = (
        f"{comer.name} brings step {message.step} of this very run, and the coordinator knew only of step "
        f"{frontier.step}: all say again what they hold, and the job goes on from the newest"
    )
    turn.report(text)
    for group in turn.select(lambda group: group.phase in (Phase.MEMBER, Phase.READY, Phase.HEALING)):
        turn.expel(group, text, may_return=True)
    none: frozenset[Holder] = frozenset()
    frontier = replace(frontier, holders=none, digest=None)
    turn.update(quorum=None, ballot=Ballot(), frontier=frontier, proven={}, orphaned_s=turn.now_s)


def gives_way_to(turn: Turn, message: Join) -> bool:
    """Whether a fresh founding, on which nothing is committed, gives way to a group that has a history."""
    frontier = turn.job.frontier
    # One of this very history has healed to the founding state.
    brings = message.history not in (0, turn.job.history)
    return frontier is not None and frontier.founding and frontier.fresh and brings


def give_way(turn: Turn) -> None:
    """Undo a founding on which nothing has been committed."""
    turn.report("a group brings a committed state: the fresh founding gives way to it")
    for group in turn.select(lambda group: group.phase in (Phase.MEMBER, Phase.READY, Phase.HEALING)):
        turn.put(turn.release_heal(group), phase=Phase.STALE)
    turn.update(frontier=None, quorum=None, ballot=Ballot(), history=HistoryId(0), proven={})


def reunites(turn: Turn) -> bool:
    """Whether a coordinator that has just started still waits for those who took part before it went.

    They have computed their shards already, and would else find that one of them has gone on alone. Those that have
    not dialled yet are given `heartbeat_timeout_s`; those that have, and are still busy, `join_timeout_s`.
    """
    job = turn.job
    if job.restored_s is None or job.frontier is None:
        return False
    waited_s = turn.now_s - job.restored_s
    here = {group.holder: group.phase for group in job.groups.values()}
    if waited_s < job.options.heartbeat_timeout_s and not job.frontier.holders <= here.keys():
        return True
    busy = any(here.get(holder) is Phase.PRESENT for holder in job.frontier.holders)
    return busy and waited_s < job.options.join_timeout_s


def end_reunion(turn: Turn) -> None:
    """After a restart nobody has come back to this job for long enough: it need not be kept for them."""
    job = turn.job
    if job.restored_s is None or job.groups:
        return
    if turn.now_s - job.restored_s > AFTER_RESTART * job.options.heartbeat_timeout_s:
        turn.update(restored_s=None)


def has_joined(group: Group) -> bool:
    return group.phase is Phase.STALE


def compiles(group: Group) -> bool:
    return group.phase is Phase.PRESENT


def _note_orphaned(turn: Turn) -> None:
    """Remember since when nobody has held the frontier."""
    job = turn.job
    orphaned = job.frontier is not None and job.quorum is None and job.finished is None and not turn.holders()
    if orphaned != (job.orphaned_s is not None):
        turn.update(orphaned_s=turn.now_s if orphaned else None)


def _resume(turn: Turn, frontier: Frontier) -> None:
    job = turn.job
    wait_s = job.options.heartbeat_timeout_s * (1 if job.restored_s is None else AFTER_RESTART)
    if job.orphaned_s is None or turn.now_s - job.orphaned_s < wait_s:
        return
    patience_s = max(job.options.join_timeout_s, progress.patience_s(job) or 0.0)
    coming = (g for g in job.groups.values() if g.holder in frontier.holders)
    if any(turn.now_s - group.came_s < patience_s for group in coming):
        return  # it is back, and says so as soon as it has applied what it missed
    if following := turn.select(lambda group: group.phase in (Phase.HEALING, Phase.READY)):
        _ask_anew(turn, following)
        return
    of_history = turn.select(lambda group: has_joined(group) and group.history == job.history != 0)
    if not of_history or len(turn.select(has_joined)) < job.min_replicas:
        return
    waited_s = turn.now_s - min(group.joined_s for group in of_history)
    if waited_s < job.options.join_timeout_s and turn.select(compiles):
        return  # it may bring a newer one
    if newer_may_come(turn, of_history):
        return
    founders = _go_on_from(turn, of_history)
    if not founders:
        return
    again = frontier.step - founders[0].step
    turn.report(
        f"resumes at step {founders[0].step} with the state of {names_text(founders)}: nobody is left who held step "
        f"{frontier.step}" + (f"; {done_again(again)}" if again >= 0 else "")
    )


def _ask_anew(turn: Turn, following: Sequence[Group]) -> None:
    """Let those who still follow one that is gone come again, and say what they hold: it may be the newest state.

    Their donor may live on, out of our reach, and give them sums of steps that the job is about to do again.
    """
    for group in following:
        turn.expel(group, "those from whom it heals have lost their place", may_return=True)
    turn.update(orphaned_s=turn.now_s)  # they are given as long to come as all were


def _go_on_from(turn: Turn, joined: Sequence[Group]) -> list[Group]:
    """Make the best of these states the job's frontier; return all who hold it, or none if the job had to halt."""
    best = _best(joined)
    truth = _truth(best)
    if truth is None:
        halting.no_majority(turn, best)
        return []
    founders = [group for group in joined if group is truth or _is_alike(group, truth)]
    held = frozenset(group.holder for group in founders)
    history = truth.history or HistoryId(truth.incarnation)
    # Where nothing was ever committed, a state that is known to be of this very founding is as fresh as any. So is a
    # first state to a coordinator that knows of no founding: it comes with the history of one that was forgotten.
    before = turn.job.frontier
    of_it = truth.step == 0 if before is None else before.fresh and history == turn.job.history
    fresh = not truth.history or of_it
    turn.update(
        frontier=Frontier(truth.step, QuorumId(0), truth.digest, held, fresh=fresh),
        history=history,
        proven=dict(held),
        held={},
        places=0,
        orphaned_s=None,
    )
    turn.put_all([group for group in founders if not group.spare], phase=Phase.MEMBER)
    turn.put_all([group for group in founders if group.spare], phase=Phase.READY)
    return founders


def _best(candidates: Sequence[Group]) -> list[Group]:
    """Those of the highest step; of them, those whose state was committed, if there is any."""
    step = max(group.step for group in candidates)
    highest = [group for group in candidates if group.step == step]
    return [group for group in highest if group.history] or highest


def _truth(best: Sequence[Group]) -> Group | None:
    """Whose state it is to be: that of the majority. None if committed states differ without one.

    A group whose digest is unknown has no say, and is not a founder: unless no other is there.
    """
    in_order = sorted(best, key=lambda group: natural_key(group.name))
    known = [group for group in in_order if group.digest is not None]
    if not known:
        return in_order[0]
    if not known[0].history:
        votes = Counter(group.digest for group in known)
        return max(known, key=lambda group: votes[group.digest])  # the first in order, of equally many
    odd = digests.odd_ones({group.name: (group.digest, group.history) for group in known})
    if odd is None:
        return None
    return next(group for group in known if group.name not in odd)


def _is_alike(group: Group, truth: Group) -> bool:
    """Whether a group holds the chosen state; one whose digest is unknown shares its state with no other."""
    return truth.digest is not None and (group.step, group.digest) == (truth.step, truth.digest)


def _refuse_other_histories(turn: Turn) -> None:
    """Those who brought another run's state are told so; healing them would overwrite it without a word."""
    for group in turn.select(has_joined):
        if problem := foreign_state(turn.job, group):
            turn.refuse(group, problem)


def _founders_are_gone(turn: Turn) -> bool:
    """Nothing was ever committed, no group holds the founding state any more, and another stands at its step."""
    frontier = turn.job.frontier
    if frontier is None or not (frontier.founding and frontier.fresh):
        return False
    if turn.job.quorum is not None or turn.holders():
        return False
    if reunites(turn):
        return False
    groups = turn.job.groups.values()
    return not any(group.phase in (Phase.HEALING, Phase.READY) for group in groups) and any(
        has_joined(group) and group.step == frontier.step for group in groups
    )
