"""Sums of contributions, by the compiled lane where there is one and by numpy where not: the bits are the same."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxft._arrays._layout import Region
from jaxft._exchange import _compiled, _reduce
from jaxft._exchange._tree import Node


def combine_into(out: np.ndarray, sources: Mapping[Node, np.ndarray], shards: int, region: Region) -> None:
    """Write the mean or the sum over all shards to `out`; see `_reduce.combine_into`."""
    (_compiled.library() or _reduce).combine_into(out, sources, shards, region)


def add_into(
    out: np.ndarray,
    offsets: Sequence[int],
    lefts: Sequence[np.ndarray],
    rights: Sequence[np.ndarray],
    region: Region,
) -> None:
    """Add the leaves of two nodes of a region in the dtype of sums. See `_reduce.add_into`."""
    library = _compiled.library()
    if library is None:
        _reduce.add_into(out, offsets, lefts, rights)
    else:
        library.add_into(out, offsets, lefts, rights, region)
