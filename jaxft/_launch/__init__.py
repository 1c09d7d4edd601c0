"""A job's groups as real processes on this machine, and the proof of how it went."""
