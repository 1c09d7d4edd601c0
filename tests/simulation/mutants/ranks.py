"""Groups of several processes."""

from dataclasses import replace
from typing import Any

from jaxft_protocol.coordinator import sessions
from jaxft_protocol.ranks import follower, lanes, leader
from jaxft_protocol.ranks.messages import Outcome, StopWork, Verdict
from jaxft_protocol.values import changed

from ._mutant import mutant
from ._settings import RANKS_THAT_DIFFER, THREE_OF_TWO_RANKS


@mutant(leader, "_looked", "rank", "numb", **THREE_OF_TWO_RANKS)
def _a_verdict_before_all_ranks_have_the_means(looked: Any) -> Any:
    """Rank 0 continues as soon as its own part of the exchange is done, and all ranks apply."""

    def mutated(state: Any, now_s: float) -> Any:
        if state.own is not None:
            done = Outcome(state.what, Verdict())
            heard = tuple(replace(rank, outcomes=rank.outcomes or (done,)) for rank in state.ranks)
            state = changed(state, ranks=heard)
        return looked(state, now_s)

    return mutated


@mutant(leader, "_verdict", "rank", "link", **THREE_OF_TWO_RANKS)
def _a_vote_with_the_failed_exchange_of_one_rank(_verdict: Any) -> Any:
    """Rank 0 votes by its own part of the exchange, whatever the others report."""
    return lambda state, own: replace(own, stopped=state.redirected)


@mutant(follower, "take", **THREE_OF_TWO_RANKS)
def _a_follower_is_one_order_behind(take: Any) -> Any:
    """A rank takes an order only once the next one has come."""

    def mutated(state: Any, kind: Any, about: str) -> Any:
        return take(state, kind, about) if len(state.orders) > 1 else (state, None)

    return mutated


@mutant(follower, "step", **THREE_OF_TWO_RANKS)
def _the_newest_order_first(step: Any) -> Any:
    """A rank that falls behind takes the newest order, and then the older ones."""

    def mutated(state: Any, event: Any) -> Any:
        match event:
            case follower.Heard(message) if not isinstance(message, StopWork):
                return changed(state, orders=(message, *state.orders)), ()
            case _:
                return step(state, event)

    return mutated


@mutant(leader, "_looked", "rank", "link", "numb", **THREE_OF_TWO_RANKS)
def _the_others_are_not_stopped(looked: Any) -> Any:
    """A rank whose exchange continues waits though another rank's has failed."""

    def mutated(state: Any, now_s: float) -> Any:
        after, effects = looked(changed(state, stops=True), now_s)
        return changed(after, stops=state.stops), effects

    return mutated


@mutant(leader, "step", **(THREE_OF_TWO_RANKS | {"exchange_s": 8.0, "storm_s": 8.0, "faults": ()}))
def _what_other_ranks_move_does_not_count(step: Any) -> Any:
    """A group whose rank 0 waits for the slower lanes of another rank seems to hang."""

    def mutated(state: Any, event: Any, now_s: float) -> Any:
        after, effects = step(state, event, now_s)
        return after, tuple(effect for effect in effects if not isinstance(effect, leader.GetsOn))

    return mutated


@mutant(lanes, "rank_of", **RANKS_THAT_DIFFER)
def _lanes_mixed_up(rank_of: Any) -> Any:
    """A group asks the wrong rank of another group for its lanes."""
    return lambda lane, ranks, count: ranks - 1 - rank_of(lane, ranks, count)


@mutant(lanes, "span_of", **RANKS_THAT_DIFFER)
def _a_rank_takes_the_lanes_of_the_next(span_of: Any) -> Any:
    """Ranks are counted from 1 where lanes are dealt, and from 0 where they are asked for."""
    return lambda rank, ranks, count: span_of((rank + 1) % ranks, ranks, count)


@mutant(lanes, "spans", **RANKS_THAT_DIFFER)
def _spans_as_in_the_own_group(_spans: Any) -> Any:
    """A group does not see that its rank meets several ranks of a larger group."""
    return lambda own, _sizes, _count: (own,)


@mutant(sessions, "_turn_away", "double", **THREE_OF_TWO_RANKS)
def _two_leaders(turn_away: Any) -> Any:
    """When a second process leads a group, the first one does not learn it, and continues with its ranks."""

    def mutated(draft: Any, session: Any, message: Any, known: Any) -> None:
        sessions.remove(draft, known, "another process takes part")
        turn_away(draft, session, message, known)

    return mutated
