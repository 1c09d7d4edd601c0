"""From one training step to the programs that compute its shards and apply its means."""
