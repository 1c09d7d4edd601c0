"""What `jaxft demo` and `jaxft chaos` share: a job's groups as real processes here, and the proof of how it went."""
