"""Embeddings of features by name: one table for each feature, or one for several, and lists that are pooled.

A 63-bit key cannot index a matrix, so the row of a key is ``key % rows``. Two keys with the same row share its
embedding. In a table of 2**44 rows, which only a parameter server can offer, this practically never happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .feature_checks import check_arguments, list_of, single
from .jagged import Feature
from .pools import pooled


class FeatureEmbeddings(nn.Module):
    """The tables of a model's features, and the inputs that are made of them and of numbers.

    Features come by name, as a job's readers and ``sr.features.Features`` give them: a number (B) float32, a key (B)
    int64, or a list, a tuple of values (m) int64, offsets (B + 1) int64 and optionally weights (m) float32. Keys are
    not negative. They may be on the host where the model is on a device: distributed tables look them up there. A table
    is an ``nn.EmbeddingBag`` when every feature that reads it is pooled by sum, mean or sqrtn, and else an
    ``nn.Embedding``.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        dim: the width of an embedding.
        numbers: the features that are numbers.
        shared: other features of keys or lists, each with the feature of ``rows`` whose table it reads.
        pools: how a list is pooled, by feature: "sum", "mean", "sqrtn" or "max" (see ``pooled``). A feature that is
            not here is one key a sample, or a sequence that the model reads by :meth:`sequence`.
        init_scale: initial weights are uniform in [-init_scale, init_scale).
        sparse: whether local tables produce sparse gradients.

    Attributes:
        tables: the tables by the feature that each is named after.
        names: the features of keys and lists, those of ``rows`` first.
        numbers: the features that are numbers.
        dim: the width of an embedding.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        dim: int,
        *,
        numbers: Sequence[str] = (),
        shared: Mapping[str, str] | None = None,
        pools: Mapping[str, str] | None = None,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        shared, self._pools = shared or {}, dict(pools or {})
        check_arguments(rows, numbers, shared, self._pools)
        self.dim, self.numbers = dim, tuple(numbers)
        self._rows = dict(rows)
        self._table_of = {**{name: name for name in rows}, **shared}
        self.names = tuple(self._table_of)
        by_rows = {table for name, table in self._table_of.items() if self._pools.get(name, "max") == "max"}
        self._bags = set(rows) - by_rows
        self.tables = nn.ModuleDict()
        for name, count in rows.items():
            table: nn.Embedding | nn.EmbeddingBag
            if name in self._bags:
                table = nn.EmbeddingBag(count, dim, mode="sum", include_last_offset=True, sparse=sparse)
            else:
                table = nn.Embedding(count, dim, sparse=sparse)
            nn.init.uniform_(table.weight, -init_scale, init_scale)
            self.tables[name] = table

    @property
    def rows_by_feature(self) -> dict[str, int]:
        """The number of rows of the table that each feature reads; the row of a key is ``key % rows``."""
        return {name: self._rows[table] for name, table in self._table_of.items()}

    @property
    def features(self) -> tuple[str, ...]:
        """All features: first those that have a table, then the numbers."""
        return self.names + self.numbers

    def width(self, features: Sequence[str] | None = None) -> int:
        """Returns the width of what :meth:`flat` returns for ``features``."""
        return sum(self.dim if name in self._table_of else 1 for name in (features or self.features))

    def forward(self, tensors: Mapping[str, Feature], names: Sequence[str] | None = None) -> Tensor:
        """Returns the embeddings of features, with lists pooled, (B, n, dim).

        Args:
            tensors: the features by name.
            names: the features, at least one; None: all that have a table.

        Raises:
            ValueError: a list has no pool, or a feature with a pool is no list.
        """
        return torch.stack([self._field(name, tensors[name]) for name in (names or self.names)], dim=1)

    def flat(self, tensors: Mapping[str, Feature], features: Sequence[str] | None = None) -> Tensor:
        """Returns embeddings and numbers side by side, (B, width).

        Args:
            tensors: the features by name.
            features: the features, at least one; None: all.

        Raises:
            ValueError: as in a call.
        """
        return torch.cat(
            [
                self._field(name, tensors[name]) if name in self._table_of else self._number(tensors, name)[:, None]
                for name in (features or self.features)
            ],
            dim=1,
        )

    def stacked_numbers(self, tensors: Mapping[str, Feature]) -> Tensor:
        """Returns the numbers side by side, (B, n); there must be at least one."""
        return torch.stack([self._number(tensors, name) for name in self.numbers], dim=1)

    def sequence(self, tensors: Mapping[str, Feature], name: str) -> tuple[Tensor, Tensor]:
        """Returns a list without pooling: the row of each of its keys, (m, dim), and the offsets (B + 1) int64.

        Raises:
            ValueError: the feature is no list, or has weights.
        """
        keys, offsets, *weights = list_of(name, tensors[name])
        if weights:
            raise ValueError(f"features: {name!r} has weights; allowed: a sequence, which has none")
        return self.rows_of(name, keys), offsets

    def rows_of(self, name: str, keys: Tensor) -> Tensor:
        """Returns the row of each key of a feature that is not pooled, (n, dim), for ``keys`` (n) int64."""
        rows: Tensor = self.tables[self._table_of[name]](self._ids(name, keys))
        return rows

    def _ids(self, name: str, keys: Tensor) -> Tensor:
        table = self.tables[self._table_of[name]]
        ids = torch.remainder(keys, self._rows[self._table_of[name]])
        if isinstance(table, nn.Embedding | nn.EmbeddingBag) and ids.device != table.weight.device:
            ids = ids.to(table.weight.device)
        return ids

    def _number(self, tensors: Mapping[str, Feature], name: str) -> Tensor:
        return single(name, tensors[name]).float()

    def _field(self, name: str, feature: Feature) -> Tensor:
        if name not in self._pools:
            return self.rows_of(name, single(name, feature))
        keys, offsets, *weights = list_of(name, feature)
        table = self._table_of[name]
        return pooled(
            self.tables[table], table in self._bags, self._pools[name], self._ids(name, keys), offsets, *weights
        )
