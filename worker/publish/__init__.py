"""Publishes a trained model: rows, dense weights and the exported program."""
