"""Arrays as bytes: their layout, where they lie, and their digests."""
