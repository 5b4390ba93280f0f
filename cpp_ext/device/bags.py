"""Where the bags of pooled lookups begin and end on a device. Needs torch alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

KEPT_LAYOUTS = 8  # layouts of lookups whose numbers stay on a device, as each step of a loop has the same


@dataclass(frozen=True)
class Bags:
    """Where bags begin and end among the ids of lookups; of bags of several lookups, those of the first come first.

    Attributes:
        begins: (bags) int64 on the device.
        ends: (bags) int64 on the device.
        size: how many ids there are.
        is_whole: whether each id surely lies in a bag.
        length: the number of ids of each bag, where all have as many and one at least; None: they may differ.
    """

    begins: Tensor
    ends: Tensor
    size: int
    is_whole: bool = False
    length: int | None = None

    @property
    def count(self) -> int:
        """How many bags there are."""
        return self.begins.shape[0]

    @functools.cached_property
    def bag_of_ids(self) -> Tensor:
        """(size) int64: the bag of each id; of an id that lies in none, any."""
        places = torch.arange(self.size, device=self.begins.device)
        if self.length is not None:
            return torch.div(places, self.length, rounding_mode="floor")
        return torch.clamp(torch.searchsorted(self.begins, places, right=True) - 1, min=0)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """(bags, 1) float32: how many ids each bag has, and 1 for one that has none."""
        return torch.clamp(self.ends - self.begins, min=1).to(torch.float32).unsqueeze(1)

    @functools.cached_property
    def is_in_bag(self) -> Tensor:
        """(size) bool: whether an id lies in its bag."""
        places = torch.arange(self.size, device=self.begins.device)
        begins, ends = (each.index_select(0, self.bag_of_ids) for each in (self.begins, self.ends))
        return (places >= begins) & (places < ends)


def fixed_bags(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Bags:
    """The bags of several lookups of 2-D ids, (bags, ids of each); the last few that were made are kept."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _fixed_bags(shapes, device, stream)


@functools.lru_cache(maxsize=KEPT_LAYOUTS)
def _fixed_bags(shapes: tuple[tuple[int, int], ...], device: torch.device, stream: int) -> Bags:
    del stream  # what one stream has made may not be there yet for another one
    with torch.inference_mode(False):
        (length, *others) = {length for _, length in shapes}
        count, size = sum(count for count, _ in shapes), sum(count * length for count, length in shapes)
        if not others and length > 0:
            begins = torch.arange(count, device=device) * length
            return Bags(begins, begins + length, size, is_whole=True, length=length)
        lengths = torch.cat([torch.full((count,), length, dtype=torch.int64) for count, length in shapes])
        ends = lengths.cumsum(0)
        begins, ends = torch.stack([ends - lengths, ends]).to(device, non_blocking=True)
        return Bags(begins, ends, size, is_whole=True)


def lookup_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """(bags) int64: the number of the lookup that each bag belongs to.

    Args:
        counts: the bags of each lookup.
        device: of the result.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _lookup_of(counts, device, stream)


@functools.lru_cache(maxsize=KEPT_LAYOUTS)
def _lookup_of(counts: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    del stream
    with torch.inference_mode(False):
        return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device, non_blocking=True)
