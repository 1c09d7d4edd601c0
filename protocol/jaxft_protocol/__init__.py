"""Shared by the coordinator and the groups: messages, credentials, and both state machines."""
