"""The ranks of one tensor group: its leader is the worker of the job, and hands rows to the other ranks.

    leader:   pull ── rows ── broadcast ──> forward, backward ── its gradients of the rows ──> vote ──> commit
    follower:          rows <── broadcast ── forward, backward ── digest of its gradients ──> vote

Rows are replicated inputs of a tensor-parallel tower. With ``parallelize_module``, the backward of a replicated input
ends with an allreduce, so each rank has the whole gradient of the rows and not a part of it (the operator f of Shoeybi
et al., "Megatron-LM" (2019), section 3). The leader therefore commits its own gradients and no sum over the group.

Invariants:
 1. Every rank of the group calls the same methods in the same order, so that no rank waits for ever. The deadline of a
    wait is the timeout of the process group.
 2. A step whose gradients of rows differ between the ranks is refused on all ranks of the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...proto.errors import FailedPrecondition, Internal, SparserowError, error_of
from .collective_wait import waited
from .join import collective_device

Result = TypeVar("Result")

_TOLERANCE = 1e-2  # of the norm of the gradients; whole gradients differ by rounding alone, parts by their whole size
_GOLDEN = 0.6180339887498949  # multiples of it modulo 1 are spread evenly (Knuth, vol. 3, 6.4), so signs look random


class TensorGroup:
    """This rank and the other ranks of its tensor group.

    Args:
        group: the process group of the ranks, which the session alone uses; its first rank leads.
        rank: the position of this rank in the group.

    Attributes:
        leads: whether this rank has the session with the servers.
        leader: the leader's rank in the default process group.
        hand: returns the rows of a layer's lookup, given the layer and its arguments;
            ``worker/lookups/makers/tensor_group.py`` sets it.
        on_backward: called for each backward through a lookup's rows; by default it does nothing.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self.leads = rank == 0
        self.leader = dist.get_global_rank(group, 0)
        self.hand: Callable[..., Tensor] = _no_rows
        self.on_backward: Callable[[], None] = lambda: None
        self._lookups = 0
        self._digests: list[Tensor] = []
        self._signs = torch.empty(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        return self

    def __reduce__(self) -> Any:
        return _no_group, ()  # a pickled copy of a layer is in no group

    def from_leader(self, call: Callable[[], Result]) -> Result:
        """Calls ``call`` on the leader and returns its result on every rank of the group.

        Raises:
            SparserowError: the error of the call, on every rank of the group; or a rank is gone or late.
        """
        box: list[Any] = [None]
        failure: BaseException | None = None
        if self.leads:
            try:
                box = [(0, call())]
            except BaseException as error:
                number = error.number if isinstance(error, SparserowError) else Internal.number
                box, failure = [(number, str(error))], error
        _waited(lambda: dist.broadcast_object_list(box, src=self.leader, group=self._group))
        if failure is not None:
            raise failure
        number, result = box[0]
        if number:
            raise error_of(number, f"rank {self.leader}, which leads this tensor group: {result}")
        shared: Result = result
        return shared

    def broadcast(self, values: Tensor) -> None:
        """Overwrites ``values``, of any shape, on the followers with those of the leader.

        Raises:
            Unavailable, DeadlineExceeded: a rank of the group is gone, or did not call it within the group's timeout.
        """
        _waited(lambda: dist.broadcast(values, src=self.leader, group=self._group))

    def gathered(self, values: Tensor) -> list[Tensor]:
        """Returns the values of every rank, in the shape of ``values``, in the order of the group.

        Raises:
            Unavailable, DeadlineExceeded: a rank of the group is gone, or did not call it within the group's timeout.
        """
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self._group))]
        _waited(lambda: dist.all_gather(parts, values, group=self._group))
        return parts

    def close(self) -> None:
        """Gives the process group back."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def next_lookup(self) -> int:
        """Returns the number of a lookup within the step; it is the same on every rank."""
        self._lookups += 1
        return self._lookups

    def note(self, lookup: int, grad: Tensor) -> None:
        """Notes the gradient of a lookup's rows, of any shape, for :meth:`disagreement`."""
        self.on_backward()
        flat = grad.detach().reshape(-1).float()
        projected = torch.dot(flat, self._signs_on(flat.device, flat.numel())) * (1 + math.modf(lookup * _GOLDEN)[0])
        self._digests.append(torch.stack([torch.ones_like(projected), projected, torch.dot(flat, flat)]))

    def _signs_on(self, device: torch.device, count: int) -> Tensor:
        """Returns (count) float32 of -1 and 1 in an order that looks random; the longest are kept."""
        if self._signs.numel() < count or self._signs.device != device:
            places = torch.arange(count, device=device, dtype=torch.float64)
            self._signs = places.mul_(_GOLDEN).frac_().sub_(0.5).sign_().float()
        return self._signs[:count]

    def disagreement(self) -> FailedPrecondition | None:
        """Compares the noted gradients of the ranks and forgets them.

        Returns:
            The same error on every rank when they differ; None when they are equal, or not finite.
        """
        digest = torch.stack(self._digests).sum(0) if self._digests else torch.zeros(3)
        self.forget()
        digests = [part.tolist() for part in self.gathered(digest.to(collective_device()))]
        calls, projections, squares = zip(*digests, strict=True)
        if len(set(calls)) > 1:
            return FailedPrecondition(
                "session.step: the ranks of a tensor group made different numbers of backward calls through "
                f"distributed layers ({', '.join(f'{count:.0f}' for count in calls)}); all of them run the same step"
            )
        if not all(math.isfinite(number) for number in (*projections, *squares)):
            return None  # the vote refuses the step
        norm = math.sqrt(max(squares))
        if max(projections) - min(projections) <= _TOLERANCE * norm:
            return None
        return FailedPrecondition(
            "session.step: the ranks of a tensor group have different gradients of rows; either their replicated "
            "weights differ (build the model with one seed), or rows do not enter a parallel layer as replicated "
            "inputs, whose backward sums the gradients over the group (parallelize_module does it; a layer that splits "
            "its input by hand needs torch's DTensor.from_local with Replicate())"
        )

    def forget(self) -> None:
        """Forgets the noted gradients."""
        self._digests, self._lookups = [], 0


def _waited(call: Callable[[], Any]) -> None:
    waited(call, what="tensor group", ranks="this tensor group", then="the job goes on from its last checkpoint")


def _no_rows(*_: Any, **__: Any) -> Tensor:
    raise FailedPrecondition("a lookup in a tensor group needs a model that distribute or lift_embeddings returned")


def _no_group() -> None:
    return None


def on_leader(group: TensorGroup | None, call: Callable[[], Result]) -> Result:
    """Returns the result of ``call``, which the leader alone makes where there is a tensor group."""
    return call() if group is None else group.from_leader(call)
