"""A disk that is full under published models: no command leaves a claim behind, and ``prune`` makes room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from small_disk import mounted_disk
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import FailedPrecondition, ResourceExhausted
from sparserow.proto.published.dense import newest_number, write_dense
from sparserow.proto.published.manifest import MANIFEST
from sparserow.proto.published.proof import Proof
from sparserow.proto.published.registry import ModelRegistry

ROWS = "rows.0.0.0.safetensors"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted_disk(tmp_path / "disk", 4) as folder:
        yield folder


@pytest.fixture
def registry(small_disk: Path) -> ModelRegistry:
    """Three versions of a model, of which the last is live, on a disk without any room."""
    registry = ModelRegistry(str(small_disk))
    for version in (1, 2, 3):
        assert registry.claim_version("ctr") == version
        registry.folder("ctr", version).write(ROWS, [bytes(1 << 20)])
        registry.folder("ctr", version).put(MANIFEST, _manifest(version))
        registry.point("ctr", "live", version)
    _fill(small_disk)
    return registry


def test_a_full_disk_leaves_no_claims(registry: ModelRegistry, small_disk: Path) -> None:
    before = sorted(small_disk.rglob("*"))
    for _ in range(2):
        with pytest.raises(ResourceExhausted, match="No space left"):
            registry.point("ctr", "live", 1)
        with pytest.raises(ResourceExhausted, match="No space left"):
            registry.folder("ctr", 1).create("claim.other", b"x")
    assert sorted(small_disk.rglob("*")) == before
    assert registry.resolve("ctr", "live").version == 3


def test_a_prune_makes_room_on_a_full_disk(registry: ModelRegistry) -> None:
    assert registry.prune("ctr", 1) == [1]
    registry.point("ctr", "live", 2)
    assert registry.resolve("ctr", "live").version == 2


def test_dense_weights_that_have_no_room_leave_none_behind(small_disk: Path) -> None:
    version = Folder(str(small_disk)) / "v000001"
    version.make()
    version.put(MANIFEST, _manifest(1))
    large = bytes(5 << 20)

    def refused(_: dict[str, Any]) -> Proof:
        raise FailedPrecondition("the key cannot be read")

    with pytest.raises(ResourceExhausted, match=r"weights\.safetensors: No space left"):
        write_dense(version, [large], 1)
    with pytest.raises(FailedPrecondition, match="the key cannot be read"):
        write_dense(version, [large[: 1 << 20]], 1, refused)
    assert {path.name for path in (small_disk / "v000001" / "dense").rglob("*.*")} == {"claim.json"}
    assert write_dense(version, [b"abc"], 2).number == newest_number(version) == 3


def _fill(disk: Path) -> None:
    with open(disk / "fill", "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def _manifest(version: int) -> bytes:
    slots = {"file": "slots.safetensors", "bytes": 0, "xxh3": "0", "sha256": "0"}
    names = {"model": "ctr", "namespace": "ads", "cluster_id": "9", "created": "2026-01-01T00:00:00+00:00"}
    facts = {"format": 1, "version": version, "slot_count": 64, "tables": [], "program": None, "card": {}}
    return json.dumps({**names, **facts, "slots": slots}).encode()
