"""The training parameter server and the coordinator."""
