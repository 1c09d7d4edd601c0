"""The signs of life that a process gives its supervisor."""
