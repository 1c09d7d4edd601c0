"""What the coordinator and the groups share: messages, credentials, and both state machines."""
