"""What the coordinator does over many shards: saves, restores, recoveries, tables."""
