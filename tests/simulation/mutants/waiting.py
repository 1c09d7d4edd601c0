"""Waits: long steps, slow links, pauses, late messages, and processes that hang."""

from dataclasses import replace
from typing import Any

from jaxft_protocol.coordinator import progress
from jaxft_protocol.replica import quorums as replica_quorums
from jaxft_protocol.replica import state as r

from ..exchange import Hub
from ..process import Process
from ._mutant import mutant

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
    """A group that evaluates is evicted and blamed, as a group whose step hangs."""
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
def _nobody_hears_that_all_have_computed(_tell: Any) -> Any:
    """Time never begins to count in an exchange, so a link that carries nothing is never found out."""
    return lambda _draft, _quorum: None


@mutant(progress, "tell_over", "hang", min_replicas=2, heartbeat_timeout_s=0.5, storm_s=5.0)
def _nobody_hears_that_a_quorum_has_ended(_tell: Any) -> Any:
    """Members wait in the exchange of a quorum that is no more, and do nothing else that is asked of them."""
    return lambda _draft, _quorum: None


@mutant(progress, "_spared")
def _a_group_that_is_needed_is_stood_aside(_spared: Any) -> Any:
    """A group that is away loses its place though the job cannot go on without it."""
    return lambda _draft, found, _living: found


# ---- liveness ----


@mutant(progress, "late")
def _a_heartbeat_is_taken_for_progress(_hung: Any) -> Any:
    """A group whose training hangs stays in the quorum as long as its heart beats (TorchFT)."""
    return lambda _draft: []


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
    """An applied commit is not forgotten, and done once more after the next Welcome."""

    def mutated(draft: Any, number: Any) -> None:
        vote, heard = draft.replica.vote, draft.replica.commit_heard
        applied(draft, number)
        draft.update(vote=draft.replica.vote or vote, commit_heard=draft.replica.commit_heard or heard)

    return mutated
