"""The session with a coordinator: connect, join, get evicted, lose the stream, leave."""

import hashlib

from jaxft_protocol.messages import HaltKind, Hello, Join, Leave, Refused, Welcome
from jaxft_protocol.replica.draft import DONE, Turn
from jaxft_protocol.replica.state import (
    Dial,
    FailureKind,
    HangUp,
    Phase,
    Prepared,
    ReleasePin,
)

FIRST_REDIAL_S = 0.05
LAST_REDIAL_S = 1.0

# The failure for each kind of halt, and advice to the user.
_HALTS = {
    HaltKind.DIVERGED: (
        FailureKind.DIVERGED,
        "Memory or a device has corrupted a state, or the groups' programs are not deterministic. Start the groups "
        "again: they resume from the newest checkpoint; without one, start a new run under another job name.",
    ),
    HaltKind.NONFINITE: (
        FailureKind.NONFINITE,
        "That step has not been applied. Check the learning rate and the data of that step; then continue from "
        'a checkpoint under another job name, with other settings or with nonfinite="skip" (docs/guarantees.md).',
    ),
    HaltKind.FAILED: (
        FailureKind.JOB_HALTED,
        "Start the groups again: they resume from the newest checkpoint.",
    ),
    HaltKind.RAISED: (
        FailureKind.JOB_HALTED,
        "That step has not been applied. Repair the data or the code, then start the groups again: they resume from "
        "the newest checkpoint.",
    ),
}


def connected(turn: Turn) -> None:
    replica, me = turn.replica, turn.replica.identity
    turn.enter(Phase.GREETING)
    turn.say(
        Hello(
            me.job,
            me.group,
            me.incarnation,
            me.address,
            term=replica.term,
            step=replica.step,
            history=replica.history,
        )
    )


def welcome(turn: Turn, message: Welcome) -> None:
    if message.term < turn.replica.term:
        reason = f"a coordinator of term {message.term} answers, but one of term {turn.replica.term} has taken over"
        turn.note(f"{reason}; looks for that one", warning=True)
        turn.effects.append(HangUp(reason))
        return
    interval_s = message.heartbeat_interval_ms / 1000
    turn.update(
        heartbeat_interval_s=interval_s,
        next_heartbeat_s=turn.now_s + interval_s,
        dials=0,
        term=message.term,
        offline_since_s=None,
        frontier_step=message.frontier_step,
        frontier_held=message.frontier_held,
    )
    vote = turn.replica.vote
    committed = (message.frontier_step, message.frontier_quorum_id)
    if vote is not None and vote.ok and committed == (vote.step + 1, vote.quorum_id):
        turn.update(commit_heard=True)
    if turn.replica.commit_heard:
        turn.enter(Phase.APPLYING)
        return
    join_or_wait(turn)


def join_or_wait(turn: Turn) -> None:
    replica = turn.replica
    prepared = replica.prepared
    if prepared is None or replica.busy:
        turn.enter(Phase.PRESENT)
        return
    if not replica.digest_taken:
        turn.enter(Phase.PRESENT)
        return  # `directive` asks for it
    if prepared.heals_only and not replica.frontier_step:
        turn.enter(Phase.PRESENT)
        read_after_all(turn, "the coordinator no longer knows the job")
        return
    if replica.frontier_step and not replica.frontier_held and not replica.history:
        turn.note(_alone_line(turn, replica.frontier_step), warning=True)
    turn.enter(Phase.JOINING, joined=True, vote=None)
    turn.say(
        Join(
            replica.step,
            replica.digest,
            prepared.settings,
            replica.last_quorum_id,
            prepared.min_replicas,
            replica.history,
            prepared.spare,
            replica.last_members,
            prepared.total_shards,
        )
    )


def _alone_line(turn: Turn, frontier: int) -> str:
    """Said at once: the group gives up only after its failure timeout."""
    me, timeout_s = turn.replica.identity, turn.replica.failure_timeout_s
    return (
        f"brings a fresh state, but job {me.job!r} has committed {frontier} steps and no group that holds its state "
        f"is connected; waits up to {timeout_s:g} s for one. To go on, restart that group or restore a checkpoint; "
        "for a new run, such as a notebook cell that is run again, choose another job name"
    )


def no_longer_busy(turn: Turn) -> None:
    """Join: the training thread has finished what it was doing when the stream ended, so its state is known."""
    if not turn.replica.busy:
        return
    turn.update(busy=False)
    if turn.replica.phase is Phase.PRESENT:
        join_or_wait(turn)


def prepared(turn: Turn, event: Prepared) -> None:
    turn.update(prepared=event, step=event.step, history=event.history, reads=False)
    turn.update(digest=event.digest, digest_taken=True)
    if turn.replica.phase is Phase.PRESENT:
        join_or_wait(turn)
    elif turn.replica.phase is Phase.JOINING and event.heals_only:
        turn.enter(Phase.JOINING)  # other groups have read it by now: restart their timeout
    elif turn.replica.phase is Phase.JOINING:
        turn.update(joined=False)
        turn.effects.append(HangUp("joins again, with the state of a checkpoint"))


def read_after_all(turn: Turn, why: str) -> None:
    if not turn.replica.reads:
        turn.update(reads=True)
        turn.note(f"reads the checkpoint, which it had left to other groups: {why}", warning=True)


def waiting(turn: Turn, reason: str, *, held: bool) -> None:
    if turn.replica.frontier_held and not held:
        turn.update(since_s=turn.now_s)  # from now on there is no donor
    turn.update(waiting=reason, frontier_held=held)
    turn.note(f"waiting: {reason}")


def disconnected(turn: Turn, reason: str, *, busy: bool) -> None:
    replica = turn.replica
    turn.effects += [ReleasePin(heal_id) for heal_id in sorted(replica.pins)]
    turn.update(pins=frozenset(), digests_due={})
    if replica.phase in DONE:
        if replica.phase in (Phase.LEAVING, Phase.FINISHED):
            turn.enter(Phase.LEFT)
        return
    since_s = replica.offline_since_s
    if since_s is None:
        since_s = turn.now_s
        if replica.joined:
            turn.note(
                f"lost the coordinator {replica.identity.coordinator} ({reason}); dials again", warning=True
            )
    addresses = replica.identity.coordinators
    # A coordinator that had welcomed this group may be back at once; otherwise try the next one.
    welcome = replica.phase not in (Phase.OFFLINE, Phase.GREETING)
    place = replica.place if welcome else (replica.place + 1) % len(addresses)
    delay_s = _redial_delay_s(replica.identity.incarnation, replica.dials, len(addresses))
    turn.enter(
        Phase.OFFLINE,
        joined=False,
        quorum=None,
        heal=None,
        busy=busy or replica.busy,
        offline_since_s=since_s,
        offline_reason=reason,
        dials=replica.dials + 1,
        place=place,
    )
    turn.effects.append(Dial(delay_s, addresses[place]))


def _redial_delay_s(incarnation: int, dials: int, addresses: int) -> float:
    """Double with each round over the addresses, minus up to half as jitter, so that groups do not dial at once."""
    longest_s = min(FIRST_REDIAL_S * 2.0 ** min(dials // addresses, 10), LAST_REDIAL_S)  # 2.0**1024 overflows
    seed = f"{incarnation} {dials}".encode()
    part = int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "big") / (1 << 32)
    return longest_s * (1.0 - part / 2)


def refused(turn: Turn, message: Refused) -> None:
    me = turn.replica.identity
    lines = [f"the coordinator {me.coordinator} refused group {me.group!r}: {message.reason}."]
    lines += [
        f"  {difference.name}: the job has {difference.job!r}, this group {difference.group!r}"
        for difference in message.differences
    ]
    if message.differences:
        lines.append(
            "Start every group of a job with the same program and settings, or use another job name."
        )
    turn.fail(FailureKind.JOIN_REFUSED, "\n".join(lines))


def halted(turn: Turn, reason: str, kind: HaltKind) -> None:
    if turn.replica.phase in DONE:
        turn.enter(Phase.LEFT)
        return
    failure, advice = _HALTS[kind]
    me = turn.replica.identity
    turn.fail(failure, f"the coordinator {me.coordinator} has stopped job {me.job!r}: {reason}. {advice}")


def evicted(turn: Turn, reason: str, *, may_return: bool, aside: bool) -> None:
    if turn.replica.phase in DONE:
        turn.enter(Phase.LEFT)
        return
    if aside:
        turn.note(f"the job goes on without this group: {reason}")
        turn.update(joined=False)  # the stream ends next, as expected
        return
    if may_return:
        turn.note(f"evicted: {reason}; comes back as a joiner", warning=True)
        return  # the stream ends next, and `disconnected` dials again
    me = turn.replica.identity
    turn.fail(
        FailureKind.EVICTED,
        f"group {me.group!r} of job {me.job!r} was evicted by the coordinator {me.coordinator}: {reason}",
    )


def leave(turn: Turn, *, finished: bool) -> None:
    if turn.replica.phase in (Phase.OFFLINE, Phase.GREETING, Phase.LEFT, Phase.FAILED):
        turn.enter(Phase.LEFT)
        return
    turn.enter(Phase.LEAVING)
    turn.say(Leave(finished))
