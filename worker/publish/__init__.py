"""Publishes a trained model: its rows, its dense weights and its exported program."""
