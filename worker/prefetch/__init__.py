"""Pulls the rows of a loader's batches before their steps begin: see :func:`prefetch`."""

from .batches import Prefetch, prefetch

__all__ = ["Prefetch", "prefetch"]
