"""The coordinator: table registry, slot map, shard leases and job membership, served by gRPC.

``cluster`` has the state that is saved; ``shard_calls`` informs the shards; ``service`` answers requests.
"""
