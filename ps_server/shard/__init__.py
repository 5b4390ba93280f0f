"""The parameter server: one shard's rows and data plane, told by the coordinator what to serve."""
