"""Pooled tables in fbgemm's table-batched embeddings (TBE), for ``bench gpu``.

TBE looks up all tables in one kernel and updates their rows within backward. It is what TorchRec uses on one device.
Source of its interface: fbgemm_gpu 1.8, ``split_table_batched_embeddings_ops_training.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

_EPS = 1e-10  # of torch's Adagrad


def lack_of_fbgemm() -> str:
    """Returns why TBE cannot be measured here; "" when it can."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return "fbgemm_gpu is not installed"
    try:
        importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError, RuntimeError) as error:  # its libraries are for another build of torch
        return f"fbgemm_gpu does not load: {str(error).splitlines()[0]}"
    return ""


class FbgemmTables(nn.Module):
    """Tables whose rows have Adagrad's state and are updated within backward.

    Args:
        tables: the number of tables.
        rows: the rows of each table.
        dim: the columns of each table.
        lr: the learning rate of the rows.
        device: the host, or a CUDA device.
    """

    def __init__(self, tables: int, rows: int, dim: int, *, lr: float, device: torch.device) -> None:
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found]
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        on_host = device.type == "cpu"
        place = EmbeddingLocation.HOST if on_host else EmbeddingLocation.DEVICE
        kind = ComputeDevice.CPU if on_host else ComputeDevice.CUDA
        self.tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, place, kind)] * tables,
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=lr,
            eps=_EPS,
            pooling_mode=PoolingMode.SUM,
            device=device,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the sums of the rows of each bag, (batch, tables * dim), of ids (tables, batch, hot) int64."""
        offsets = torch.arange(0, ids.numel() + 1, ids.shape[2], device=ids.device)
        pooled: Tensor = self.tables(ids.reshape(-1), offsets)
        return pooled

    def weights(self) -> list[Tensor]:
        """Returns the rows of each table, (rows, dim), sharing their memory."""
        weights: list[Tensor] = self.tables.split_embedding_weights()
        return weights
