"""Keeps the groups of a job alive: `jaxft launch`."""
