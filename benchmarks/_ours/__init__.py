"""Workers of our side."""
