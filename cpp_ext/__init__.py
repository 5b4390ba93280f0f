"""The native core: `_server` (store, shard), `_client` (client, session) and the torch ops."""
