"""Whose state differs: the rule by which fingerprints that came with the votes are compared."""

from collections import Counter
from collections.abc import Hashable, Mapping

from jaxft_protocol.messages import GroupName
from jaxft_protocol.names import natural_key


def odd_ones(digests: Mapping[GroupName, Hashable]) -> tuple[GroupName, ...] | None:
    """Return the groups whose digest is not the majority's, in order; None if no digest has a majority.

    A majority is more than half of those who gave one. So of two that differ nobody is right, and of four that
    stand two against two: nothing here tells the truth from the error.
    """
    if len(set(digests.values())) <= 1:
        return ()
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return None
    return tuple(sorted((name for name, other in digests.items() if other != digest), key=natural_key))


def listed(digests: Mapping[GroupName, int] | Mapping[GroupName, int | None]) -> str:
    """Who has which digest, for people: `group-0, group-2: 9e30145e19d32ac3; group-1: ...`, the commonest first."""
    by_digest: dict[int | None, list[GroupName]] = {}
    for name in sorted(digests, key=natural_key):
        by_digest.setdefault(digests[name], []).append(name)
    largest = sorted(by_digest.items(), key=lambda entry: -len(entry[1]))[:4]
    return "; ".join(
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}: "
        f"{'unknown' if digest is None else f'{digest:016x}'}"
        for digest, names in largest
    )
