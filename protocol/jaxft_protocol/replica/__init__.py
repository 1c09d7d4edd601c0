"""The state machine of a replica group."""
