"""Makes the rows of all lookups of a forward by one op, before the forward begins, and hands them to its layers.

The lookups are learnt from the forward that :class:`ForwardPull` traces: which layer looked which ids up, and
which part of the batch these were. From then on one ``gather_all`` makes the rows of all lookups, as one node of
autograd, and a layer takes its own when it is called with the same ids. Results do not depend on it: a layer that is
called with other ids, or in another state, looks them up itself.

On a device the op is the one that looks one table up as well, with rows of the one buffer that crossed before.

Lookups with weights, in eval mode or without gradient make rows of their own. So do those of a layer that is on another
device than the first one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...cpp_ext import torch_ops as ops
from ...proto.errors import DeadlineExceeded, Unavailable, typed_error
from ..data.batch_tensors import id_tensors, tensor_at
from .lookup_parts import LEAST_LOOKUPS, LookupParts, PlannedLookup

if TYPE_CHECKING:
    from ...cpp_ext import _client
    from ..id_trace.id_expressions import IdSources
    from .embedding import DistributedLayer

INFERENCE = -1  # the version of an inference tensor, whose changes torch does not count
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_top_hooks: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks


class LayerChanges:
    """Counts the changes of what decides whether a layer's rows can be made ahead, over all layers of the process.

    Attributes:
        count: the number of changes so far; ``DistributedLayer`` adds to it.
    """

    count = 0


@dataclass(frozen=True)
class _Call:
    layer: DistributedLayer
    ids: Tensor
    offsets: Tensor | None


class LookupRecord:
    """Notes which layers look which ids up in a forward; a layer gets no rows of it.

    Attributes:
        calls: the calls so far whose rows could be made ahead.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def rows(self, layer: DistributedLayer, ids: Tensor, offsets: Tensor | None, *, has_weights: bool) -> Tensor | None:
        """Returns None, after it has noted the lookup."""
        if not has_weights and _is_eligible(layer):
            self.calls.append(_Call(layer, ids.detach(), None if offsets is None else offsets.detach()))
        return None


@dataclass(frozen=True)
class _Whole:
    """All planned lookups, as long as no layer of the process changes.

    Attributes:
        changes: the value of ``LayerChanges.count`` for which this holds.
        places: the planned lookups of each layer.
        anchor: the anchor of the first layer.
        tables: the names of the tables, as ``gather_all`` takes them.
        options: the options of the lookups, as ``gather_all`` takes them.
    """

    changes: int
    places: dict[DistributedLayer, list[int]]
    anchor: Tensor
    tables: str
    options: list[int]


class RowsAhead:
    """The lookups of a model's forward whose rows are made by one op.

    Args:
        calls: the lookups of a traced forward.
        sources: the plan that was learnt from it.
        roots: the tensors of that forward that the plan's roots stood for.
        batch: the batch of that forward.
        step_of: returns the number of the session's step.
    """

    def __init__(
        self,
        calls: Sequence[_Call],
        sources: IdSources,
        roots: Sequence[Tensor | None],
        batch: Any,
        step_of: Callable[[], int],
    ) -> None:
        self._step_of = step_of
        self._all: tuple[str, list[int]] | None = None  # of all planned lookups
        self._whole: _Whole | None = None
        offsets = [(path, tensor) for path, tensor in id_tensors(batch)]
        self._planned: list[PlannedLookup] = []
        parts: set[int] = set()  # of the plan, whose lookups are made here
        for call in calls:
            path = None
            if call.offsets is not None:
                path = next((path for path, tensor in offsets if _is_same(tensor, call.offsets)), None)
                if path is None:
                    continue
            for index, (binding, root, kind, dim, start, length) in enumerate(sources.plan.parts):
                planned = PlannedLookup(weakref.ref(call.layer), root, kind, dim, start, length, path)
                tensor = roots[root]
                if binding == call.layer.binding and tensor is not None and _fits(planned, tensor, call.ids):
                    self._planned.append(planned)
                    parts.add(index)
                    break
        self._has_all = len(parts) == len(sources.plan.parts)
        self._parts = LookupParts(self._planned)

    def make(self, roots: Sequence[tuple[Tensor | None, Tensor | None]], batch: Any) -> MadeRows | None:
        """Makes the rows for a batch; returns None where they are fewer than two lookups, or a lookup has an error.

        Args:
            roots: for each root of the plan, the tensor as the lookups see it, first of a pair.
            batch: the batch.
        """
        if len(self._planned) < LEAST_LOOKUPS or not torch.is_grad_enabled() or is_transformed():
            return None
        ids = self._ids_of_all(roots)
        return self._make_each(roots, batch) if ids is None else self._make_all(ids)

    def pull_and_make(
        self, native: _client.NativeSession, roots: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> MadeRows | None:
        """Makes the rows for a batch by an op that pulls them too, so that no pull has to go before.

        Returns None where the plan has other lookups, or one has an error; then ``pull_merged`` and :meth:`make` serve.

        Args:
            native: the native half of the session.
            roots: as :meth:`make` takes them.

        Raises:
            DeadlineExceeded, Unavailable: the shards did not answer; another pull would wait for them as long.
        """
        is_possible = self._has_all and torch.is_grad_enabled() and not is_transformed()
        ids = self._ids_of_all(roots) if is_possible else None
        if ids is None:
            return None
        native.count_missed(False)  # what this op pulls was not expected to be there
        made = self._make_all(ids)
        native.count_missed(True)
        return made

    def _ids_of_all(self, roots: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Tensor] | None:
        """Returns the ids of all planned lookups; None where the rows of each are to be made for itself."""
        is_whole = self._whole is not None and self._whole.changes == LayerChanges.count
        return self._parts.all_of(roots) if is_whole else None

    def _make_all(self, ids: list[Tensor]) -> MadeRows | None:
        """Makes the rows of all planned lookups, none of which has offsets; nothing is done for each layer."""
        whole = self._whole
        assert whole is not None
        try:
            rows = ops.gather_all(ids, (), (), whole.anchor, whole.tables, whole.options, True)
        except (RuntimeError, ValueError) as error:
            typed = typed_error(error)
            if isinstance(typed, DeadlineExceeded | Unavailable):
                raise typed from None
            return None  # the layer whose lookup fails tells it
        return MadeRows(whole.places, ids, None, rows, self._step_of)

    def _make_each(self, roots: Sequence[tuple[Tensor | None, Tensor | None]], batch: Any) -> MadeRows | None:
        """Makes the rows of those planned lookups that fit the batch and the present state of their layers."""
        layers: list[DistributedLayer] = []
        ids: list[Tensor] = []
        offsets: list[Tensor | None] = []
        parts: dict[tuple[int, int], Sequence[Tensor]] = {}
        device: torch.device | None = None
        for planned in self._planned:
            layer, root = planned.layer(), roots[planned.root][0]
            if layer is None or root is None or not _is_eligible(layer):
                continue
            if device is None:
                device = layer.anchor.device
            elif layer.anchor.device != device:
                continue
            bags = None if planned.offsets is None else tensor_at(batch, planned.offsets)
            if bags is None and planned.offsets is not None:
                continue
            try:
                ids.append(self._parts.of(planned, root, parts))
            except (RuntimeError, IndexError):  # a batch of another shape
                continue
            layers.append(layer)
            offsets.append(bags)
        if len(ids) < LEAST_LOOKUPS:
            return None
        tables, options = self._described(layers, offsets)
        places = places_of(layers)
        bags_of = self._offsets_of(ids, offsets)
        if len(layers) == len(self._planned) and not bags_of:
            self._whole = _Whole(LayerChanges.count, places, layers[0].anchor, tables, options)
        try:
            rows = ops.gather_all(ids, bags_of, (), layers[0].anchor, tables, options, True)  # no lookup has weights
        except (RuntimeError, ValueError):  # the layer whose lookup fails tells it
            return None
        return MadeRows(places, ids, offsets if bags_of else None, rows, self._step_of)

    @staticmethod
    def _offsets_of(ids: Sequence[Tensor], offsets: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Returns offsets as ``gather_all`` takes them: none at all, or a tensor for each lookup."""
        if all(bags is None for bags in offsets):
            return ()
        return [each if bags is None else bags for each, bags in zip(ids, offsets, strict=True)]

    def _described(self, layers: Sequence[DistributedLayer], offsets: Sequence[Tensor | None]) -> tuple[str, list[int]]:
        """Returns the names of the tables and the options of lookups, as ``gather_all`` takes them."""
        if self._all is not None and len(layers) == len(self._planned):
            return self._all
        options = [
            layer.lookup_options(has_offsets=bags is not None) for layer, bags in zip(layers, offsets, strict=True)
        ]
        described = "\n".join([layer.binding for layer in layers]), list(chain.from_iterable(options))
        if len(layers) == len(self._planned):
            self._all = described
        return described


def places_of(layers: Sequence[DistributedLayer]) -> dict[DistributedLayer, list[int]]:
    """Returns the places of each layer in a sequence of lookups."""
    places: dict[DistributedLayer, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(layer, []).append(place)
    return places


class MadeRows:
    """The rows of a forward, each handed out once.

    Args:
        places: the lookups of each layer.
        ids: the ids of each lookup.
        offsets: the offsets of the bags of each lookup, None where it has none; None: no lookup has them.
        rows: the rows of each lookup, and maybe more behind them.
        step_of: returns the number of the session's step; rows of an earlier step are not handed out.
    """

    def __init__(
        self,
        places: Mapping[DistributedLayer, Sequence[int]],
        ids: Sequence[Tensor],
        offsets: Sequence[Tensor | None] | None,
        rows: Sequence[Tensor],
        step_of: Callable[[], int],
    ) -> None:
        self._step_of, self._step = step_of, step_of()
        self._places, self._ids, self._offsets = places, ids, offsets
        self._rows: list[Tensor | None] = list(rows)
        self._versions = [INFERENCE if each.is_inference() else each._version for each in ids]
        self._bag_versions = [
            INFERENCE if bags is None or bags.is_inference() else bags._version for bags in offsets or ()
        ]

    def rows(self, layer: DistributedLayer, ids: Tensor, offsets: Tensor | None, *, has_weights: bool) -> Tensor | None:
        """Returns the rows of a lookup; None when none were made for it, or its state differs.

        Under hooks of saved tensors, such as those of activation checkpointing, a part of the forward may be computed
        again in the backward. So the layer looks its rows up itself, both times.
        """
        places = self._places.get(layer)
        if places is None or has_weights or not layer.training or not _is_grad_enabled():
            return None
        if _top_hooks(True) is not None or self._step_of() != self._step:
            return None
        for place in places:
            rows = self._rows[place]
            if rows is None or not holds(ids, self._ids[place], self._versions[place]):
                continue
            bags = None if self._offsets is None else self._offsets[place]
            if (offsets is None) != (bags is None):
                continue
            if offsets is None or bags is None or holds(offsets, bags, self._bag_versions[place]):
                self._rows[place] = None
                return rows
        return None


def _is_eligible(layer: DistributedLayer) -> bool:
    """Whether lookups of a layer belong to the session's step, and are made by this rank from rows on servers."""
    return (
        layer.training
        and not layer.is_frozen
        and layer.tensor_group is None
        and not layer.is_on_devices
        and layer.anchor.requires_grad
    )


def has_hooks() -> bool:
    """Whether this thread has hooks of saved tensors, such as those of activation checkpointing."""
    return _top_hooks(True) is not None


def is_transformed() -> bool:
    """Whether this forward may be computed again, as under activation checkpointing, or is transformed or traced."""
    is_transformed: bool = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    return is_transformed or has_hooks()


def _fits(planned: PlannedLookup, root: Tensor, ids: Tensor) -> bool:
    try:
        return _is_same(planned.ids_of(root), ids)
    except (RuntimeError, IndexError):
        return False


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same part of the same memory."""
    return one.dtype == other.dtype and one.device == other.device and one.is_set_to(other)


def holds(given: Tensor, made: Tensor, version: int) -> bool:
    """Whether a tensor has the values that another one had when the rows were made.

    Values on a device are not compared, since that would wait for it; there only the same memory counts.
    """
    if given.dtype is not made.dtype or (version != INFERENCE and made._version != version):
        return False
    is_here = given.is_cpu and made.is_cpu
    if not is_here and given.device != made.device:
        return False
    return given.is_set_to(made) or (is_here and given.shape == made.shape and torch.equal(given, made))
