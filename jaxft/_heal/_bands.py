"""The division of a state into bands, of which each donor of a heal keeps some: its stripe.

The leaves of a state, in their order, form `BANDS` bands of about the same size. A leaf lies in one band as a whole,
because a donor captures whole leaves. Both ends derive the bands from the leaves of the whole state, whatever part of
each leaf a process holds. So they agree without a message, for any number of donors and of processes.
"""

from collections.abc import Sequence

from jaxft_protocol.messages import Stripe
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._leaf_types import LeafType
from jaxft._arrays._pieces import Pieces

# As many bands in each stripe of 1, 2, 3 or 4.
BANDS = 12
# A state of at most this size is not divided: what a donor would save is not worth a heal that begins again because
# one donor has died.
UNDIVIDED_BYTES = 1 << 20
# The band of a leaf that each donor keeps.
EVERYWHERE = -1


def bands_of(leaves: Sequence[LeafType]) -> list[int]:
    """The band of each leaf, in ascending order: the one in which its middle lies. `leaves`: the whole state."""
    total_bytes = sum(leaf.size_bytes for leaf in leaves)
    if total_bytes <= UNDIVIDED_BYTES:
        return [EVERYWHERE] * len(leaves)
    found: list[int] = []
    start = 0
    for leaf in leaves:
        middle_twice = 2 * start + leaf.size_bytes
        found.append(min(BANDS - 1, middle_twice * BANDS // (2 * total_bytes)))
        start += leaf.size_bytes
    return found


def bands_in(pieces: Pieces, span: Span | None = None) -> list[int]:
    """The band of each array that `pieces.types(span)` describes."""
    bands = bands_of(pieces.lanes.leaf_types)
    return [bands[number] for number in pieces.leaf_numbers(span)]


def keeps(stripe: Stripe, band: int) -> bool:
    """Whether a donor keeps this band; of all stripes of a heal exactly one does, unless it is EVERYWHERE."""
    return band == EVERYWHERE or band * stripe.count // BANDS == stripe.number
