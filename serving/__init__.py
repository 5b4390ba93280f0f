"""The serving parameter server."""
