"""`jaxft demo`: a job of three replica groups on this machine, each killed once, compared with an undisturbed run."""
