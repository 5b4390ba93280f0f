"""The parameter server: the rows and data plane of one shard, which the coordinator controls."""
