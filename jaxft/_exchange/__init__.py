"""The all-reduce across groups, over TCP on the host."""
