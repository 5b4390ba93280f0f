"""Estimates how often items are in a batch, for the correction of in-batch negatives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Odd factors of multiplicative hashing (Dietzfelbinger et al. 1997), which torch multiplies modulo 2**64.
_FACTORS = (-0x61C8864680B583EB, 0x517CC1B727220A95, 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)


class ItemFrequency:
    """A streaming estimate of the probability that an item is in a batch, in arrays of a fixed size.

    For each item y, the mean number of batches from one that has y to the next is estimated; the probability is its
    inverse. ``A[h(y)]`` is the last batch with y and ``B[h(y)]`` the mean; a batch t with y sets
    ``B = (1 - a) B + a (t - A)`` and ``A = t``. With several hashes h, the largest B is the best, as a collision only
    makes it smaller. The method is that of Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations" (RecSys 2019), section 4.1. There, a is constant and B begins at 0. Here, a is ``1 / n`` for the
    first intervals, ``n <= 1 / rate``, so that B is their mean, and has no part of where it began.

    Each worker counts its own batches, as its negatives are of its own batch. An object is used by one thread.

    Args:
        buckets: the length of an array, a power of 2; an item has one bucket of each hash. 16 bytes each.
        hashes: the number of hashes, 1 to 4.
        rate: the weight a of a new interval, in (0, 1]: how fast old batches are forgotten.

    Raises:
        ValueError: an argument is not allowed; the text names it and what is allowed.
    """

    def __init__(self, *, buckets: int = 1 << 20, hashes: int = 2, rate: float = 0.01) -> None:
        if buckets < 2 or buckets & (buckets - 1):
            raise ValueError(f"buckets={buckets} is not allowed; allowed: a power of 2, at least 2")
        if not 1 <= hashes <= len(_FACTORS):
            raise ValueError(f"hashes={hashes} is not allowed; allowed: 1 to {len(_FACTORS)}")
        if not 0 < rate <= 1:
            raise ValueError(f"rate={rate} is not allowed; allowed: > 0 and <= 1")
        self._rate, self._batches = rate, 0
        self._last = torch.zeros(hashes, buckets, dtype=torch.int64)
        self._interval = torch.zeros(hashes, buckets, dtype=torch.float32)
        self._count = torch.zeros(hashes, buckets, dtype=torch.int32)  # of intervals, up to 1 / rate

    def update(self, keys: Tensor) -> Tensor:
        """Counts a batch, and returns the logarithm of the probability of each of its items, (B) float32.

        Args:
            keys: the items of the batch, (B) int64; an item that is there twice counts once.
        """
        self._batches += 1
        for row, buckets in enumerate(self._buckets(keys)):
            hit = buckets.unique()
            count = self._count[row, hit] + 1
            weight = torch.clamp(1.0 / count, min=self._rate)
            interval = (self._batches - self._last[row, hit]).float()
            self._interval[row, hit] += weight * (interval - self._interval[row, hit])
            self._count[row, hit] = torch.where(weight > self._rate, count, count - 1)
            self._last[row, hit] = self._batches
        return self.logq(keys)

    def logq(self, keys: Tensor) -> Tensor:
        """Returns the logarithm of the probability that each item is in a batch, without counting, (n) float32.

        An item that was never seen has one batch of those so far.

        Args:
            keys: the items, (n) int64.
        """
        buckets = self._buckets(keys)
        intervals = self._interval.gather(1, buckets)
        unseen = torch.full_like(intervals, max(self._batches, 1))
        largest = torch.where(self._last.gather(1, buckets) > 0, intervals, unseen).amax(dim=0)
        return -largest.log().to(keys.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint: tensors by name, which share no memory with this object."""
        state = {"batches": torch.tensor(self._batches), "last": self._last, "interval": self._interval}
        return {name: tensor.clone() for name, tensor in {**state, "count": self._count}.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state of :meth:`state_dict`.

        Args:
            state: the state, of an object with as many buckets and hashes.

        Raises:
            ValueError: the state has other shapes, or lacks a tensor; nothing is then changed.
        """
        mine = self.state_dict()
        for name, tensor in mine.items():
            if name not in state or state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                found = "is missing" if name not in state else f"is {state[name].dtype} of {tuple(state[name].shape)}"
                raise ValueError(
                    f"state of ItemFrequency: {name!r} {found}; allowed: {tensor.dtype} of {tuple(tensor.shape)}"
                )
        self._batches = int(state["batches"])
        self._last, self._interval, self._count = (state[name].clone() for name in ("last", "interval", "count"))

    def _buckets(self, keys: Tensor) -> Tensor:
        """Returns the bucket of each key for each hash, (hashes, n) int64, on the host."""
        hashes, buckets = self._last.shape
        bits = buckets.bit_length() - 1
        factors = torch.tensor(_FACTORS[:hashes], dtype=torch.int64)
        return ((keys.to("cpu")[None] * factors[:, None]) >> (64 - bits)) & (buckets - 1)
