"""Asks a coordinator: `jaxft status` and `jaxft drain`."""
