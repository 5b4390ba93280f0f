"""Roles, tokens, TLS and signatures of a cluster's processes."""
