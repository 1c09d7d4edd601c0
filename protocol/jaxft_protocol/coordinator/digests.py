"""Compare digests of states, and find the groups that differ from the majority."""

from collections import Counter
from collections.abc import Hashable, Mapping

from jaxft_protocol.messages import GroupName
from jaxft_protocol.names import natural_key


def odd_ones(digests: Mapping[GroupName, Hashable]) -> tuple[GroupName, ...] | None:
    """Return the groups whose digest is not the majority's, in order; None if no digest has a majority.

    A majority is more than half of the groups that sent a digest. With two different digests of two groups, or two
    against two of four, there is no majority, and no way to tell which state is right.
    """
    if len(set(digests.values())) <= 1:
        return ()
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return None
    return tuple(sorted((name for name, other in digests.items() if other != digest), key=natural_key))


def listed(digests: Mapping[GroupName, int] | Mapping[GroupName, int | None]) -> str:
    """List the groups by digest, the largest set first: `group-0, group-2: 9e30145e19d32ac3; group-1: ...`."""
    by_digest: dict[int | None, list[GroupName]] = {}
    for name in sorted(digests, key=natural_key):
        by_digest.setdefault(digests[name], []).append(name)
    largest = sorted(by_digest.items(), key=lambda entry: -len(entry[1]))[:4]
    return "; ".join(
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}: "
        f"{'unknown' if digest is None else f'{digest:016x}'}"
        for digest, names in largest
    )
