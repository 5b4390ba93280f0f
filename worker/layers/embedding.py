"""Distributed layers for ``nn.Embedding`` and ``nn.EmbeddingBag``: the same ``forward``, rows on parameter servers.

A distributed layer has no rows. It names its table (``binding``), so a pickled copy, or one that ``copy_sharing_rows``
makes, reads and trains the same table, in a process where a session has bound it. ``.to()`` moves no row, but results
are on its device and of its dtype from then on; ids may be on the host or there. Rows, and the sums of their gradients,
stay float32.
In train mode a lookup belongs to the session's step; in eval mode it reads the newest rows, without gradient.
A lookup in train mode under ``torch.no_grad`` also reads at the step's clock; its rows are kept within a limit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...cpp_ext import torch_ops as ops
from ...cpp_ext.device_step import current_step
from ...proto.errors import FailedPrecondition
from ..lookups.made_rows import take_own
from ..lookups.planned_layer import ROWS, LayerChanges, PlannedLayer
from ..session.tensor_group import TensorGroup
from .compiled_lookups import fuse_in_this_graph
from .refused_uses import check_transforms, error_of_lookup, error_of_reset, error_of_script
from .table_handle import EXTRA_STATE, TableHandle

BAG_MODES: Mapping[str, int] = MappingProxyType({"sum": 0, "mean": 1, "max": 2})  # the numbers of torch's embedding_bag

_STATE = frozenset({"training", "tensor_group", "anchor"})  # decides whether rows can be made ahead; is_frozen as well
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")  # the modules whose wrappers take parameters over
_may_share_rows: ContextVar[bool] = ContextVar("may_share_rows", default=False)


Model = TypeVar("Model", bound=nn.Module)


class WeightUnavailable(FailedPrecondition, AttributeError):  # noqa: N818 - names are the taxonomy's
    """Raised when code reads or sets ``weight`` of a distributed layer, which has no rows in this process."""


class DistributedLayer(PlannedLayer):
    """The base class of both distributed layers, with the table's name and the anchor.

    A layer has one parameter, named ``rows`` and empty. Its ``requires_grad`` says whether the layer trains its rows,
    so ``requires_grad_`` of the layer or the model, and loops over ``parameters()``, freeze rows as they freeze a local
    layer's. It is in no ``state_dict``, and DDP and FSDP do not see it.

    Attributes:
        binding: the name by which the ops find the table, ``namespace/table``.
        num_embeddings: the number of rows; ids are in [0, num_embeddings).
        embedding_dim: the number of columns.
        padding_idx: the id whose row gets no gradient; None: there is none.
        dtype: the dtype of the output: that of the replaced layer's weight, or of a later ``.to()``.
        origins: ids of the clusters whose rows the table holds, its own cluster first. The list is
            ``session.core.origins``, which grows when a checkpoint is restored.
        anchor: a float32 tensor of shape (1,) that requires grad and so makes autograd record lookups. It is a plain
            attribute, so ``parameters()``, ``state_dict()`` and DDP do not see it.
        tensor_group: the ranks that get the rows from the one that looks them up; None: each rank looks up its own.
        is_on_devices: whether the rows are on the devices of the job's ranks, and not on servers.
    """

    # Options of torch's layers that no distributed layer has; libraries read them.
    max_norm: float | None = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False

    def __init__(
        self,
        binding: str,
        *,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        dtype: torch.dtype,
        origins: list[str],
    ) -> None:
        super().__init__()
        self.binding = binding
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.dtype = dtype
        self.origins = origins
        self.anchor = torch.zeros(1, requires_grad=True)
        self.tensor_group: TensorGroup | None = None
        self._parameters[ROWS] = nn.Parameter(torch.empty(0))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise WeightUnavailable(
                f"table {self.__dict__.get('binding')!r}: .weight cannot be set, its rows are on the servers; "
                "use session.table(name).assign(keys, rows); the layer's requires_grad_ freezes it"
            )
        if name in _STATE and self.__dict__.get(name) is not value:
            LayerChanges.count += 1
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise WeightUnavailable(
                f"table {self.__dict__.get('binding')!r}: .weight is not here, its rows are on the parameter servers; "
                "use session.table(name).pull(keys), or keep the layer local with min_rows; the layer's requires_grad_ "
                "freezes it"
            )
        return super().__getattr__(name)

    def reset_parameters(self) -> None:
        """Refuses to draw first rows anew, which belong to the table.

        Raises:
            FailedPrecondition: always.
        """
        raise error_of_reset(self.binding)

    def __prepare_scriptable__(self) -> None:  # what torch.jit.script asks a module for
        raise error_of_script(self.binding)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedLayer:
        if not _may_share_rows.get():
            raise FailedPrecondition(
                f"table {self.binding!r}: copy.deepcopy copies no rows, so the copy would follow this model and train "
                "its rows; a teacher or an average of weights has dense weights alone, or a table of its own "
                "(docs/train-your-model.md); sr.copy_sharing_rows(model) makes a copy that shares rows on purpose"
            )
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns the empty parameter; nothing to DDP and FSDP, which would wait for its gradient or split it."""
        if not recurse and _is_asked_by_wrapper():
            return iter(())
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}{ROWS}", None)

    def get_extra_state(self) -> Tensor:
        """Returns the table's handle, (n) uint8, which a ``state_dict`` holds in place of the rows."""
        return self._handle().to_tensor()

    def set_extra_state(self, state: Any) -> None:
        """Checks that a handle from a ``state_dict`` names this table. ``restore`` brings the rows back.

        Args:
            state: the handle, (n) uint8.

        Raises:
            FailedPrecondition: the handle names another table, or a cluster whose rows are not here.
            DataLoss: ``state`` is not a handle.
        """
        self._handle().check(TableHandle.of_tensor(state, self.binding), self.origins)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        """Accepts a state without handles, such as that of a local model: it holds the dense side alone."""
        weight = self._parameters.pop(ROWS)  # no state has it
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        finally:
            self._parameters[ROWS] = weight
        if f"{prefix}{EXTRA_STATE}" in missing_keys:
            missing_keys.remove(f"{prefix}{EXTRA_STATE}")
        unexpected_keys = rest[0]
        if f"{prefix}{ROWS}" in unexpected_keys:  # of torch.distributed.checkpoint, which adds what parameters() has
            unexpected_keys.remove(f"{prefix}{ROWS}")

    def lookup_options(self, *, has_offsets: bool = False, has_weights: bool = False) -> list[int]:
        """Returns the numbers that ``gather_all`` takes for a lookup of this layer (cpp_ext/ops/merged_lookups.h)."""
        has = (int(has_offsets), int(has_weights))
        return [self.embedding_dim, self.mode_number, self.padding_number, int(self.include_last_offset), *has]

    def _gather_on_device(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Rows on the anchor's device, of ids on the host or there, by the op that serves any number of lookups."""
        rows: Tensor = ops.gather_all(
            [ids],
            [ids if offsets is None else offsets],
            [ids if weights is None else weights],
            self._anchor_of_now(),
            self.binding,
            self.lookup_options(has_offsets=offsets is not None, has_weights=weights is not None),
            self.is_trained,
        )[0]
        return rows

    def _anchor_of_now(self) -> Tensor:
        """Returns the anchor; in train mode without gradient an empty part of it, by which the op knows that mode."""
        if self.is_frozen:
            return self.anchor.detach()
        return self.anchor if torch.is_grad_enabled() or not self.training else self.anchor.detach()[:0]

    def _handle(self) -> TableHandle:
        return TableHandle(self.binding, self.embedding_dim, self.origins[0], current_step(self.binding))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedLayer:
        """Implements ``.to()``, ``.double()`` and the like: results follow dtype and device; no row is moved."""
        super()._apply(fn, recurse)
        moved = fn(torch.empty(0, dtype=self.dtype, device=self.anchor.device))
        self.dtype = moved.dtype
        if moved.device != self.anchor.device:
            self.anchor = torch.zeros(1, device=moved.device, requires_grad=True)
        return self

    def extra_repr(self) -> str:
        """Returns the layer's options for ``repr()``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, table={self.binding!r}"


def _is_asked_by_wrapper() -> bool:
    """Whether DDP or FSDP has called the caller, or ``Module.parameters`` on the way to it."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == nn.Module.__module__ and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(_WRAPPERS)


def copy_sharing_rows(model: Model) -> Model:
    """Returns a deep copy of a distributed model: its dense weights are its own, and its layers read and train the same
    tables.

    Args:
        model: the model. ``copy.deepcopy`` refuses it, because such a copy is no teacher and no average: it follows.
    """
    token = _may_share_rows.set(True)
    try:
        return copy.deepcopy(model)
    finally:
        _may_share_rows.reset(token)


@contextmanager
def without_empty_parameters(model: nn.Module) -> Iterator[None]:
    """Takes the empty parameters out of a model's layers for the block, so that an exported program has none."""
    taken: list[tuple[DistributedLayer, nn.Parameter | None]] = []
    try:
        for layer in model.modules():
            if isinstance(layer, DistributedLayer):
                taken.append((layer, layer._parameters.pop(ROWS)))
        yield
    finally:
        for layer, weight in taken:
            layer._parameters[ROWS] = weight


class DistributedEmbedding(DistributedLayer):
    """Replaces ``nn.Embedding``: looks its rows up on the parameter servers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Returns the rows of ids.

        Args:
            input: the ids, of any shape, int64 or int32, in [0, num_embeddings).

        Returns:
            The rows, of shape ``input.shape + (embedding_dim,)`` and dtype ``self.dtype``.

        Raises:
            InvalidArgument: an id is out of range; the text names the table and the id.
            FailedPrecondition: no session of this process has bound the table.
        """
        if torch.compiler.is_compiling():
            fuse_in_this_graph()
            out = self._rows(input)
        else:
            check_transforms(self.binding)
            try:
                made = take_own(self, input)
                out = self._rows(input) if made is None else made
            except (RuntimeError, ValueError) as error:
                raise error_of_lookup(self.binding, error) from None
        return out if self.dtype == torch.float32 else out.to(self.dtype)

    def look_up(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Returns the rows of ids; see :meth:`DistributedLayer.look_up`."""
        del offsets, weights
        return self._own_rows(ids)

    def shape_of(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> tuple[int, ...]:
        """Returns the shape of the rows of ids."""
        del offsets, weights
        return (*ids.shape, self.embedding_dim)

    def _rows(self, ids: Tensor) -> Tensor:
        if self.tensor_group is not None:
            return self.tensor_group.hand(self, (ids, None, None))
        return self._own_rows(ids)

    def _own_rows(self, ids: Tensor) -> Tensor:
        if self.anchor.device.type != "cpu":
            return self._gather_on_device(ids)
        rows: Tensor = ops.gather(
            ids, self._anchor_of_now(), self.binding, self.embedding_dim, self.padding_number, self.is_trained
        )  # fmt: skip
        return rows


class DistributedEmbeddingBag(DistributedLayer):
    """Replaces ``nn.EmbeddingBag``: pools rows from the parameter servers.

    Attributes:
        mode: how the rows of a bag are pooled: "sum", "mean" or "max".
        include_last_offset: whether ``offsets`` ends with the number of ids, as in ``nn.EmbeddingBag``.
    """

    def __init__(
        self,
        binding: str,
        *,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        dtype: torch.dtype,
        mode: str,
        include_last_offset: bool,
        origins: list[str],
    ) -> None:
        super().__init__(
            binding,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            dtype=dtype,
            origins=origins,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.mode_number = BAG_MODES[mode]

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the pooled rows of bags of ids.

        Args:
            input: the ids, (bags, length), or (n) with offsets; int64 or int32, in [0, num_embeddings). Ids equal to
                ``padding_idx`` are left out of their bag.
            offsets: where each bag begins in ``input``: (bags), or (bags + 1) with ``include_last_offset``. None:
                ``input`` has two dimensions.
            per_sample_weights: a weight for each id, in the shape of ``input``; only with mode ``sum``. None: no
                weights.

        Returns:
            The pooled rows, (bags, embedding_dim), of dtype ``self.dtype``; zeros for an empty bag.

        Raises:
            InvalidArgument: an id is out of range, or the shapes do not fit together.
            FailedPrecondition: no session of this process has bound the table.
        """
        weights = per_sample_weights
        if torch.compiler.is_compiling():
            fuse_in_this_graph()
            out = self._pool(input, offsets, weights)
        else:
            check_transforms(self.binding)
            try:
                made = take_own(self, input, offsets, weights)
                out = self._pool(input, offsets, weights) if made is None else made
            except (RuntimeError, ValueError) as error:
                raise error_of_lookup(self.binding, error) from None
        return out if self.dtype == torch.float32 else out.to(self.dtype)

    def _pool(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        if self.tensor_group is None:
            return self._own_pool(ids, offsets, weights)
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise FailedPrecondition(
                f"table {self.binding!r}: per_sample_weights with a gradient are not possible in a tensor group, where "
                "one rank alone has the rows; allowed: weights without a gradient, or bags of rows made by the model"
            )
        return self.tensor_group.hand(self, (ids, offsets, weights))

    def look_up(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """Returns the pooled rows of ids; see :meth:`DistributedLayer.look_up`."""
        return self._own_pool(ids, offsets, weights)

    def shape_of(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> tuple[int, ...]:
        """Returns the shape of the pooled rows of ids."""
        del weights
        bags = len(ids) if offsets is None else len(offsets) - int(self.include_last_offset)
        return (bags, self.embedding_dim)

    def _own_pool(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        if self.anchor.device.type != "cpu":
            return self._gather_on_device(ids, offsets, weights)
        pooled: Tensor = ops.gather_bag(
            ids,
            offsets,
            self._anchor_of_now(),
            weights,
            self.binding,
            self.embedding_dim,
            self.mode_number,
            self.padding_number,
            self.include_last_offset,
            self.is_trained,
        )[0]
        return pooled

    def extra_repr(self) -> str:
        """Returns the layer's options for ``repr()``."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
