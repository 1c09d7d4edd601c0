"""Choosing the state from which a job goes on: its first, or the best that is left when all who held it are gone.

*Founding.* The first state is that of the highest step, then of the lowest name; all who hold it are founders.

*Resuming.* Of a job that has committed something, a fresh state never becomes the truth. But when nobody is left who
holds the frontier, groups that bring a state of the same history (from a checkpoint, or because they took part once)
may go on from the newest of these. That is the only way in which a frontier goes back. It waits for
`heartbeat_timeout_s`, so that a holder that has only lost its connection comes first.

A history is named after the incarnation that founded it. Where the coordinator has lost its memory and a fresh group
was quicker than those with a history, the fresh founding gives way as long as nothing has been committed on it.
"""

from collections.abc import Sequence

from jaxft_coordinator.core import progress
from jaxft_coordinator.core.job import Ballot, Frontier, Group, Phase
from jaxft_coordinator.core.messages import HistoryId, Join, QuorumId, Step
from jaxft_coordinator.core.names import done_again, natural_key
from jaxft_coordinator.core.turn import Turn, names_text

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
    if job.first_join_s is None:
        return
    joined = turn.select(has_joined)
    if not joined:
        # Whoever had joined is gone: what it asked for binds nobody.
        turn.update(settings=None, min_replicas=0, first_join_s=None)
        return
    timed_out = turn.now_s - job.first_join_s >= job.options.join_timeout_s
    if len(joined) < job.min_replicas or (not timed_out and turn.select(compiles)):
        return
    truth, founders = _go_on_from(turn, joined)
    turn.report(f"founded at step {truth.step} by {names_text(founders)}")


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
    truth, founders = _go_on_from(turn, of_history)
    turn.report(
        f"resumes at step {truth.step} with the state of {names_text(founders)}: nobody is left who held step "
        f"{frontier.step}; {done_again(frontier.step - truth.step)}"
    )


def _ask_anew(turn: Turn, following: Sequence[Group]) -> None:
    """Let those who still follow one that is gone come again, and say what they hold: it may be the newest state.

    Their donor may live on, out of our reach, and give them sums of steps that the job is about to do again.
    """
    for group in following:
        turn.expel(group, "those from whom it heals have lost their place", may_return=True)
    turn.update(orphaned_s=turn.now_s)  # they are given as long to come as all were


def _go_on_from(turn: Turn, joined: Sequence[Group]) -> tuple[Group, list[Group]]:
    """Make the best of these states the job's frontier; return whose it is, and all who hold it."""
    truth = min(joined, key=lambda group: (-group.step, group.history == 0, natural_key(group.name)))
    founders = [group for group in joined if group is truth or _state(group) == _state(truth)]
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
    return truth, founders


def _state(group: Group) -> tuple[Step, str]:
    """What founders must share; a group that computed no digest shares its state with nobody."""
    return (group.step, group.digest or f"unknown state of {group.name}")


def _founders_are_gone(turn: Turn) -> bool:
    """Nothing was ever committed, nobody holds the founding state any more, and somebody else stands at its step."""
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
