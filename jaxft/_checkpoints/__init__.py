"""Checkpoints on disk, for the case that all groups of a job die at once."""

from jaxft._checkpoints._checkpoints import Checkpoints
from jaxft._checkpoints._reading import Restored

__all__ = ["Checkpoints", "Restored"]
