"""Time passes: heartbeats, and waits that end."""

from jaxft_protocol.messages import Heartbeat
from jaxft_protocol.replica import sessions
from jaxft_protocol.replica.draft import DONE, Turn
from jaxft_protocol.replica.state import FailureKind, HangUp, Phase, Tick

# A coordinator answers a greeting in milliseconds; one whose machine is gone, or that is frozen, not at all.
GREETING_TIMEOUT_S = 5.0
# As many as the coordinator waits for a group's: the timeout is the same in both directions.
HEARTBEATS_UNANSWERED = 5


def tick(turn: Turn, event: Tick) -> None:
    replica = turn.replica
    online = replica.phase not in (Phase.OFFLINE, Phase.GREETING, Phase.LEFT, Phase.FAILED)
    if online and turn.now_s >= replica.next_heartbeat_s:
        turn.update(next_heartbeat_s=turn.now_s + replica.heartbeat_interval_s, progress=event.progress)
        turn.say(Heartbeat(*event.computed, event.away, event.progress != replica.progress))
    silent_s = turn.now_s - replica.heard_s
    timeout_s = replica.heartbeat_interval_s * HEARTBEATS_UNANSWERED
    # If this process itself stood still, what the coordinator said meanwhile may still have to be read.
    if turn.now_s - replica.last_tick_s > timeout_s / 2:
        turn.update(heard_s=turn.now_s)
    elif online and silent_s > timeout_s:
        turn.update(heard_s=turn.now_s)
        if replica.phase not in DONE:
            # No more welcome there: of several coordinators, another is dialled next.
            turn.enter(Phase.GREETING)
        turn.effects.append(HangUp(f"no word from it for {silent_s:.1f} s"))
    turn.update(last_tick_s=turn.now_s)
    _check(turn)


def _check(turn: Turn) -> None:
    replica, me = turn.replica, turn.replica.identity
    timeout_s = replica.failure_timeout_s
    if replica.offline_since_s is not None and turn.now_s - replica.offline_since_s > timeout_s:
        if replica.phase not in DONE:
            turn.fail(
                FailureKind.COORDINATOR_UNREACHABLE,
                f"no answer from the coordinator {me.coordinator} for {timeout_s:g} s "
                f"(last: {replica.offline_reason}). Is it running, and is the address right? "
                "`jaxft-coordinator --help` tells how to start one.",
            )
        return
    waited_s = turn.now_s - replica.since_s
    if replica.phase is Phase.GREETING and waited_s > min(GREETING_TIMEOUT_S, timeout_s / 4):
        turn.enter(Phase.GREETING)
        turn.effects.append(HangUp(f"no answer to our greeting for {waited_s:.1f} s"))
    behind = replica.frontier_step is not None and replica.step != replica.frontier_step
    # With a state of the job's history it can be part of a resumption, and may wait for the others to come.
    alone = not replica.history and not replica.frontier_held
    if replica.phase is Phase.JOINING and behind and alone and waited_s > timeout_s:
        if replica.prepared is not None and replica.prepared.heals_only:
            sessions.read_after_all(
                turn, f"for {timeout_s:g} s no group that holds the job's state was there"
            )
            return
        turn.fail(
            FailureKind.CANNOT_HEAL,
            f"group {me.group!r} holds step {replica.step} of job {me.job!r}, whose last committed step is "
            f"{replica.frontier_step}, and for {timeout_s:g} s no group that holds it was there "
            f"({replica.waiting or 'no reason given'}). A fresh state never replaces a committed one: bring a "
            "group that holds it back, or start a new run under another job name.",
        )
    elif replica.phase is Phase.LEAVING and waited_s > timeout_s:
        turn.note(f"leaves after {timeout_s:g} s although a joiner may still need it", warning=True)
        turn.enter(Phase.LEFT)
