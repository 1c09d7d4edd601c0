"""Heals, on both ends: as joiner and as donor."""

from collections.abc import Mapping
from dataclasses import replace

from jaxft_protocol.messages import Heal, HealFailed, HealId, Pin, Pinned, Ready, Step
from jaxft_protocol.names import done_again
from jaxft_protocol.replica import sessions
from jaxft_protocol.replica.draft import Turn
from jaxft_protocol.replica.state import Phase, PinState, ReleasePin

_CATCHES_UP = (Phase.HEALING, Phase.FOLLOWING)


def heal(turn: Turn, message: Heal) -> None:
    turn.update(job_history=message.history)
    if message.step < turn.replica.step and message.history == turn.replica.history:
        turn.note(_back_line(turn.replica.step, message.step), warning=True)
    if not message.log_only:
        turn.enter(Phase.HEALING, heal=message, quorum=None, frontier_step=message.step)
    elif turn.replica.phase is Phase.APPLYING:
        turn.update(heal=message, quorum=None, frontier_step=message.step)  # follows once it has applied
    else:
        turn.enter(Phase.FOLLOWING, heal=message, quorum=None, frontier_step=message.step)


def caught_up_to(turn: Turn, heal_id: HealId, number: Step) -> None:
    """The training thread holds state `number`, through heal `heal_id`."""
    assert turn.replica.prepared is not None
    history = turn.replica.job_history or turn.replica.history
    prepared = replace(turn.replica.prepared, heals_only=False)
    turn.update(step=number, prepared=prepared, digest=None, digest_taken=False, history=history)
    sessions.no_longer_busy(turn)
    replica = turn.replica
    if replica.heal is None or replica.heal.heal_id != heal_id or replica.phase not in _CATCHES_UP:
        return  # that heal has been abandoned; the state is still valid
    if replica.phase is Phase.HEALING:
        turn.enter(Phase.FOLLOWING)
    if replica.quorum is not None and replica.quorum.step == number:
        turn.enter(Phase.WORKING)
    if replica.frontier_step is not None and number >= replica.frontier_step:
        turn.say(Ready(heal_id, number))


def heal_broke(turn: Turn, heal_id: HealId, reason: str) -> None:
    turn.note(f"heal failed: {reason}; asks for other donors", warning=True)
    turn.say(HealFailed(heal_id, reason, turn.replica.step, turn.replica.history))
    turn.enter(Phase.JOINING, heal=None, quorum=None)


def digested(turn: Turn, number: Step, digest: int | None) -> None:
    """The training thread has taken the digest of state `number`, or found that it cannot be taken."""
    replica = turn.replica
    if number == replica.step:
        turn.update(digest=digest, digest_taken=True)
    due = [heal_id for heal_id, of in replica.digests_due.items() if of == number]
    turn.update(digests_due={heal_id: of for heal_id, of in replica.digests_due.items() if of != number})
    for heal_id in sorted(due):
        turn.say(Pinned(heal_id, digest))
    if turn.replica.phase is Phase.PRESENT:
        sessions.join_or_wait(turn)


def _answer_pins(turn: Turn) -> None:
    """Answer at once if the digest is already known."""
    replica = turn.replica
    if replica.digest_taken and replica.step in replica.digests_due.values():
        digested(turn, replica.step, replica.digest)


def pin(turn: Turn, message: Pin) -> None:
    heal_id, due = message.heal_id, turn.replica.digests_due
    turn.update(pins=turn.replica.pins | {heal_id})
    turn.effects.append(PinState(heal_id, message.step, message.log_only))
    if not message.log_only:
        turn.update(digests_due={**due, heal_id: message.step})
        _answer_pins(turn)


def release(turn: Turn, heal_id: HealId) -> None:
    turn.update(pins=turn.replica.pins - {heal_id})
    turn.update(digests_due=_without(turn.replica.digests_due, heal_id))
    turn.effects.append(ReleasePin(heal_id))


def _without(due: Mapping[HealId, Step], heal_id: HealId) -> dict[HealId, Step]:
    return {other: number for other, number in due.items() if other != heal_id}


def _back_line(held: Step, step: Step) -> str:
    return (
        f"this group goes back from step {held} to step {step}: the job resumed from an older state while this group "
        f"was away; {done_again(held - step)}"
    )
