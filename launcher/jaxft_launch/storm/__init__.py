"""Makes faults, and compares the bits: `jaxft chaos`."""
