"""Metrics of predictions, computed from scores and labels."""
