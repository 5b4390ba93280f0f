"""Simulates which keys a memory of so many rows has under four policies, on the trace that a store was measured with.

``lru`` evicts the row whose last use is the longest ago. ``lfu`` evicts the one with the fewest uses, and of those the
one whose last use is the longest ago. ``s3-fifo`` has three queues (Yang et al., "FIFO queues are all you need for
cache eviction", SOSP 2023): a tenth of the rows in a small one, the others in a main one that gives rows with uses
another turn, and a ghost queue of keys that left the small one. ``belady`` evicts the row whose next use is the
farthest away, which no policy can beat (Belady, "A study of replacement algorithms", 1966).

A key is used once in each batch that has it, as the store counts its hits.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_SMALL_PARTS = 10  # the small queue has one in so many rows
_MOST_USES = 3  # that S3-FIFO counts


def hit_share(policy: str, batches: Sequence[Keys], resident: Keys, measured: int) -> float:
    """Returns the share of the keys of the last ``measured`` batches that were in memory when they were used.

    Args:
        policy: ``lru``, ``lfu``, ``s3-fifo`` or ``belady``.
        batches: the keys of each batch, each once.
        resident: the keys in memory before the first batch, the coldest first; there is room for so many.
        measured: the number of batches that count, in [1, number of batches].
    """
    hits = _POLICIES[policy]([batch.tolist() for batch in batches], resident.tolist())
    counted = sum(len(batch) for batch in batches[-measured:])
    return sum(hits[-measured:]) / counted


def _lru(batches: list[list[int]], resident: list[int]) -> list[int]:
    rows = OrderedDict.fromkeys(resident)
    room, hits = len(resident), []
    for batch in batches:
        found = 0
        for key in batch:
            if key in rows:
                found += 1
                rows.move_to_end(key)
                continue
            if len(rows) >= room:
                rows.popitem(last=False)
            rows[key] = None
        hits.append(found)
    return hits


def _lfu(batches: list[list[int]], resident: list[int]) -> list[int]:
    uses = dict.fromkeys(resident, 1)
    by_uses: dict[int, OrderedDict[int, None]] = {1: OrderedDict.fromkeys(resident)}
    room, fewest, hits = len(resident), 1, []
    for batch in batches:
        found = 0
        for key in batch:
            count = uses.get(key)
            if count is not None:
                found += 1
                del by_uses[count][key]
                if not by_uses[count]:
                    del by_uses[count]
                    fewest += fewest == count
            elif len(uses) >= room:
                while fewest not in by_uses:
                    fewest += 1
                coldest, _ = by_uses[fewest].popitem(last=False)
                if not by_uses[fewest]:
                    del by_uses[fewest]
                del uses[coldest]
            uses[key] = (count or 0) + 1
            fewest = min(fewest, uses[key])
            by_uses.setdefault(uses[key], OrderedDict())[key] = None
        hits.append(found)
    return hits


class _S3Fifo:
    def __init__(self, resident: list[int]) -> None:
        self._room = len(resident)
        self._small_room = max(1, self._room // _SMALL_PARTS)
        self._small: deque[int] = deque()
        self._main = deque(resident)
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses = dict.fromkeys(resident, 0)  # of the rows in memory

    def use(self, key: int) -> bool:
        """Returns whether the key was in memory; it is afterwards."""
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, _MOST_USES)
            return True
        while len(self._uses) >= self._room:
            self._evict()
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)
        return False

    def _evict(self) -> None:
        if len(self._small) >= self._small_room or not self._main:
            key = self._small.popleft()
            if self._uses[key] > 0:
                self._uses[key] = 0
                self._main.append(key)
                return
            self._ghosts[key] = None
            if len(self._ghosts) > self._room:
                self._ghosts.popitem(last=False)
        else:
            key = self._main.popleft()
            if self._uses[key] > 0:
                self._uses[key] -= 1
                self._main.append(key)
                return
        del self._uses[key]


def _s3_fifo(batches: list[list[int]], resident: list[int]) -> list[int]:
    rows = _S3Fifo(resident)
    return [sum(rows.use(key) for key in batch) for batch in batches]


def _belady(batches: list[list[int]], resident: list[int]) -> list[int]:
    """Evicts also the key that has just come, where its own next use is the farthest away."""
    never = len(batches)
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(batches) - 1, -1, -1):
        next_uses.append([following.get(key, never) for key in batches[number]])
        following.update(dict.fromkeys(batches[number], number))
    next_uses.reverse()
    rows = {key: following.get(key, never) for key in resident}
    farthest = [(-use, key) for key, use in rows.items()]
    heapq.heapify(farthest)
    hits = []
    for batch, uses in zip(batches, next_uses, strict=True):
        found = 0
        for key, use in zip(batch, uses, strict=True):
            found += key in rows
            rows[key] = use
            heapq.heappush(farthest, (-use, key))
            while len(rows) > len(resident):
                use_of, candidate = heapq.heappop(farthest)
                if rows.get(candidate) == -use_of:
                    del rows[candidate]
        hits.append(found)
    return hits


_POLICIES: Mapping[str, Callable[[list[list[int]], list[int]], list[int]]] = MappingProxyType(
    {"lru": _lru, "lfu": _lfu, "s3-fifo": _s3_fifo, "belady": _belady}
)
POLICIES = tuple(_POLICIES)
