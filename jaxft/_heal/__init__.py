"""Healing: donors keep a state and a log of means for a joiner, which fetches them over plain TCP."""
