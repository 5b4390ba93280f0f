"""Makes all joint lookups of a forward at once, before it begins.

    tensor group:       leader: rows of all lookups ── one broadcast ──> the other ranks
    tables on devices:  sizes, ids, rows of all lookups ── three collective calls ──> every rank

A lookup is joint when several ranks make it together: those of a tensor group, or all of them where its table is on
their devices. Each rank of a forward does the same, since ranks agree before it whether they have one plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...data.batch_tensors import tensors_of
from ...session.session import JobSession
from ..expressions import Values, has_sizes
from ..made_rows import MadeRows, places_of
from ..plan import LEAST_LOOKUPS, LookupPlan, PlannedLookup, is_transformed
from .same_batch import SameBatch
from .tensor_group import LookupCall, hand_all

_MAX_TRACES = 8
_MISFITS = 2  # forwards in a row for which nothing was made; one is the last batch of an epoch, say
_MAX_REFUSALS = 8  # forwards in a row in which ranks had no common plan; then this rank asks no more
_DIGEST_BYTES = 7  # so that a digest is a positive int64, and one in place of an exchange's number stays one


class JointPlan:
    """The joint lookups of a plan.

    Args:
        plan: the plan.
        batch: the arguments of the forward from which it was learnt.

    Attributes:
        digest: a number above 0 that ranks with the same plan share; 0 for a plan of fewer than two lookups.
    """

    def __init__(self, plan: LookupPlan, batch: Any) -> None:
        self._planned = [lookup for lookup in plan.lookups if _is_joint(lookup)]
        every = [expression for planned in self._planned for expression in planned.expressions]
        self._shapes = _shapes_of(batch) if any(map(has_sizes, every)) else None
        self.digest = 0
        if len(self._planned) >= LEAST_LOOKUPS:
            text = "\n".join(planned.text for planned in self._planned).encode()
            self.digest = 1 + int.from_bytes(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), "little")

    def find(self, batch: Any, *, same_shapes: bool) -> list[LookupCall] | None:
        """Returns the lookups of a batch; None when one of them does not fit it.

        Args:
            batch: the arguments of the forward.
            same_shapes: whether a plan with sizes fits batches with the shapes of the traced one alone. Ranks need it
                whose batches differ: a bound may be a size of the batch, and then holds on some of them.
        """
        if same_shapes and self._shapes is not None and self._shapes != _shapes_of(batch):
            return None
        values, found = Values(batch, _itself), []
        with torch.no_grad():
            for planned in self._planned:
                expressions = (planned.ids, planned.offsets, planned.weights)
                ids, offsets, weights = (None if each is None else values.of(each) for each in expressions)
                is_found = [each is not None for each in (ids, offsets, weights)]
                layer = planned.layer()
                if layer is None or ids is None or is_found != [each is not None for each in expressions]:
                    return None
                found.append(LookupCall(layer, (ids, offsets, weights)))
        return found


class JointLookups:
    """The joint lookups of one distributed model.

    Args:
        session: the session of the model.
        same_batch: the comparison of batches over the tensor group; None: there is no group.

    Attributes:
        is_to_trace: returns whether the forward that begins is to be traced.
    """

    def __init__(self, session: JobSession, same_batch: SameBatch | None) -> None:
        self._core, self._same_batch = session.core, same_batch
        self.is_to_trace: Callable[[], bool] = lambda: False
        self._plan: JointPlan | None = None
        self._found: list[LookupCall] | None = None
        self._traces = self._refusals = self._misfits = 0
        self._is_wrong = False
        if same_batch is not None:
            same_batch.plan_of = self.find

    @property
    def wants_trace(self) -> bool:
        """Whether the plan did not fit the last forward, so that the next one is to be traced."""
        return self._is_wrong and self._traces < _MAX_TRACES

    @property
    def _has_joint(self) -> bool:
        return self._core.tensor_group is not None or self._core.has_device_tables

    def find(self, batch: Any) -> int:
        """Finds the lookups of a batch; returns the digest of the plan, or 0 where this rank makes none ahead."""
        self._found = None
        plan = self._plan
        if plan is None or plan.digest == 0 or is_transformed():
            return 0
        group = self._core.tensor_group
        if group is not None and group.leads and self.is_to_trace():
            return 0  # the trace of the leader is to see lookups of what the layers are given
        found = plan.find(batch, same_shapes=group is None)
        if found is None or not all(
            lookup.layer.is_on_devices if group is None else lookup.layer.tensor_group is group for lookup in found
        ):
            return 0
        self._found = found
        return plan.digest

    def make(self, batch: Any) -> MadeRows | None:
        """Makes the lookups of a forward; returns None where no lookup is joint.

        Args:
            batch: the arguments of the forward.

        Raises:
            SparserowError: a rank is gone, late or in another call, or has refused the lookups.
        """
        if not self._has_joint:
            return None
        made = self._made(batch)
        found = self._found if made is not None and self._found is not None else []
        others = [lookup.arguments[1:] for lookup in found]
        return MadeRows(
            places_of([lookup.layer for lookup in found]),
            [lookup.arguments[0] for lookup in found],
            others,
            made or (),
            lambda: self._core.native.step,
            [lookup.layer.training for lookup in found],
        )

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
        from .device_tables import look_all_up  # slow to import

        made: Sequence[Any] | None = look_all_up(self._found, digest)
        self._refusals = 0 if made is not None else self._refusals + 1
        return made

    def end(self, made: MadeRows | None, plan: LookupPlan | None, batch: Any) -> None:
        """Ends a forward: makes rows by its plan from now on, or notes that the present plan did not fit.

        Args:
            made: what was made for it; None: no lookup is joint.
            plan: what was learnt from it; None: it was not recorded.
            batch: the arguments of the forward.
        """
        self._found = None
        if made is None:
            return
        if plan is not None and (self._plan is None or self._is_wrong):
            self._traces += 1
            self._plan, self._is_wrong, self._misfits = JointPlan(plan, batch), False, 0
        elif made.size > 0:
            self._is_wrong, self._misfits = not made.is_exact, 0
        elif made.is_missed:
            self._misfits += 1
            self._is_wrong = self._misfits >= _MISFITS


def _is_joint(lookup: PlannedLookup) -> bool:
    layer = lookup.layer()
    return layer is not None and layer.is_joint


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _shapes_of(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for _, tensor in tensors_of(batch)]
