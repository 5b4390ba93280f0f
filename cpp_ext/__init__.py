"""The native core: `_server` (stores and shards), `_client` (clients and sessions) and the torch ops."""
