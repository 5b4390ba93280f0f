"""Roles, tokens, TLS and signatures."""
