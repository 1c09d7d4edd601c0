"""Training loops from other people's repositories, put on jaxft by a few edited lines, and run under kills."""
