"""A worker's membership in a cluster: its lease, its fault reports and its connection to the shards."""
