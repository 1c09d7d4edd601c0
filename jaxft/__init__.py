"""Fault-tolerant training for JAX: failures change the speed of a run, never the run."""
