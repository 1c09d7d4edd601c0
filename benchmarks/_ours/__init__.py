"""What workers on our side do."""
