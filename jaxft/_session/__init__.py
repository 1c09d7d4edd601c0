"""The control stream to the coordinator."""
