"""Metrics and losses of predictions, computed from scores and labels."""

from .item_frequency import ItemFrequency
from .retrieval import hit_rate, ranks_among_all

__all__ = ["ItemFrequency", "hit_rate", "ranks_among_all"]
