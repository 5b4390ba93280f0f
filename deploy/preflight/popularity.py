"""How popular the keys of a table are, and what follows of it: different keys of a step, and hit rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_EXACT_RANKS = 1 << 16


@dataclass(frozen=True)
class Popularity:
    """Keys by popularity, the most popular first, in groups of equally popular keys.

    Attributes:
        counts: (groups) float64, the number of keys of each group.
        shares: (groups) float64, the share of all lookups that one key of the group has.
    """

    counts: NDArray[np.float64]
    shares: NDArray[np.float64]

    @staticmethod
    def zipf(rows: int, exponent: float) -> Popularity:
        """Returns Zipf's law: the k-th key has a share proportional to k^-exponent.

        Beyond the first 65,536 ranks, neighbouring ranks form groups.
        """
        exact = min(rows, _EXACT_RANKS)
        edges = np.arange(exact + 1, dtype=np.float64) + 0.5
        if rows > exact:
            edges = np.concatenate([edges, np.geomspace(exact + 0.5, rows + 0.5, 4096)[1:]])
        ranks = np.concatenate([np.arange(1, exact + 1), np.sqrt(edges[exact + 1 :] * edges[exact:-1])])
        counts = np.diff(edges)
        weights = ranks**-exponent
        return Popularity(counts, weights / (counts * weights).sum())

    def seen(self, draws: float) -> NDArray[np.float64]:
        """Returns (groups) float64, the probability that a key is among ``draws`` independent draws."""
        return np.asarray(-np.expm1(draws * np.log1p(-np.minimum(self.shares, 1 - 1e-12))))

    def unique(self, draws: int) -> float:
        """Returns the expected number of different keys among the draws."""
        return float((self.counts * self.seen(draws)).sum())

    def hits_of_most_asked(self, draws: int, room: float) -> float:
        """Returns the share of a step's unique keys that are among the ``room`` most popular keys."""
        asked = self.counts * self.seen(draws)
        before = np.concatenate([[0.0], np.cumsum(self.counts)[:-1]])
        inside = np.clip(room - before, 0.0, self.counts) / self.counts
        return float((asked * inside).sum() / asked.sum())

    def hits_of_last_asked(self, draws: int, room: float) -> float:
        """Returns the share of a step's unique keys that are among the ``room`` most recent keys, by Che's
        approximation.
        """
        if room >= self.counts.sum():
            return 1.0
        asked = self.seen(draws)
        weight = self.counts * asked
        return float((weight * -np.expm1(-asked * self._steps_kept(asked, room))).sum() / weight.sum())

    def hits_within(self, draws: int, room: float, staleness: int) -> float:
        """Returns the share of a step's unique keys that are among the ``room`` most recent keys, and were validated
        at most ``staleness`` steps ago.

        A key that a step asks for with probability q has one validation and then ``staleness * q`` hits on average.
        """
        asked = self.seen(draws)
        kept = 1.0 if room >= self.counts.sum() else -np.expm1(-asked * self._steps_kept(asked, room))
        fresh = staleness * asked / (1 + staleness * asked)
        weight = self.counts * asked
        return float((weight * np.minimum(kept, fresh)).sum() / weight.sum())

    def _steps_kept(self, asked: NDArray[np.float64], room: float) -> float:
        """Returns for how many steps a key that is not asked for stays among the ``room`` most recent keys."""
        low, high = 0.0, 1.0
        while (self.counts * -np.expm1(-asked * high)).sum() < room:
            high *= 2
        for _ in range(100):
            steps = (low + high) / 2
            cached = (self.counts * -np.expm1(-asked * steps)).sum()
            low, high = (steps, high) if cached < room else (low, steps)
        return high
