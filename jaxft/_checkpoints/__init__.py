"""Checkpoints on disk, for when every group of a job has died at once."""

from jaxft._checkpoints._checkpoints import CannotRestore, Checkpoints, Restored

__all__ = ["CannotRestore", "Checkpoints", "Restored"]
