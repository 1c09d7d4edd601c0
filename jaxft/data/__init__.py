"""Batches as a pure function of (step, shard), from sources with random access, iterators and the state."""

from jaxft.data._batches import Batch, Batches, Samples, Source
from jaxft.data._from_state import FromState
from jaxft.data._prefetch import Prefetch
from jaxft.data._shuffle import mix, permute
from jaxft.data._streams import Streams, from_iterator

__all__ = [
    "Batch",
    "Batches",
    "FromState",
    "Prefetch",
    "Samples",
    "Source",
    "Streams",
    "from_iterator",
    "mix",
    "permute",
]
