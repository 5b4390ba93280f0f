"""Writes the reference pages of docs/ from the code."""
