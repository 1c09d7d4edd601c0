"""What runs in a clone of the repository: the demo, and storms over the examples."""
