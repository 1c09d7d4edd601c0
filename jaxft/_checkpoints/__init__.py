"""Checkpoints on disk, for when every group of a job has died at once."""

from jaxft._checkpoints._checkpoints import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored"]
