"""The phases in which faults can strike a group."""

# A member of the quorum goes through these in each step.
STEP_PHASES = ("compute", "exchange", "vote", "apply")
# A returning group goes through these, and holds nothing yet that the job could lose.
RETURN_PHASES = ("boot", "heal", "replay")
# At any time in a member's step.
ANY = "any"
PHASES = (*STEP_PHASES, *RETURN_PHASES, ANY)
