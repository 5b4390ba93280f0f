"""The native core: `_server` (stores and shards), `_client` (clients and sessions), `_bench` and the torch ops."""
