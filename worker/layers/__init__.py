"""Layers whose rows are on the servers, and the swap of a model's own layers for them."""
