"""Chains of saves: what a store is asked for grows with the links once, and no listing is made for each of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.best import BestCheckpoint, forget_best, note_best
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.row_parts import PartFacts, Rows, decode_rows, encode_rows
from sparserow.proto.errors import DataLoss
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema

SCHEMA = TableSchema("n", "t", 4, SGD(), id=7, version=1)


class CountedStore(MemoryFileSystem):
    """Files in memory, behind a store that counts what it is asked for."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[Counter[str]] = Counter()

    def ls(self, *arguments: Any, **named: Any) -> Any:
        self.asked["list"] += 1
        return super().ls(*arguments, **named)

    def exists(self, *arguments: Any, **named: Any) -> Any:
        self.asked["exists"] += 1
        return super().exists(*arguments, **named)

    def cat_file(self, *arguments: Any, **named: Any) -> Any:
        self.asked["read"] += 1
        return super().cat_file(*arguments, **named)


@pytest.fixture
def folder() -> Iterator[Folder]:
    fsspec.register_implementation("counted", CountedStore, clobber=True)
    CountedStore.store.clear()
    CountedStore.pseudo_dirs[:] = [""]
    yield Folder("counted://ckpt")
    CountedStore.store.clear()


def asked_by(call: Any) -> Counter[str]:
    CountedStore.asked.clear()
    call()
    return Counter(CountedStore.asked)


def chain_of(folder: Folder, links: int, known: set[str] | None = None) -> None:
    """Saves of changes, each after the other."""
    needs: tuple[str, ...] = ()
    for number in range(links):
        name = files.begin_folder(folder, known)
        manifest = files.Manifest(
            name=name,
            created=files.now_text(),
            cluster_id=1,
            slot_count=64,
            shards=1,
            lineage=1,
            tables=(files.TableEntry(SCHEMA, ()),),
            base=needs[-1] if needs else "",
            chain=number,
            needs=needs,
        )
        (folder / name).put(files.FILE, manifest.to_bytes())
        needs = (*needs, name)


@pytest.mark.parametrize("links", [2, 5, 25])
def test_a_walk_reads_each_manifest_once(folder: Folder, links: int) -> None:
    chain_of(folder, links)
    assert asked_by(lambda: files.read_chain(folder)) == {"list": 1, "read": links}
    assert asked_by(lambda: files.read_chain(folder, f"save-{links:06d}")) == {"read": links}
    assert [each.name for each in files.read_chain(folder)] == files.list_names(folder)


def test_a_save_asks_for_what_is_new(folder: Folder) -> None:
    """What a coordinator does for a save, beside its files: the links before it cost nothing."""
    counts = []
    for links in (5, 25):
        inside, known = folder / str(links), set[str]()
        chain_of(inside, links, known)
        files.prune(inside, 2, known)

        def save(inside: Folder = inside, known: set[str] = known) -> None:
            files.begin_folder(inside, known)
            files.read_manifest(inside)
            files.prune(inside, 2, known)

        counts.append(asked_by(save))
    assert counts[0] == counts[1]
    assert len(files.list_names(folder / "25")) == 25, "all of the chain are needed"


def test_what_a_kept_checkpoint_needs_stays(folder: Folder) -> None:
    chain_of(folder, 4)
    newest = files.read_manifest(folder)
    name = files.begin_folder(folder)  # cut short: it adds to the full one alone
    cut = replace(newest, name=name, base="save-000001", chain=1, needs=("save-000001",))
    (folder / name).put(files.FILE, cut.to_bytes())
    assert files.prune(folder, 1) == ["save-000002", "save-000003", "save-000004"]
    assert [each.name for each in files.read_chain(folder)] == ["save-000001", "save-000005"]
    files.note_read_whole(folder, "save-000001")
    chain_of(folder, 1)
    assert files.prune(folder, 1) == ["save-000005"]
    assert files.list_names(folder) == ["save-000001", "save-000006"]


def test_the_best_checkpoint_and_what_it_adds_to_stay(folder: Folder) -> None:
    chain_of(folder, 4)
    note_best(folder, BestCheckpoint("save-000002", 3, "click.auc", 0.8))
    assert files.prune(folder, 1) == []
    chain_of(folder, 1)
    assert files.prune(folder, 1) == ["save-000003", "save-000004"]
    assert files.list_names(folder) == ["save-000001", "save-000002", "save-000005"]
    forget_best(folder)
    forget_best(folder)
    assert files.prune(folder, 1) == ["save-000001", "save-000002"]


def rows(count: int, dim: int, dtype: type = np.float32) -> Rows:
    return Rows(
        keys=np.arange(count, dtype=np.uint64),
        versions=np.arange(count, dtype=np.uint64),
        update_counts=np.ones(count, np.uint32),
        weights=np.arange(count * dim).astype(dtype).reshape(count, dim),
        state=np.zeros((count, dim), np.float32),
    )


def test_tables_share_a_file() -> None:
    """Whatever lies before them there, their columns are as a table's of its own."""
    parts = [
        (PartFacts(1, "n/a", 7, "bfloat16", 64, 0, 9), rows(3, 5, np.uint16)),
        (PartFacts(1, "n/b", 8, "float32", 64, 3, 4), rows(0, 2)),
        (PartFacts(1, "n/c", 9, "float16", 64, 1, 64), rows(7, 1, np.float16)),
    ]
    encoded = encode_rows(parts)
    data = b"".join(piece if isinstance(piece, bytes) else piece.tobytes() for piece in encoded.pieces)
    back = decode_rows(memoryview(data), "shared")
    assert [facts for facts, _ in back] == [facts for facts, _ in parts]
    for (_, given), (_, found) in zip(parts, back, strict=True):
        for name, column in vars(given).items():
            np.testing.assert_array_equal(getattr(found, name), column)
            assert getattr(found, name).flags.aligned
    with pytest.raises(DataLoss, match="the header of the file lacks"):
        decode_rows(memoryview(data.replace(b"7.version", b"7.versiom")), "shared", is_checked=True)


def test_what_was_written_is_compared_before_it_is_a_checkpoint(folder: Folder) -> None:
    name = files.begin_folder(folder)
    encoded = encode_rows([(PartFacts(1, "n/t", 7, "float32", 64, 0, 64), rows(3, 4))])
    (folder / name).write("rows.0.0.safetensors", encoded.pieces)
    part = files.PartEntry("rows.0.0.safetensors", encoded.size, encoded.xxh3, 0, 0, 64, 3)
    manifest = files.Manifest(
        name=name,
        created=files.now_text(),
        cluster_id=1,
        slot_count=64,
        shards=1,
        lineage=1,
        tables=(files.TableEntry(SCHEMA, (part,)),),
    )
    assert asked_by(lambda: files.check_written(folder / name, manifest)) == {"list": 1}
    for damaged, words in (
        ((part, replace(part, xxh3="0" * 16)), r"two files are named rows\.0\.0\.safetensors"),
        ((part, replace(part, file="rows.0.1.safetensors")), r"rows\.0\.1\.safetensors: the file is missing"),
        ((replace(part, bytes=1),), r"rows\.0\.0\.safetensors: the file has \d+ bytes; 1 bytes were written"),
    ):
        with pytest.raises(DataLoss, match=words):
            files.check_written(folder / name, replace(manifest, tables=(files.TableEntry(SCHEMA, damaged),)))


def test_a_manifest_names_a_shared_file_once(folder: Folder) -> None:
    part = files.PartEntry("rows.0.0.safetensors", 1000, "ab", 0, 0, 64, 3)
    tables = tuple(files.TableEntry(replace(SCHEMA, name=f"t{number}"), (part,)) for number in range(100))
    manifest = files.Manifest(
        "save-000001", files.now_text(), 1, 64, 1, 1, tables, needs=("save-000002", "save-000003")
    )
    assert (manifest.size, manifest.row_bytes, manifest.rows) == (1000, 1000, 300)
    assert files.Manifest.of_bytes(manifest.to_bytes(), "x") == manifest
    assert json.loads(manifest.to_bytes())["checkpoint"]["parts"] == [["rows.0.0.safetensors", 1000, "ab", 0]]
    assert folder.names() == []


def test_what_was_found_damaged_is_noted_as_long_as_it_is_there(folder: Folder) -> None:
    chain_of(folder, 3)
    for name in ("save-000001", "save-000002"):
        files.note_damaged(folder, name)
    assert files.damaged_in(folder) == {"save-000001", "save-000002"}
    assert "save-000001" not in files.prune(folder, 1), "what the newest needs stays, whole or not"
    files.verify(folder, files.read_chain(folder, "save-000001"))
    assert files.damaged_in(folder) == {"save-000002"}, "the other was read whole"
    (folder / "save-000002").remove()
    assert files.damaged_in(folder) == set(), "what is gone is not named"
    folder.put(files.DAMAGED_FILE, b"{")
    assert files.damaged_in(folder) == set()


def test_one_that_was_read_whole_and_is_damaged_by_now_is_removed(folder: Folder) -> None:
    chain_of(folder, 1)
    files.note_read_whole(folder, "save-000001")
    name = files.begin_folder(folder)
    newest = replace(files.read_manifest(folder), name=name)
    (folder / name).put(files.FILE, newest.to_bytes())
    assert files.prune(folder, 1) == []
    files.note_damaged(folder, "save-000001")
    assert files.prune(folder, 1) == ["save-000001"]
