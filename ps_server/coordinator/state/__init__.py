"""The state of a cluster as plain objects: no clock, no network; times are passed in."""
