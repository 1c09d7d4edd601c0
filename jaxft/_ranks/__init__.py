"""The processes of one group: rank 0 leads, and every rank carries out the same operations in the same order."""
