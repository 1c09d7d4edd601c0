"""What a process tells its supervisor."""
