"""Distributed layers for ``nn.Embedding`` and ``nn.EmbeddingBag``: the same ``forward``, rows on parameter servers.

A distributed layer has no rows. It names its table (``binding``), so a copy or a pickled copy reads and trains the same
table, in a process where a session has bound it. ``.to()`` moves no row, but results are on its device and of its dtype
from then on; ids may be on the host or there. Rows, and the sums of their gradients, stay float32.
In train mode a lookup belongs to the session's step; in eval mode it reads the newest rows, without gradient.
A lookup in train mode under ``torch.no_grad`` reads by the step's clock too, and its rows are kept within bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...cpp_ext import torch_ops as ops
from ...proto.errors import FailedPrecondition, typed_error
from .table_handle import EXTRA_STATE, TableHandle

BAG_MODES: Mapping[str, int] = MappingProxyType({"sum": 0, "mean": 1, "max": 2})  # the numbers of torch's embedding_bag


class WeightUnavailable(FailedPrecondition, AttributeError):  # noqa: N818 - names are the taxonomy's
    """Direct use of ``weight`` of a distributed layer."""


class DistributedLayer(nn.Module):
    """What both distributed layers share: the table's name and the anchor.

    Attributes:
        binding: name of the table as the ops find it, ``namespace/table``.
        anchor: (1,) float32 that requires grad and makes autograd record lookups; a plain attribute, so that
            neither ``parameters()``, ``state_dict()`` nor DDP see it.
        dtype: of the output: the replaced layer's weight's, or that of a later ``.to()``.
        origins: ids of the clusters whose rows the table holds, its own first (``Session.origins``, which grows).
    """

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

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise WeightUnavailable(
                f"table {self.__dict__.get('binding')!r}: .weight is not here, its rows live on the parameter servers; "
                "use session.table(name).pull(keys), or keep the layer local with min_rows"
            )
        return super().__getattr__(name)

    def get_extra_state(self) -> Tensor:
        """(n) uint8: the table's handle, which is what a ``state_dict`` holds in place of rows."""
        return self._handle().to_tensor()

    def set_extra_state(self, state: Any) -> None:
        """Checks that the handle of a ``state_dict`` is of this table; rows come back by ``restore``.

        Raises:
            FailedPrecondition: it is of another table, or of a cluster whose rows are not here.
            DataLoss: it is no handle.
        """
        self._handle().check(TableHandle.of_tensor(state, self.binding), self.origins)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        """A state without handles, of a local model, say, is the dense side alone: there is nothing to check."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        if f"{prefix}{EXTRA_STATE}" in missing_keys:
            missing_keys.remove(f"{prefix}{EXTRA_STATE}")

    def _gather_on_device(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None, *, options: tuple[int, int]
    ) -> Tensor:
        """Rows on the anchor's device, by the op that serves any number of lookups.

        Args:
            ids: on the host, or on the device.
            offsets: of bags; None: there are none.
            weights: of the ids; None: there are none.
            options: (mode of the bags or -1 for rows of ids, whether the offsets include the last).
        """
        padding = -1 if self.padding_idx is None else self.padding_idx
        has = (int(offsets is not None), int(weights is not None))
        rows: Tensor = ops.gather_all(
            [ids],
            [ids if offsets is None else offsets],
            [ids if weights is None else weights],
            self._anchor_of_now(),
            self.binding,
            [self.embedding_dim, options[0], padding, options[1], *has],
            self.training,
        )[0]
        return rows

    def _anchor_of_now(self) -> Tensor:
        """The anchor; none of its elements in train mode without gradient, which tells the op so."""
        return self.anchor if torch.is_grad_enabled() or not self.training else self.anchor.detach()[:0]

    def _handle(self) -> TableHandle:
        return TableHandle(self.binding, self.embedding_dim, self.origins[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedLayer:
        """``.to()``, ``.double()`` and their like: the output follows the dtype and the device; no row is moved."""
        super()._apply(fn, recurse)
        moved = fn(torch.empty(0, dtype=self.dtype, device=self.anchor.device))
        self.dtype = moved.dtype
        if moved.device != self.anchor.device:
            self.anchor = torch.zeros(1, device=moved.device, requires_grad=True)
        return self

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, table={self.binding!r}"


class DistributedEmbedding(DistributedLayer):
    """Stands for ``nn.Embedding``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Rows of ids.

        Args:
            input: any shape, int64 or int32, in [0, num_embeddings).

        Returns:
            ``input.shape + (embedding_dim,)``.

        Raises:
            InvalidArgument: an id is out of range (names the table and the id).
            FailedPrecondition: no session of this process has bound the table.
        """
        if torch.compiler.is_compiling():
            out = self._rows(input)
        else:
            try:
                out = self._rows(input)
            except (RuntimeError, ValueError) as error:
                raise typed_error(error) from None
        return out if self.dtype == torch.float32 else out.to(self.dtype)

    def _rows(self, ids: Tensor) -> Tensor:
        if self.anchor.device.type != "cpu":
            return self._gather_on_device(ids, options=(-1, 0))
        padding = -1 if self.padding_idx is None else self.padding_idx
        rows: Tensor = ops.gather(
            ids, self._anchor_of_now(), self.binding, self.embedding_dim, padding, self.training
        )  # fmt: skip
        return rows


class DistributedEmbeddingBag(DistributedLayer):
    """Stands for ``nn.EmbeddingBag``; ``mode`` is ``sum``, ``mean`` or ``max``."""

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
        self._mode_number = BAG_MODES[mode]

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pooled rows of bags of ids.

        Args:
            input: (bags, length), or (n) with offsets; int64 or int32, in [0, num_embeddings). Ids equal to
                ``padding_idx`` are left out of their bag.
            offsets: (bags), or (bags + 1) with ``include_last_offset``; where each bag begins in ``input``.
            per_sample_weights: of input's shape; with mode ``sum`` only.

        Returns:
            (bags, embedding_dim); zeros for an empty bag.

        Raises:
            InvalidArgument: an id is out of range, or the shapes do not fit together.
            FailedPrecondition: no session of this process has bound the table.
        """
        weights = per_sample_weights
        if torch.compiler.is_compiling():
            out = self._pool(input, offsets, weights)
        else:
            try:
                out = self._pool(input, offsets, weights)
            except (RuntimeError, ValueError) as error:
                raise typed_error(error) from None
        return out if self.dtype == torch.float32 else out.to(self.dtype)

    def _pool(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        if self.anchor.device.type != "cpu":
            options = (self._mode_number, int(self.include_last_offset))
            return self._gather_on_device(ids, offsets, weights, options=options)
        padding = -1 if self.padding_idx is None else self.padding_idx
        pooled: Tensor = ops.gather_bag(
            ids,
            offsets,
            self._anchor_of_now(),
            weights,
            self.binding,
            self.embedding_dim,
            self._mode_number,
            padding,
            self.include_last_offset,
            self.training,
        )[0]
        return pooled

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
