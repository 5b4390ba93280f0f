"""How the rows of planned lookups are made: by this rank, by the leader of a tensor group, by all ranks together."""
