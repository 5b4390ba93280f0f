"""Makes the rows of the lookups that this rank makes itself, of rows on servers: one op for all of a device.

The op is one node of autograd. Where its lookups are all lookups of the plan, it pulls their rows too; else one pull
for all tables goes before it, with one frame a shard. On a device the rows cross in one copy before.

Lookups in eval mode or without gradient make rows of their own, of what was pulled; so do those whose offsets or
weights are no part of the batch, and those whose weights have a gradient, since the model may have detached them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ....cpp_ext import torch_ops as ops
from ....proto.errors import DeadlineExceeded, Unavailable, typed_error
from ...session.session import JobSession
from ..expressions import is_part, part_of
from ..made_rows import MadeRows, places_of
from ..plan import LEAST_LOOKUPS, BatchIds, IdPart, LookupPlan, PlannedLookup, Seen, descriptions, is_transformed
from ..planned_layer import LayerChanges, PlannedLayer


@dataclass(frozen=True)
class _Whole:
    """All lookups of a device, as long as no layer of the process changes.

    Attributes:
        changes: the value of ``LayerChanges.count`` for which this holds.
        places: the lookups of each layer.
        anchor: the anchor of the first layer.
        tables: the names of the tables, as ``gather_all`` takes them.
        options: the options of the lookups, as ``gather_all`` takes them.
    """

    changes: int
    places: dict[PlannedLayer, list[int]]
    anchor: Tensor
    tables: str
    options: list[int]


class OwnRank:
    """Makes the rows of a model's lookups of rows on servers.

    Args:
        session: the session of the model.
    """

    def __init__(self, session: JobSession) -> None:
        self._native, self._on_device = session.core.native, session.core.on_device
        self._plan: LookupPlan | None = None
        self._lookups: list[tuple[PlannedLookup, IdPart]] = []
        self._ids = BatchIds([])
        self._has_all = False
        self._all: tuple[str, list[int]] | None = None  # of all planned lookups
        self._whole: _Whole | None = None

    def learn(self, plan: LookupPlan) -> None:
        """Makes rows by a plan from now on."""
        self._plan, self._all, self._whole, self._lookups = plan, None, None, []
        covered: set[int] = set()
        for lookup in plan.lookups:
            layer, index = lookup.layer(), plan.index_of(lookup)
            others = (each for each in (lookup.offsets, lookup.weights) if each is not None)
            if layer is None or index is None or not all(is_part(each) for each in others):
                continue
            if _is_eligible(layer):
                self._lookups.append((lookup, plan.parts[index]))
                covered.add(index)
        self._has_all = len(covered) == len(plan.parts)
        self._ids = BatchIds([ids for _, ids in self._lookups])

    def make(self, batch: Any, *, train: bool) -> MadeRows | None:
        """Pulls what the batch's lookups need; where the model is on a device, sends their rows there in one copy.

        Args:
            batch: the arguments of the forward.
            train: whether the model is in train mode.

        Returns:
            The rows that were made for the layers; None where each of them makes its own.

        Raises:
            SparserowError: the rows cannot be pulled.
        """
        plan, step = self._plan, self._on_device
        if plan is None or not plan.parts:
            return None
        with_gradient = torch.is_grad_enabled()
        tensors = plan.tensors(batch, step.copy_on_host) if step.is_used else plan.tensors(batch)
        makes = train and with_gradient and len(self._lookups) >= LEAST_LOOKUPS and not is_transformed()
        ids = self._ids_of_all(tensors) if makes else None
        if ids is not None and self._has_all and not step.is_used:
            self._native.count_missed(False)  # what this op pulls was not expected to be there
            try:
                made = self._make_all(ids)
            finally:
                self._native.count_missed(True)
            if made is not None:
                return made
        roots = descriptions(tensors)
        self._native.pull_merged(plan.native, roots, train, with_gradient=with_gradient)
        if step.is_used and not step.is_prefetched and (with_gradient or not train):
            step.send_and_offer(self._native.pack_merged(plan.native, roots, train), train=train)
        if not makes:
            return None
        return self._make_each(tensors, batch) if ids is None else self._make_all(ids)

    def _ids_of_all(self, tensors: Sequence[Seen]) -> list[Tensor] | None:
        """Returns the ids of all planned lookups; None where the rows of each are to be made for itself."""
        is_whole = self._whole is not None and self._whole.changes == LayerChanges.count
        return self._ids.all_of(tensors) if is_whole else None

    def _step_of(self) -> int:
        return self._native.step

    def _make_all(self, ids: list[Tensor]) -> MadeRows | None:
        """Makes the rows of all planned lookups, none of which has offsets; nothing is done for each layer.

        Returns None where one has an error, which its layer raises.

        Raises:
            DeadlineExceeded, Unavailable: the shards did not answer; another pull would wait for them as long.
        """
        whole = self._whole
        assert whole is not None
        try:
            rows = ops.gather_all(ids, (), (), whole.anchor, whole.tables, whole.options, True)
        except (RuntimeError, ValueError) as error:
            typed = typed_error(error)
            if isinstance(typed, DeadlineExceeded | Unavailable):
                raise typed from None
            return None
        return MadeRows(whole.places, ids, None, rows, self._step_of)

    def _make_each(self, tensors: Sequence[Seen], batch: Any) -> MadeRows | None:
        """Makes the rows of those planned lookups that fit the batch and the present state of their layers."""
        layers: list[PlannedLayer] = []
        ids: list[Tensor] = []
        others: list[tuple[Tensor | None, Tensor | None]] = []
        parts: dict[tuple[int, int], Sequence[Tensor]] = {}
        device: torch.device | None = None
        for lookup, of in self._lookups:
            layer, tensor = lookup.layer(), tensors[of.root][0]
            if layer is None or tensor is None or not _is_eligible(layer):
                continue
            if device is None:
                device = layer.anchor.device
            elif layer.anchor.device != device:
                continue
            expressions = (lookup.offsets, lookup.weights)
            offsets, weights = (None if each is None else part_of(batch, each) for each in expressions)
            if [offsets is None, weights is None] != [each is None for each in expressions]:
                continue
            if weights is not None and weights.requires_grad:
                continue
            try:
                ids.append(self._ids.of(of, tensor, parts))
            except (RuntimeError, IndexError):  # a batch of another shape
                continue
            layers.append(layer)
            others.append((offsets, weights))
        if len(ids) < LEAST_LOOKUPS:
            return None
        tables, options = self._described(layers, others)
        places = places_of(layers)
        bags, scales = (_given(ids, each) for each in zip(*others, strict=True))
        has_others = bool(bags or scales)
        if len(layers) == len(self._lookups) and not has_others:
            self._whole = _Whole(LayerChanges.count, places, layers[0].anchor, tables, options)
        try:
            rows = ops.gather_all(ids, bags, scales, layers[0].anchor, tables, options, True)
        except (RuntimeError, ValueError):  # the layer whose lookup fails raises it
            return None
        return MadeRows(places, ids, others if has_others else None, rows, self._step_of)

    def _described(
        self, layers: Sequence[PlannedLayer], others: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> tuple[str, list[int]]:
        """Returns the names of the tables and the options of lookups, as ``gather_all`` takes them."""
        if self._all is not None and len(layers) == len(self._lookups):
            return self._all
        options = [
            layer.lookup_options(has_offsets=offsets is not None, has_weights=weights is not None)
            for layer, (offsets, weights) in zip(layers, others, strict=True)
        ]
        described = "\n".join([layer.binding for layer in layers]), list(chain.from_iterable(options))
        if len(layers) == len(self._lookups):
            self._all = described
        return described


def _given(ids: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns offsets or weights as ``gather_all`` takes them: none at all, or something in the place of each."""
    if all(each is None for each in tensors):
        return []
    return [each if tensor is None else tensor for each, tensor in zip(ids, tensors, strict=True)]


def _is_eligible(layer: PlannedLayer) -> bool:
    """Whether lookups of a layer belong to the session's step, and are made by this rank from rows on servers."""
    return layer.training and not layer.is_frozen and not layer.is_joint and layer.anchor.requires_grad
