"""Published versions as files, and the aliases that name them; no process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from published_files import DIM, write_version
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from sparserow.proto.published.manifest import MANIFEST, ModelManifest, ServedDtype
from sparserow.proto.published.model_names import parse_model
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.loaded_version import load_version


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((300, DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 8e-3), ("int8", 1 / 127)]
)
def test_a_version_loads_as_it_was_published(
    tmp_path: Path, rows: np.ndarray, dtype: ServedDtype, error: float
) -> None:
    manifest = write_version(str(tmp_path), "ctr", rows, dtype)
    registry = ModelRegistry(str(tmp_path))
    assert registry.manifest("ctr", 1) == manifest
    loaded = load_version(registry, manifest, ShardAssignment())
    got, versions, found = loaded.store.pull(77, np.arange(300, dtype=np.uint64) * np.uint64(7))
    assert found.all()
    np.testing.assert_array_equal(versions, np.arange(1, 301, dtype=np.uint64) + np.uint64(1 << 48))
    largest = np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(got - rows) <= error * largest).all()


def test_shards_share_a_version_out(tmp_path: Path, rows: np.ndarray) -> None:
    manifest = write_version(str(tmp_path), "ctr", rows)
    registry = ModelRegistry(str(tmp_path))
    counts = [load_version(registry, manifest, ShardAssignment(shard, 3)).store.stats()[0].rows for shard in range(3)]
    assert sum(counts) == 300
    assert min(counts) > 50


def test_a_damaged_part_is_refused_and_named(tmp_path: Path, rows: np.ndarray) -> None:
    manifest = write_version(str(tmp_path), "ctr", rows)
    registry = ModelRegistry(str(tmp_path))
    part = tmp_path / "ctr" / "v000001" / manifest.tables[0].parts[1].file
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    with pytest.raises(DataLoss, match=f"{part.name}: the file does not match its checksum"):
        load_version(registry, manifest, ShardAssignment())
    part.write_bytes(data[:-8])
    with pytest.raises(DataLoss, match="its manifest says"):
        load_version(registry, manifest, ShardAssignment())
    part.unlink()
    with pytest.raises(NotFound, match=part.name):
        load_version(registry, manifest, ShardAssignment())
    (tmp_path / "ctr" / "v000001" / MANIFEST).write_text('{"format": 1}')
    with pytest.raises(DataLoss, match="is damaged"):
        registry.manifest("ctr", 1)
    (tmp_path / "ctr" / "v000001" / MANIFEST).write_text('{"format": 99}')
    with pytest.raises(DataLoss, match="has format 99"):
        registry.manifest("ctr", 1)


def test_aliases_move_and_go_back(tmp_path: Path, rows: np.ndarray) -> None:
    registry = ModelRegistry(str(tmp_path))
    for _ in range(4):
        write_version(str(tmp_path), "ctr", rows)
    registry.point("ctr", "live", 1)
    registry.point("ctr", "live", 2)
    registry.point("ctr", "live", 3)
    assert registry.resolve("ctr", "live").history == (1, 2)
    canary = registry.canary("ctr", "live", 4, 0.25)
    assert canary.versions == (3, 4)
    assert registry.rollback("ctr", "live").version == 2
    assert registry.resolve("ctr", "live").canary is None
    assert registry.prune("ctr", 1) == [3]  # 4 is the newest, 2 is live, 1 is where a rollback would go
    assert registry.versions("ctr") == [1, 2, 4]
    assert registry.rollback("ctr", "live").version == 1
    with pytest.raises(FailedPrecondition, match="the alias has named no earlier version than 1"):
        registry.rollback("ctr", "live")
    assert registry.claim_version("ctr") == 5


def test_a_rollback_past_a_pruned_version_moves_the_alias_or_says_that_it_cannot(
    tmp_path: Path, rows: np.ndarray
) -> None:
    registry = ModelRegistry(str(tmp_path))
    for _ in range(3):
        write_version(str(tmp_path), "ctr", rows)
    for version in (1, 2, 1, 3):
        registry.point("ctr", "live", version)
    assert registry.prune("ctr", 1) == [2]
    assert registry.rollback("ctr", "live").version == 1
    with pytest.raises(FailedPrecondition, match="the alias has named no earlier version than 1"):
        registry.rollback("ctr", "live")
    assert registry.resolve("ctr", "live").version == 1


def test_an_unfinished_version_is_none(tmp_path: Path, rows: np.ndarray) -> None:
    registry = ModelRegistry(str(tmp_path))
    write_version(str(tmp_path), "ctr", rows)
    Folder(f"{tmp_path}/ctr/v000002").make()
    assert registry.versions("ctr") == [1]
    assert registry.claim_version("ctr") == 3


def test_what_is_not_there_is_named(tmp_path: Path, rows: np.ndarray) -> None:
    registry = ModelRegistry(str(tmp_path))
    with pytest.raises(NotFound, match=r"model 'ctr': there is none at .*; there are: none"):
        registry.resolve("ctr", "live")
    write_version(str(tmp_path), "ctr", rows)
    registry.point("ctr", "test", 1)
    with pytest.raises(NotFound, match="has no alias 'live'; it has: test"):
        registry.resolve("ctr", "live")
    with pytest.raises(NotFound, match="has no version 9; it has: 1"):
        registry.resolve("ctr", "9")
    with pytest.raises(NotFound, match="has no version 7; it has: 1"):
        registry.point("ctr", "live", 7)
    with pytest.raises(InvalidArgument, match=r"canary share: 1.5 is not allowed"):
        registry.canary("ctr", "test", 1, 1.5)
    with pytest.raises(InvalidArgument, match="keep: 0 is not allowed"):
        registry.prune("ctr", 0)
    (tmp_path / "ctr" / "aliases.json").write_text("{")
    with pytest.raises(DataLoss, match=r"aliases.json: is damaged"):
        registry.aliases("ctr")


@pytest.mark.parametrize("text", ["", "a/b", "../x", "ctr@", "@live", "123", "ctr@a b", "x" * 101])
def test_names_that_are_not_allowed(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not allowed; allowed: 1 to 100"):
        parse_model(text)


def test_model_names() -> None:
    assert parse_model("ctr") == ("ctr", "live")
    assert parse_model("ctr@canary-2") == ("ctr", "canary-2")
    assert parse_model("ctr@12") == ("ctr", "12")


@pytest.mark.parametrize("shard", ["1/1", "0/0", "1", "a/b", "-1/2", "0/2000"])
def test_places_that_are_not_allowed(shard: str) -> None:
    with pytest.raises(InvalidArgument, match="is not allowed; allowed: I/N"):
        ShardAssignment.parse(shard)


def test_a_manifest_says_what_it_was_told(tmp_path: Path, rows: np.ndarray) -> None:
    manifest = write_version(str(tmp_path), "ctr", rows)
    again = ModelManifest.from_json(manifest.to_json(), "here")
    assert again == manifest
    assert again.rows == 300
    assert again.size > 300 * (DIM * 4 + 16)
    assert replace(again, version=2) != manifest
