"""The native core and its bindings: `_server` (store, shard) and `_client` (client, session); the torch ops load from `worker`."""
