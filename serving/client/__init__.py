"""The client of serving processes, which finds the replica that answers for a key."""
