"""Which rows a device keeps, and since when: looked up on the device, changed by the host alone.

    device: probe(keys) -> places, and whether each has the row        host: put(keys) -> places for rows that lack

A set has ``WAYS`` places, and a key has one set. The host has the same directory once more, since it decides which
place a new row gets; so a probe waits for nothing, and the host looks at those keys alone that were not found. A set's
new row takes the place of the one that was asked for longest ago. Needs torch and numpy alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WAYS = 8
BYTES_OF_PLACE = 16  # of the directory on the device: a key, and when its row was asked for
_NEVER, _LAST = -(1 << 62), 1 << 62  # when the row of an empty place was asked for; later than any row
_MULTIPLIER = -7046029254386353131  # 2**64 / golden ratio, odd (Knuth, TAOCP 3, 6.4, multiplicative hashing)
_SHIFT = 20


class RowDirectory:
    """The directory of the rows of one width, of several tables.

    Not thread-safe, but for :meth:`probe` and :meth:`write`, whose order on the device is the caller's.

    Args:
        tables: how many tables share the places.
        sets: of each table, each of ``WAYS`` places; >= 1.
        device: of the directory.

    Attributes:
        places: of all tables.
    """

    def __init__(self, tables: int, sets: int, device: torch.device) -> None:
        self._sets, total = sets, tables * sets
        self.places = total * WAYS
        self._keys = torch.zeros(total, WAYS, dtype=torch.int64, device=device)
        self._asked = torch.full((total, WAYS), _NEVER, dtype=torch.int64, device=device)
        self._host_keys = np.zeros((total, WAYS), np.int64)
        self._host_asked = np.full((total, WAYS), _NEVER, np.int64)

    def first_set(self, table: int) -> int:
        """The first set of a table."""
        return table * self._sets

    def probe(self, keys: Tensor, first_sets: Tensor, now_ms: int, ttl_ms: int) -> tuple[Tensor, Tensor, Tensor]:
        """Looks keys up; the host does not wait.

        Args:
            keys: (n) int64 on the device.
            first_sets: (n) int64 on the device: :meth:`first_set` of each key's table.
            now_ms: the time, in milliseconds of the caller's clock.
            ttl_ms: how long a row is used after it was asked for, in milliseconds.

        Returns:
            On the device: (n) int64, the place of each row, any where it is not there; (n) bool, whether it is there
            and young enough; () int64, the sum of the ages of those that are, in milliseconds.
        """
        sets = torch.remainder((keys * _MULTIPLIER) >> _SHIFT, self._sets) + first_sets
        ages = now_ms - self._asked.index_select(0, sets)
        is_it = (self._keys.index_select(0, sets) == keys.unsqueeze(1)) & (ages <= ttl_ms)
        is_found, ways = is_it.max(1)
        return sets * WAYS + ways, is_found, (ages * is_it).sum()

    def forget(self) -> None:
        """Empties all places, on both sides."""
        self._asked.fill_(_NEVER)
        self._host_asked.fill(_NEVER)

    def put(self, keys: NDArray[np.int64], first_set: int, asked_ms: int) -> NDArray[np.int64]:
        """Gives rows of one table their places, in the host's directory; :meth:`write` follows.

        Args:
            keys: (u) unique.
            first_set: :meth:`first_set` of the table.
            asked_ms: when the rows were asked for, at the earliest.

        Returns:
            (u) the place of each row; -1 of a row that is not kept: its set has no place left, or has it from a later
            request.
        """
        sets = np.remainder((keys * np.int64(_MULTIPLIER)) >> _SHIFT, self._sets) + first_set
        own = (self._host_keys[sets] == keys[:, None]) & (self._host_asked[sets] > _NEVER)
        has_own, ways = own.any(1), own.argmax(1)
        places = np.where(has_own & (self._host_asked[sets, ways] < asked_ms), sets * WAYS + ways, -1)
        # The others take the oldest places of their set, the k-th of them the k-th oldest, but none of those above.
        of_sets, set_of = np.unique(sets, return_inverse=True)
        is_taken = np.zeros((len(of_sets), WAYS), bool)
        is_taken[set_of[has_own], ways[has_own]] = True
        oldest = np.argsort(np.where(is_taken, _LAST, self._host_asked[of_sets]), axis=1, kind="stable")
        new = np.flatnonzero(~has_own)
        new = new[np.argsort(set_of[new], kind="stable")]
        counts = np.bincount(set_of[new], minlength=len(of_sets))
        ranks = np.arange(len(new)) - np.repeat(np.cumsum(counts) - counts, counts)
        fits = ranks < (WAYS - is_taken.sum(1))[set_of[new]]
        new, ranks = new[fits], ranks[fits]
        places[new] = sets[new] * WAYS + oldest[set_of[new], ranks]
        is_kept = places >= 0
        self._host_keys.reshape(-1)[places[is_kept]] = keys[is_kept]
        self._host_asked.reshape(-1)[places[is_kept]] = asked_ms
        return places

    def write(self, store: Tensor, rows: Tensor, keys: Tensor, places: Tensor, asked_ms: int) -> None:
        """Puts rows on the device where :meth:`put` has said.

        Places are empty until the row and its key are there, so that a failure in between leaves no row under another
        key.

        Args:
            store: (places, dim) float32.
            rows: (k, dim) float32.
            keys: (k) int64.
            places: (k) int64.
            asked_ms: as for :meth:`put`.
        """
        asked = self._asked.view(-1)
        asked.index_fill_(0, places, _NEVER)
        store.index_copy_(0, places, rows)
        self._keys.view(-1).index_copy_(0, places, keys)
        asked.index_fill_(0, places, asked_ms)
