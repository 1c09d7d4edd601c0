"""Which groups donate to a joiner, and which stripe of the state each keeps for it.

A donor has to copy the state that it keeps once it trains on. So at most `MAX_DONORS` donors are asked, each for a
stripe. If such a heal fails, or its donors differ, or a single donor sends its digest, the next heal asks all donors
for the whole state: then it succeeds as long as one donor serves, and a majority decides which state is right. If
that fails, it may be because no donor has room for the whole state, so the next heal is of stripes again.
"""

from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Group, GroupPhase, Holder
from jaxft_protocol.messages import WHOLE, Stripe

# A joiner that fetches from four donors is mostly limited by its own link.
MAX_DONORS = 4


def candidates(draft: Draft) -> list[Group]:
    """Return who can donate: members; else groups that are ready; else groups that are leaving."""
    holders = draft.holders()
    for phase in (GroupPhase.MEMBER, GroupPhase.READY):
        if staying := [holder for holder in holders if holder.phase is phase]:
            return staying
    return holders


def chosen(draft: Draft, joiner: Group, able: list[Group]) -> list[tuple[Group, Stripe]]:
    """Choose donors for a heal among the groups that are able to donate, in their order, each with its stripe.

    Donors that are about to leave, or are away, are the last choice; then those with the most heals to serve. Heals
    that begin at the same time begin at different donors.
    """
    if asks_all(joiner):
        return [(donor, WHOLE) for donor in able]
    serves = _heals_served(draft)
    first = int(draft.job.last_heal_id) % len(able)
    turns = able[first:] + able[:first]
    turns.sort(key=lambda group: (group.draining, group.away, serves.get(group.holder, 0)))
    donors = [group for group in able if group in turns[:MAX_DONORS]]
    return [(donor, Stripe(number, len(donors))) for number, donor in enumerate(donors)]


def asks_all(joiner: Group) -> bool:
    """Whether a heal of this group asks all donors for the whole state: its last one, of stripes, has failed."""
    return joiner.heals_failed % 2 == 1


def _heals_served(draft: Draft) -> dict[Holder, int]:
    """How many groups fetch a state from each donor."""
    found: dict[Holder, int] = {}
    for joiner in draft.job.groups.values():
        if joiner.phase is GroupPhase.HEALING:
            for holder in joiner.donors:
                found[holder] = found.get(holder, 0) + 1
    return found
