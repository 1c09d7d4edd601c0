"""The gRPC shell around the coordinator's core."""
