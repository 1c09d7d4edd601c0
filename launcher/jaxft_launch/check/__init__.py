"""Checks machines: `jaxft doctor` and `jaxft check`."""
