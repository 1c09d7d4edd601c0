"""The command `jaxft plan`: a job's goodput and needs, before its machines are booked."""
