"""Heals, on both ends: as joiner and as donor."""

from collections.abc import Mapping
from dataclasses import replace

from jaxft_protocol.messages import Heal, HealFailed, HealId, Pin, Pinned, Ready, Step
from jaxft_protocol.names import done_again
from jaxft_protocol.replica import sessions
from jaxft_protocol.replica.draft import Draft
from jaxft_protocol.replica.state import Phase, PinState, ReleasePin

_CATCHES_UP = (Phase.HEALING, Phase.FOLLOWING)


def heal(draft: Draft, message: Heal) -> None:
    draft.update(job_history=message.history, frontier_held=True)
    if message.step < draft.replica.step and message.history == draft.replica.history:
        draft.log(_back_line(draft.replica.step, message.step), warning=True)
    if draft.replica.phase is Phase.APPLYING:
        draft.update(heal=message, quorum=None, frontier_step=message.step)  # begins once it has applied
    elif not message.log_only:
        draft.enter(Phase.HEALING, heal=message, quorum=None, frontier_step=message.step)
    else:
        draft.enter(Phase.FOLLOWING, heal=message, quorum=None, frontier_step=message.step)


def caught_up_to(draft: Draft, heal_id: HealId, number: Step) -> None:
    """The training thread holds state `number`, through heal `heal_id`."""
    assert draft.replica.prepared is not None
    history = draft.replica.job_history or draft.replica.history
    prepared = replace(draft.replica.prepared, heals_only=False)
    draft.update(step=number, prepared=prepared, digest=None, digest_taken=False, history=history)
    sessions.no_longer_busy(draft)
    replica = draft.replica
    if replica.heal is None or replica.heal.heal_id != heal_id or replica.phase not in _CATCHES_UP:
        return  # that heal has been abandoned; the state is still valid
    if replica.phase is Phase.HEALING:
        draft.enter(Phase.FOLLOWING)
    if replica.quorum is not None and replica.quorum.step == number:
        draft.enter(Phase.WORKING)
    if replica.frontier_step is not None and number >= replica.frontier_step:
        draft.send(Ready(heal_id, number))


def heal_broke(draft: Draft, heal_id: HealId, reason: str) -> None:
    draft.log(f"heal failed: {reason}; asks for other donors", warning=True)
    draft.send(HealFailed(heal_id, reason, draft.replica.step, draft.replica.history))
    draft.enter(Phase.JOINING, heal=None, quorum=None)


def digested(draft: Draft, number: Step, digest: int | None) -> None:
    """The training thread has taken the digest of state `number`, or found that it cannot be taken."""
    replica = draft.replica
    if number == replica.step:
        draft.update(digest=digest, digest_taken=True)
    due = [heal_id for heal_id, of in replica.digests_due.items() if of == number]
    draft.update(digests_due={heal_id: of for heal_id, of in replica.digests_due.items() if of != number})
    for heal_id in sorted(due):
        draft.send(Pinned(heal_id, digest))
    if draft.replica.phase is Phase.PRESENT:
        sessions.join_or_wait(draft)


def _answer_pins(draft: Draft) -> None:
    """Answer at once if the digest is already known."""
    replica = draft.replica
    if replica.digest_taken and replica.step in replica.digests_due.values():
        digested(draft, replica.step, replica.digest)


def pin(draft: Draft, message: Pin) -> None:
    heal_id, due = message.heal_id, draft.replica.digests_due
    draft.update(pins=draft.replica.pins | {heal_id})
    draft.effects.append(PinState(heal_id, message.step, message.log_only, message.stripe))
    if not message.log_only:
        draft.update(digests_due={**due, heal_id: message.step})
        _answer_pins(draft)


def release(draft: Draft, heal_id: HealId) -> None:
    draft.update(pins=draft.replica.pins - {heal_id})
    draft.update(digests_due=_without(draft.replica.digests_due, heal_id))
    draft.effects.append(ReleasePin(heal_id))


def _without(due: Mapping[HealId, Step], heal_id: HealId) -> dict[HealId, Step]:
    return {other: number for other, number in due.items() if other != heal_id}


def _back_line(held: Step, step: Step) -> str:
    return (
        f"this group goes back from step {held} to step {step}: the job resumed from an older state while this group "
        f"was away; {done_again(held - step)}"
    )
