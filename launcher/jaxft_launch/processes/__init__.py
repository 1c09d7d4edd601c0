"""Starts processes, and ends them."""
