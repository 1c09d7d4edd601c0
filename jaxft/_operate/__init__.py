"""Commands for those who operate jobs: `jaxft status` and `jaxft doctor`."""
