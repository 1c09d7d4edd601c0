"""The session with a coordinator: connect, join, get evicted, lose the stream, leave."""

import hashlib

from jaxft_protocol.messages import Drain, HaltKind, Hello, Join, Leave, Refused, Welcome
from jaxft_protocol.names import ANY_MESHES, MESHES
from jaxft_protocol.replica.draft import DONE, Draft
from jaxft_protocol.replica.state import (
    Close,
    Dial,
    FailureKind,
    Phase,
    Prepared,
    ReleasePin,
)

FIRST_REDIAL_S = 0.05
LAST_REDIAL_S = 1.0
# Why a stream ended on which this group, which was in its job, was refused.
REFUSES = "it refused this group"

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

_DIVERGED_ON_OTHER_MESHES = (
    "Groups of this job may have different meshes. On these, a sum over a sharded array after the exchange has "
    "different bits, as in optax.clip_by_global_norm: write it with jaxft.global_norm, or use equal meshes "
    "(docs/meshes.md). If the step has no such sum, memory or a device has corrupted a state. Start the groups "
    "again: they resume from the newest checkpoint; without one, start a new run under another job name."
)


def connected(draft: Draft) -> None:
    replica, me = draft.replica, draft.replica.identity
    stream = replica.streams + 1
    draft.enter(Phase.GREETING, streams=stream)
    draft.send(
        Hello(
            me.job,
            me.group,
            me.incarnation,
            me.address,
            term=replica.term,
            step=replica.step,
            history=replica.history,
            stream=stream,
        )
    )


def welcome(draft: Draft, message: Welcome) -> None:
    if message.term < draft.replica.term:
        reason = f"a coordinator of term {message.term} answers, but term {draft.replica.term} has taken over"
        draft.log(f"{reason}; looks for that coordinator", warning=True)
        draft.effects.append(Close(reason))
        return
    interval_s = message.heartbeat_interval_ms / 1000
    draft.update(
        heartbeat_interval_s=interval_s,
        next_heartbeat_s=draft.now_s + interval_s,
        dials=0,
        term=message.term,
        offline_since_s=None,
        refusal="",
        frontier_step=message.frontier_step,
        frontier_held=message.frontier_held,
    )
    vote = draft.replica.vote
    committed = (message.frontier_step, message.frontier_quorum_id)
    if vote is not None and vote.ok and committed == (vote.step + 1, vote.quorum_id):
        draft.update(commit_heard=True)
    if draft.replica.commit_heard:
        draft.enter(Phase.APPLYING)
        return
    join_or_wait(draft)


def join_or_wait(draft: Draft) -> None:
    replica = draft.replica
    prepared = replica.prepared
    if prepared is None or replica.busy:
        draft.enter(Phase.PRESENT)
        return
    if not replica.digest_taken:
        draft.enter(Phase.PRESENT)
        return  # `directive` asks for it
    if prepared.heals_only and not replica.frontier_step:
        draft.enter(Phase.PRESENT)
        read_after_all(draft, "the coordinator no longer knows the job")
        return
    if replica.frontier_step and not replica.frontier_held and not replica.history:
        draft.log(_alone_line(draft, replica.frontier_step), warning=True)
    draft.enter(Phase.JOINING, joined=True, vote=None, counts_as_fresh=False)
    draft.send(
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
            prepared.weight,
        )
    )


def _alone_line(draft: Draft, frontier: int) -> str:
    """A line for the log at once: the group gives up only after its failure timeout."""
    me, timeout_s = draft.replica.identity, draft.replica.failure_timeout_s
    return (
        f"brings a fresh state, but job {me.job!r} has committed {frontier} steps and no group that holds its state "
        f"is connected; waits up to {timeout_s:g} s for one. To go on, restart that group or restore a checkpoint; "
        "for a new run, such as a notebook cell that is run again, choose another job name"
    )


def no_longer_busy(draft: Draft) -> None:
    """Join: the training thread has finished its work of when the stream ended, so its state is known."""
    if not draft.replica.busy:
        return
    draft.update(busy=False)
    if draft.replica.phase is Phase.PRESENT:
        join_or_wait(draft)


def prepared(draft: Draft, event: Prepared) -> None:
    draft.update(prepared=event, step=event.step, history=event.history, reads=False)
    draft.update(digest=event.digest, digest_taken=True)
    if draft.replica.phase is Phase.PRESENT:
        join_or_wait(draft)
    elif draft.replica.phase is Phase.JOINING and event.heals_only:
        draft.enter(Phase.JOINING)  # other groups have read it by now: restart their timeout
    elif draft.replica.phase is Phase.JOINING:
        draft.update(joined=False)
        draft.effects.append(Close("joins again, with the state of a checkpoint"))


def read_after_all(draft: Draft, why: str) -> None:
    if not draft.replica.reads:
        draft.update(reads=True)
        draft.log(f"reads the checkpoint, which it had left to other groups: {why}", warning=True)


def waiting(draft: Draft, reason: str, *, held: bool, fresh: bool) -> None:
    if draft.replica.phase in DONE:
        draft.update(waiting=reason)  # it leaves: logged after 5 s, if it is still here
        return
    if draft.replica.frontier_held and not held:
        draft.update(since_s=draft.now_s)  # from now on there is no donor
    draft.update(waiting=reason, frontier_held=held, counts_as_fresh=fresh)
    draft.log(f"waiting: {reason}")


def disconnected(draft: Draft, reason: str, *, busy: bool) -> None:
    replica = draft.replica
    draft.effects += [ReleasePin(heal_id) for heal_id in sorted(replica.pins)]
    draft.update(pins=frozenset(), digests_due={})
    if replica.phase in DONE:
        if replica.phase in (Phase.LEAVING, Phase.FINISHED, Phase.DRAINED):
            draft.enter(Phase.LEFT)
        return
    if replica.drains or replica.drained:
        draft.enter(Phase.LEFT, drained=True)  # the job continues without it already
        return
    since_s = replica.offline_since_s
    if since_s is None:
        since_s = draft.now_s
        if replica.joined:
            draft.log(
                f"lost the coordinator {replica.identity.coordinator} ({reason}); dials again", warning=True
            )
    if reason != REFUSES and replica.address_index == replica.refused_by:
        draft.update(refusal="")  # that one is gone since: it was stopped to put that right
    addresses = replica.identity.coordinators
    # A coordinator that had welcomed this group may be back at once; otherwise try the next one.
    welcome = replica.phase not in (Phase.OFFLINE, Phase.GREETING)
    address_index = replica.address_index if welcome else (replica.address_index + 1) % len(addresses)
    delay_s = _redial_delay_s(replica.identity.incarnation, replica.dials, len(addresses))
    draft.enter(
        Phase.OFFLINE,
        joined=False,
        quorum=None,
        heal=None,
        paused=False,
        busy=busy or replica.busy,
        offline_since_s=since_s,
        offline_reason=reason,
        dials=replica.dials + 1,
        address_index=address_index,
    )
    draft.effects.append(Dial(delay_s, addresses[address_index]))


def _redial_delay_s(incarnation: int, dials: int, addresses: int) -> float:
    """Double with each round over the addresses, minus up to half as jitter, so that groups do not dial at once."""
    longest_s = min(FIRST_REDIAL_S * 2.0 ** min(dials // addresses, 10), LAST_REDIAL_S)  # 2.0**1024 overflows
    seed = f"{incarnation} {dials}".encode()
    part = int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "big") / (1 << 32)
    return longest_s * (1.0 - part / 2)


def refused(draft: Draft, message: Refused) -> None:
    me = draft.replica.identity
    lines = [f"the coordinator {me.coordinator} refused group {me.group!r}: {message.reason}."]
    lines += [
        f"  {difference.name}: the job has {difference.job!r}, this group {difference.group!r}"
        for difference in message.differences
    ]
    if message.differences:
        lines.append(
            "Start every group of a job with the same program and settings, or use another job name."
        )
    names = {difference.name for difference in message.differences}
    if "static arguments" in names:
        lines.append(
            "Static arguments are part of the program: give `step.join` the same ones in all groups and after each "
            "restart, such as the values for step 0 where they follow the step, and each call those for its step."
        )
    elif "program" in names:
        lines.append(
            "The same code may make another program in each process: by the order of a set of texts (start all with "
            "the same PYTHONHASHSEED), by hash() or id(), or by a constant that depends on the host."
        )
    text = "\n".join(lines)
    if draft.replica.phase is Phase.GREETING and draft.replica.term:
        # It may hold the only state of its job. The coordinator there now is of another version, say, or has another
        # secret, and an operator can put that right.
        _dial_again(draft, f"{text} This group was in its job before", FailureKind.JOIN_REFUSED)
        return
    draft.fail(FailureKind.JOIN_REFUSED, text)


def _dial_again(draft: Draft, text: str, kind: FailureKind) -> None:
    """Dial again after a refusal that may pass; if it does not in time, the group ends for this reason."""
    replica = draft.replica
    if replica.refusal != text:
        since_s = draft.now_s if replica.offline_since_s is None else replica.offline_since_s
        left_s = since_s + replica.failure_timeout_s - draft.now_s
        draft.log(f"{text}: it dials again, for {left_s:.0f} s more", warning=True)
    draft.update(refusal=text, refusal_kind=kind, refused_by=replica.address_index)
    draft.effects.append(Close(REFUSES))


def halted(draft: Draft, reason: str, kind: HaltKind) -> None:
    if draft.replica.phase in DONE:
        draft.enter(Phase.LEFT)
        return
    failure, advice = _HALTS[kind]
    me, prepared = draft.replica.identity, draft.replica.prepared
    if kind is HaltKind.DIVERGED and prepared is not None and prepared.settings.get(MESHES) == ANY_MESHES:
        advice = _DIVERGED_ON_OTHER_MESHES
    draft.fail(failure, f"the coordinator {me.coordinator} has stopped job {me.job!r}: {reason}. {advice}")


def evicted(draft: Draft, reason: str, *, may_return: bool, aside: bool) -> None:
    if draft.replica.phase in DONE:
        draft.enter(Phase.LEFT)
        return
    if aside:
        draft.log(f"the job goes on without this group: {reason}")
        draft.update(joined=False)  # the stream ends next, as expected
        return
    me = draft.replica.identity
    if may_return and draft.replica.phase is Phase.GREETING:
        text = f"the coordinator {me.coordinator} does not admit group {me.group!r}: {reason}"
        _dial_again(draft, f"{text}. This process takes its place if that one ends", FailureKind.EVICTED)
        return
    if may_return:
        draft.log(f"evicted: {reason}; comes back as a joiner", warning=True)
        return  # the stream ends next, and `disconnected` dials again
    if draft.replica.phase is Phase.GREETING:
        refused(draft, Refused(reason))
        return
    draft.fail(
        FailureKind.EVICTED,
        f"group {me.group!r} of job {me.job!r} was evicted by the coordinator {me.coordinator}: {reason}",
    )


def drain(draft: Draft, *, at_once: bool) -> None:
    if draft.replica.drains:
        return
    draft.update(drains=True)
    if draft.replica.phase in (Phase.OFFLINE, Phase.GREETING):
        draft.log("is drained while it is not in the job")
        draft.enter(Phase.LEFT, drained=True)
        return
    if at_once and draft.replica.phase is Phase.WORKING:
        draft.log("is drained: leaves the job now, and its shards of this step to the others")
        draft.enter(Phase.DRAINED, drained=True)
        return
    draft.log("is drained: leaves the job at the next step boundary")
    draft.send(Drain())


def drained(draft: Draft) -> None:
    draft.update(drained=True)
    if draft.replica.phase is not Phase.APPLYING:  # else once it has applied
        draft.enter(Phase.DRAINED)


def leave(draft: Draft, *, finished: bool) -> None:
    if draft.replica.phase in (Phase.OFFLINE, Phase.GREETING, Phase.LEFT, Phase.FAILED):
        draft.enter(Phase.LEFT)
        return
    for_whom = draft.replica.waiting if draft.replica.phase is Phase.FINISHED else ""
    draft.enter(Phase.LEAVING)
    draft.update(waiting=for_whom)
    draft.send(Leave(finished))
