"""The coordinator of jaxft: decides which groups take part in a step, and whether the step counts."""
