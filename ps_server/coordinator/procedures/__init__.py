"""The operations that the coordinator carries out over many shards: saves, restores, recoveries, tables."""
