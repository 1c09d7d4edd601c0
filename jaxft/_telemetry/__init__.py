"""Reports of a group's steps, for people and for their tools: observers, and a file of events."""
