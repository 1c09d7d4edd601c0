"""`jaxft chaos`: a job of real replica groups under a seeded storm of kills, compared with an undisturbed run."""
