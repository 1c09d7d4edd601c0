"""What donors keep of a state once they have trained on: stripes, which must make up the whole for a joiner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxft_protocol.messages import Stripe

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Keeper(Generic[T]):
    """A donor that has reached the pinned state; `live`: it has not trained on yet, and so has all of it."""

    donor: T
    stripe: Stripe
    live: bool


def feeders(keepers: Sequence[Keeper[T]], random: float) -> list[T]:
    """The donors that give a joiner the whole state: a donor with all of it, or one for each stripe; or none."""
    whole = [keeper.donor for keeper in keepers if keeper.live or keeper.stripe.count == 1]
    if whole:
        return [whole[int(random * len(whole))]]
    parts = {keeper.stripe: keeper.donor for keeper in keepers}
    complete = all(len(parts) == stripe.count for stripe in parts)
    return list(parts.values()) if complete else []
