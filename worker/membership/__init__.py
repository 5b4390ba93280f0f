"""What a worker owes the cluster: its lease, its faults, its connection to the shards."""
