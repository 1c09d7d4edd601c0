"""How large quorums exchange: in rows and columns (`jaxft/_exchange/_grid.py`)."""

# From so many members on. Measured: below, the additional rounds cost more than the connections that they save
# (docs/performance.md). All members, and the coordinator, must have the same number.
LEAST_MEMBERS = 48
