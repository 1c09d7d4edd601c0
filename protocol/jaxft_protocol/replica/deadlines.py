"""Heartbeats and timeouts."""

from jaxft_protocol.messages import HEARTBEATS_IN_TIMEOUT, Heartbeat
from jaxft_protocol.replica import sessions
from jaxft_protocol.replica.draft import DONE, Draft
from jaxft_protocol.replica.state import Close, FailureKind, Phase, Replica, Tick

# A coordinator answers a Hello in milliseconds. If it is frozen, or its machine is gone, it does not answer at all.
GREETING_TIMEOUT_S = 5.0


def tick(draft: Draft, event: Tick) -> None:
    replica = draft.replica
    online = replica.phase not in (Phase.OFFLINE, Phase.GREETING, Phase.LEFT, Phase.FAILED)
    if online and draft.now_s >= replica.next_heartbeat_s:
        draft.update(next_heartbeat_s=draft.now_s + replica.heartbeat_interval_s, progress=event.progress)
        draft.send(Heartbeat(*event.computed, event.away, event.progress != replica.progress))
    silent_s = draft.now_s - replica.heard_s
    timeout_s = replica.heartbeat_interval_s * HEARTBEATS_IN_TIMEOUT
    # If this process was suspended, messages from the coordinator may still be unread.
    if draft.now_s - replica.last_tick_s > timeout_s / 2:
        draft.update(heard_s=draft.now_s)
    elif online and silent_s > timeout_s:
        draft.update(heard_s=draft.now_s)
        if replica.phase not in DONE:
            # In GREETING, the next dial goes to the next of several coordinators.
            draft.enter(Phase.GREETING)
        draft.effects.append(Close(f"no message from the coordinator for {silent_s:.1f} s"))
    draft.update(last_tick_s=draft.now_s)
    _check(draft)


def stranded(replica: Replica) -> bool:
    """Whether a group without the job's state waits for another group that holds it, and none is connected."""
    # A state of the frontier's step counts as the frontier only if the coordinator can tell that it is: otherwise its
    # `Waiting` names the lack of a group that holds the frontier.
    behind = replica.frontier_step is not None and (
        replica.step != replica.frontier_step or replica.waiting != ""
    )
    # A group with a state of the job's history may be needed to resume the job, and may wait for other groups.
    alone = (not replica.history or replica.counts_as_fresh) and not replica.frontier_held
    return replica.phase is Phase.JOINING and behind and alone


def _check(draft: Draft) -> None:
    replica, me = draft.replica, draft.replica.identity
    timeout_s = replica.failure_timeout_s
    if replica.offline_since_s is not None and draft.now_s - replica.offline_since_s > timeout_s:
        if replica.phase not in DONE and replica.refusal:
            draft.fail(replica.refusal_kind, f"{replica.refusal}, and has dialled for {timeout_s:g} s.")
        elif replica.phase not in DONE:
            draft.fail(
                FailureKind.COORDINATOR_UNREACHABLE,
                f"no answer from the coordinator {me.coordinator} for {timeout_s:g} s "
                f"(last: {replica.offline_reason}). Is it running, and is the address right? "
                "`jaxft-coordinator --help` shows how to start one.",
            )
        return
    waited_s = draft.now_s - replica.since_s
    if replica.phase is Phase.GREETING and waited_s > min(GREETING_TIMEOUT_S, timeout_s / 4):
        draft.enter(Phase.GREETING)
        draft.effects.append(Close(f"no reply to our Hello for {waited_s:.1f} s"))
    if stranded(replica) and waited_s > timeout_s:
        if replica.prepared is not None and replica.prepared.heals_only:
            sessions.read_after_all(
                draft, f"no group that holds the job's state was connected for {timeout_s:g} s"
            )
            return
        draft.fail(
            FailureKind.CANNOT_HEAL,
            f"group {me.group!r} holds step {replica.step} of job {me.job!r}, which has committed step "
            f"{replica.frontier_step} at least, and no group that holds it was connected for {timeout_s:g} s "
            f"({replica.waiting or 'no reason given'}). A fresh state never replaces a committed one, nor does one "
            "that is not known to be of this run: restart a group that holds it, restore a checkpoint, or start a "
            "new run under another job name.",
        )
    elif replica.phase is Phase.LEAVING and waited_s > timeout_s:
        draft.log(f"leaves after {timeout_s:g} s although a joiner may still need it", warning=True)
        draft.enter(Phase.LEFT)
