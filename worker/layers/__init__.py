"""Layers whose rows are on the servers, and the functions that swap a model's own layers for them."""
