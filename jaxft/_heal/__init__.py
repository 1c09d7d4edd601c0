"""Healing: donors keep a state and a log of means for a joiner, which fetches both over plain TCP."""
