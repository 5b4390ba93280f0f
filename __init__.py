"""Sparserow: a parameter server for sparse recommendation models, native to PyTorch."""
