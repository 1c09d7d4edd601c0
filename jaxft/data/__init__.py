"""Batches as a pure function of (step, shard), from any source with random access."""

from jaxft.data._batches import Batch, Batches, Source
from jaxft.data._shuffle import mix, permute

__all__ = ["Batch", "Batches", "Source", "mix", "permute"]
