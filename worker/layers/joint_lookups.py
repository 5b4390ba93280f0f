"""Makes all joint lookups of a forward at once, before it begins, and hands what was made to the layers.

    tensor group:       leader: rows of all lookups ── one broadcast ──> the other ranks
    tables on devices:  sizes, ids, rows of all lookups ── three collective calls ──> every rank

Results do not depend on it: a layer that is called with other arguments, or in another state, makes its lookup by
itself. Each rank of a forward does the same, since ranks agree before it whether they have one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..id_trace.forward_trace import ForwardTrace
from ..session.session import Session
from .embedding import DistributedLayer
from .handed_rows import SameBatch, hand_all
from .joint_plan import Arguments, JointPlan, Lookup, LookupTrace, same_arguments, version_of
from .rows_ahead import has_hooks, is_transformed

_MAX_TRACES = 8
_MISFITS = 2  # forwards in a row for which nothing was made; one is the last batch of an epoch, say
_MAX_REFUSALS = 8  # forwards in a row in which ranks had no common plan; then this rank asks no more


class JointForward:
    """What a forward's layers ask for their joint lookups.

    Args:
        trace: notes the lookups; None: the forward is not traced.
        lookups: the lookups that were made.
        made: what was made of each.

    Attributes:
        has_lookups: whether lookups were made.
        is_missed: whether a layer found nothing that was made for its call.
    """

    def __init__(self, trace: LookupTrace | None, lookups: Sequence[Lookup], made: Sequence[Any]) -> None:
        self.trace, self.has_lookups, self.is_missed = trace, len(lookups) > 0, False
        self._is_grad_enabled = torch.is_grad_enabled()
        self._left: dict[DistributedLayer, list[tuple[bool, list[tuple[Tensor, int] | None], Any]]] = {}
        for lookup, value in zip(lookups, made, strict=True):
            arguments = [None if each is None else (each, version_of(each)) for each in lookup.arguments]
            self._left.setdefault(lookup.layer, []).append((lookup.layer.training, arguments, value))

    def take(self, layer: DistributedLayer, arguments: Arguments) -> Any | None:
        """Returns what was made for a lookup, once; None when the layer is to make it.

        Under hooks of saved tensors, such as those of activation checkpointing, a part of the forward may be computed
        again in the backward. So the layer makes its lookup by itself, both times.
        """
        if has_hooks():
            return None
        if self.trace is not None:
            self.trace.note(layer, arguments)
        left = self._left.get(layer, [])
        for place, (training, made_of, value) in enumerate(left):
            is_same = training == layer.training and self._is_grad_enabled == torch.is_grad_enabled()
            if is_same and same_arguments(arguments, made_of):
                del left[place]
                return value
        self.is_missed = True
        return None

    @property
    def is_exact(self) -> bool:
        """Whether each lookup of the forward was made before it, and no other one was."""
        return not self.is_missed and not any(self._left.values())


class JointLookups:
    """The joint lookups of one distributed model.

    Args:
        session: the session of the model.
        same_batch: the comparison of batches over the tensor group; None: there is no group.
        is_to_trace: returns whether the forward that begins is to be traced.
    """

    def __init__(self, session: Session, same_batch: SameBatch | None, is_to_trace: Callable[[], bool]) -> None:
        self._core, self._same_batch, self._is_to_trace = session.core, same_batch, is_to_trace
        self._plan: JointPlan | None = None
        self._found: list[Lookup] | None = None
        self._traces = self._refusals = self._misfits = 0
        self._is_wrong = False
        if same_batch is not None:
            same_batch.plan_of = self.find

    @property
    def wants_trace(self) -> bool:
        """Whether the plan did not fit the last forward, so that the next one is to be traced."""
        return self._is_wrong and self._traces < _MAX_TRACES

    def find(self, batch: Any) -> int:
        """Finds the lookups of a batch; returns the digest of the plan, or 0 where this rank makes none ahead."""
        self._found = None
        plan = self._plan
        if plan is None or plan.digest == 0 or is_transformed():
            return 0
        group = self._core.tensor_group
        if group is not None and group.leads and self._is_to_trace():
            return 0  # the trace of the leader is to see lookups of what the layers are given
        found = plan.find(batch, same_shapes=group is None)
        if found is None or not all(
            lookup.layer.is_on_devices if group is None else lookup.layer.tensor_group is group for lookup in found
        ):
            return 0
        self._found = found
        return plan.digest

    def begin(self, batch: Any, arguments: ForwardTrace | None) -> JointForward | None:
        """Makes the lookups of a forward; returns what its layers ask, or None where no lookup is joint.

        Args:
            batch: the arguments of the forward.
            arguments: the trace of the forward; None: it is not traced.

        Raises:
            SparserowError: a rank is gone, late or in another call, or has refused the lookups.
        """
        if self._core.tensor_group is None and not self._core.has_device_tables:
            return None
        trace = None if arguments is None else LookupTrace(arguments, batch)
        made = self._made(batch)
        return JointForward(trace, [], []) if made is None else JointForward(trace, self._found or [], made)

    def _made(self, batch: Any) -> Sequence[Any] | None:
        group, same_batch = self._core.tensor_group, self._same_batch
        if group is not None:
            is_agreed = same_batch is not None and same_batch.take_agreement()
            return hand_all(group, self._found) if is_agreed and self._found else None
        if self._refusals >= _MAX_REFUSALS:
            return None
        digest = self.find(batch)
        if self._found is None:
            return None
        from .device_layers import look_all_up  # slow to import

        made: Sequence[Any] | None = look_all_up(self._found, digest)
        self._refusals = 0 if made is not None else self._refusals + 1
        return made

    def end(self, forward: JointForward | None, batch: Any) -> None:
        """Ends a forward: learns the plan of a traced one, or notes that the plan did not fit.

        Args:
            forward: what the layers have asked; None: nothing.
            batch: the arguments of the forward.
        """
        self._found = None
        if forward is None:
            return
        if forward.trace is not None and (self._plan is None or self._is_wrong):
            self._traces += 1
            self._plan, self._is_wrong, self._misfits = JointPlan(forward.trace, batch), False, 0
        elif forward.has_lookups:
            self._is_wrong, self._misfits = not forward.is_exact, 0
        elif forward.is_missed:
            self._misfits += 1
            self._is_wrong = self._misfits >= _MISFITS
