"""The coordinator of jaxft: who takes part in a step, and whether the step counts."""
