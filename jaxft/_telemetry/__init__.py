"""What a group tells of its steps, for people and for their tools: a file of events, and traces."""
