"""The state of a cluster as plain objects, without clock or network: callers pass the times in."""
