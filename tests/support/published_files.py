"""A small published version as files, written without a cluster."""

from __future__ import annotations

import numpy as np

from sparserow.proto.checkpoint.tensor_file import Tensor
from sparserow.proto.optim import SGD
from sparserow.proto.published.manifest import (
    MANIFEST,
    SLOTS,
    ModelManifest,
    PublishedTable,
    ServedDtype,
    Sign,
)
from sparserow.proto.published.registry import ModelRegistry
from sparserow.proto.published.row_parts import write_rows, write_tensors
from sparserow.proto.schema import TableSchema, Uniform
from sparserow.proto.security.security import Security

SLOT_COUNT = 64
DIM = 6


def write_version(
    root: str,
    model: str,
    rows: np.ndarray,
    dtype: ServedDtype = "float32",
    *,
    security: Security | None = None,
    sign: Sign | None = None,
) -> ModelManifest:
    """Writes the next version of a model with these rows (n, 6), whose keys are 0, 7, 14 and so on."""
    registry = ModelRegistry(root)
    version = registry.claim_version(model)
    folder = registry.folder(model, version)
    keys = np.arange(len(rows), dtype=np.uint64) * np.uint64(7)
    versions = np.arange(1, len(rows) + 1, dtype=np.uint64) + np.uint64(1 << 48)
    half, is_signed = len(rows) // 2, sign == "rows"
    parts = tuple(
        write_rows(
            folder, f"rows.0.0.{i}.safetensors", dtype, keys[part], versions[part], rows[part], is_signed=is_signed
        )
        for i, part in enumerate((slice(0, half), slice(half, None)))
    )
    schema = TableSchema("ads", "user", DIM, SGD(), init=Uniform(-1, 1), id=77)
    slots = np.full(SLOT_COUNT, 1 << 48, np.uint64)
    manifest = ModelManifest(
        model=model,
        version=version,
        created="2026-01-01T00:00:00+00:00",
        cluster_id=9,
        slot_count=SLOT_COUNT,
        namespace="ads",
        tables=(PublishedTable(schema, dtype, parts),),
        slots=write_tensors(folder, SLOTS, {"version": Tensor("U64", slots)}),
        card={"auc": 0.8, "step": 12},
        sign=sign,
    ).signed(security or Security())
    folder.put(MANIFEST, manifest.to_json())
    return manifest
