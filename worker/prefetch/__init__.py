"""Batches whose rows are here before their step begins: see :func:`prefetch`."""

from .batches import Prefetch, prefetch

__all__ = ["Prefetch", "prefetch"]
