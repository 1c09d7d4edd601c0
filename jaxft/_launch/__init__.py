"""Runs a job's groups as real processes on this machine, and verifies the result."""
