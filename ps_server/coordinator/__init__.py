"""The coordinator: table registry, slot map, shard leases and job membership, served by gRPC.

``cluster`` holds what is known and is saved; ``shard_calls`` tells the shards; ``service`` answers requests.
"""
