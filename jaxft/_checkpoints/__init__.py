"""Checkpoints on disk, for the case that all groups of a job die at once."""

from jaxft._checkpoints._checkpoints import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored"]
