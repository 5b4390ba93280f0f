"""fbgemm's table-batched embeddings (TBE) on the host: a plain matrix whose update is fused into backward.

``read`` is a forward of bags of one row; ``update`` is forward, and backward with Adagrad.
Source of its interface: fbgemm_gpu 1.8, ``split_table_batched_embeddings_ops_training.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fbgemm_gpu  # type: ignore[import-not-found]  # noqa: F401 - loads the operators
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found]
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

if TYPE_CHECKING:
    from .worker import Tools


def measure(asked: dict[str, Any], tools: Tools) -> None:
    """Measures a table of each dim, one after the other."""
    torch.set_num_threads(asked["threads"])
    tools.note_versions("torch", "fbgemm-gpu-cpu")
    batches = (torch.from_numpy(keys) for keys in tools.batches())
    offsets = torch.arange(asked["keys"] + 1)
    for dim in tools.dims():
        table = SplitTableBatchedEmbeddingBagsCodegen(
            [(asked["rows"], dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=0.01,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        factors = torch.from_numpy(tools.grads(dim))

        def read(keys: torch.Tensor, table: Any = table) -> None:
            with torch.no_grad():
                table(keys, offsets)

        def update(keys: torch.Tensor, table: Any = table, factors: torch.Tensor = factors) -> None:
            table(keys, offsets).backward(factors)

        tools.time("read", dim, batches.__next__, read)
        tools.time("update", dim, batches.__next__, update)
