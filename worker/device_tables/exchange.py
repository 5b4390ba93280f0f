"""The collective calls of tables on devices: what a rank sends to each rank, and what each rank sends to it.

Each exchange begins with a header of two numbers for each rank: which call this is, and how many integers follow. So
ranks that are in different calls find out at once, and all of them raise the same error.

Invariants:
 1. Every rank makes the same calls in the same order; a rank that cannot take part calls ``refuse`` in place of one.
    A joint call is the exception: where not all ranks make it, those that do go on without it, and the others, which
    have seen it in the header, send the header of their own call again.
 2. Every wait ends at the deadline. After a failed wait the exchange only raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...cpp_ext.device.link import numbers_of
from ...proto.errors import FailedPrecondition, SparserowError
from ..session.collective_wait import waited

END_OF_STEP = -1  # the call by which gradients go to their rows; a lookup's call is the number of its table
_REFUSED = -2
_JOINT = -3  # the call of all lookups of a forward is this less the digest of their plan, which is above 0
_COLLECTED_ROWS = 65536  # rows that one message to rank 0 has at most


class RankExchange:
    """The exchange of one session's ranks.

    Args:
        rank: this rank.
        world: the number of ranks; with 1 nothing is sent.
        device: the device of the tensors.
        deadline_sec: the deadline of each wait for the other ranks, in seconds.
        name_of: returns the name of a call, for error texts.
    """

    def __init__(
        self, rank: int, world: int, device: torch.device, deadline_sec: float, name_of: Callable[[int], str]
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._deadline_sec = deadline_sec
        self._name_of = name_of
        self._failure: SparserowError | None = None
        self._group: Any = None
        if world > 1:
            dist.barrier()  # ranks that build their models may be minutes apart, for which the default group waits
            self._group = dist.new_group(timeout=timedelta(seconds=deadline_sec))

    def integers(self, call: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sends ``parts[r]``, (n) int64, to rank r. Returns what each rank sent, in rank order.

        Raises:
            FailedPrecondition: a rank is in another call, or has refused this one. Every rank raises it.
            Unavailable, DeadlineExceeded: a rank is gone, or did not make the call in time.
        """
        if self.world == 1:
            return list(parts)
        sizes = self._sizes(call, [len(part) for part in parts])
        return list(self._all_to_all(torch.cat(list(parts)), [len(part) for part in parts], sizes).split(sizes))

    def joint_integers(self, digest: int, parts: Sequence[Tensor]) -> list[Tensor] | None:
        """Does what :meth:`integers` does, in a call that ranks may leave out.

        Args:
            digest: a number above 0 that ranks share whose calls are alike.
            parts: what each rank gets.

        Returns:
            What each rank sent, in rank order; None on every rank where one makes another call.

        Raises:
            SparserowError: see :meth:`integers`.
        """
        if self.world == 1:
            return list(parts)
        mine = [len(part) for part in parts]
        call = _JOINT - digest
        headers = self._headers(call, mine)
        self._check_refusals(call, headers)
        if any(other != call for other, _ in headers):
            return None
        sizes = [size for _, size in headers]
        return list(self._all_to_all(torch.cat(list(parts)), mine, sizes).split(sizes))

    def floats(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Sends ``parts[r]``, float32 of any shape, to rank r, after :meth:`integers` of the same call.

        Args:
            parts: one tensor for each rank.
            sizes: how many numbers each rank sends to this one.

        Returns:
            What each rank sent, (sizes[r]), in rank order.

        Raises:
            Unavailable, DeadlineExceeded: a rank is gone, or did not make the call in time.
        """
        flat = [part.reshape(-1) for part in parts]
        if self.world == 1:
            return flat
        return list(self._all_to_all(torch.cat(flat), [len(part) for part in flat], list(sizes)).split(list(sizes)))

    def refuse(self) -> None:
        """Takes part in the ranks' next call by ending it with an error on every other rank."""
        if self.world > 1 and self._failure is None:
            self._headers(_REFUSED, [0] * self.world)

    def check_all(self, problem: SparserowError | None) -> None:
        """Raises ``problem`` on this rank, and an error that names this rank on the others; None: nothing is wrong.

        It waits for the other ranks as long as the default process group does.

        Raises:
            SparserowError: the problem of this rank.
            FailedPrecondition: another rank has one.
            Unavailable: a rank is gone.
        """
        problems: list[Any] = [None] * self.world
        if self.world > 1:
            self._waited(lambda: dist.all_gather_object(problems, None if problem is None else str(problem)))
        if problem is not None:
            raise problem
        for rank, text in enumerate(problems):
            if text is not None:
                raise FailedPrecondition(f"rank {rank}: {text}")

    def spread(self, values: Tensor) -> None:
        """Overwrites ``values``, of any shape, on every rank with those of rank 0."""
        if self.world > 1:
            self._waited(lambda: dist.broadcast(values, src=0, group=self._group))

    def collected(self, values: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
        """Returns the values of each rank on the host of rank 0, and None on other ranks. Every rank calls it.

        Args:
            values: of this rank, (sizes[rank], columns).
            sizes: the number of rows of each rank.
        """
        if self.rank != 0:
            for begin in range(0, len(values), _COLLECTED_ROWS):
                part = values[begin : begin + _COLLECTED_ROWS].contiguous()
                self._waited(partial(dist.send, part, group=self._group, group_dst=0))
            return None
        whole = [values.cpu().clone()]
        for rank in range(1, self.world):
            made = torch.empty(sizes[rank], *values.shape[1:], dtype=values.dtype)
            for begin in range(0, len(made), _COLLECTED_ROWS):
                part = torch.empty_like(made[begin : begin + _COLLECTED_ROWS], device=self.device)
                self._waited(partial(dist.recv, part, group=self._group, group_src=rank))
                made[begin : begin + _COLLECTED_ROWS] = part.cpu()
            whole.append(made)
        return whole

    def close(self) -> None:
        """Gives the ranks' process group back."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _sizes(self, call: int, mine: Sequence[int]) -> list[int]:
        headers = self._headers(call, mine)
        self._check_refusals(call, headers)
        while any(other < _JOINT for other, _ in headers):
            headers = self._headers(call, mine)
            self._check_refusals(call, headers)
        for rank, (other, _) in enumerate(headers):
            if other != call:
                raise FailedPrecondition(
                    f"rank {self.rank} is in {self._name_of(call)}, rank {rank} is in {self._name_of(other)}; every "
                    "rank makes the same lookups of tables on devices in the same order, in training and evaluation"
                )
        return [size for _, size in headers]

    def _check_refusals(self, call: int, headers: Sequence[tuple[int, int]]) -> None:
        refusing = [rank for rank, (other, _) in enumerate(headers) if other == _REFUSED]
        if refusing:
            raise FailedPrecondition(
                f"{self._name_of(call)}: rank {refusing[0]} could not take part and shows the error; the step is over "
                "on every rank"
            )

    def _headers(self, call: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
        mine = torch.tensor([[call, size] for size in sizes]).to(self.device)
        twos = [1] * self.world
        received = numbers_of(self._all_to_all(mine, twos, twos))
        return [(number, size) for number, size in received]

    def _all_to_all(self, values: Tensor, mine: list[int], theirs: list[int]) -> Tensor:
        out = torch.empty(sum(theirs), *values.shape[1:], dtype=values.dtype, device=values.device)
        self._waited(lambda: dist.all_to_all_single(out, values.contiguous(), theirs, mine, group=self._group))
        return out

    def _waited(self, call: Callable[[], Any]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            waited(
                call,
                what="exchange of tables on devices",
                ranks="the job",
                then="this session can only be closed, and the job goes on from its last checkpoint",
            )
        except SparserowError as error:
            self._failure = error
            raise
