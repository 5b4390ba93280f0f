"""Metrics and losses of predictions, computed from scores and labels."""
