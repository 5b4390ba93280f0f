"""A shard's load of a checkpoint: rows are what was saved, and no row of a file that differs is installed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from checkpoint_rows import rows_of_checkpoint
from shard_engine import lone_engine
from sparserow.cpp_ext import _server
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.file_check import read_checked
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import DataLoss, FailedPrecondition
from sparserow.proto.optim import SGD, Adagrad
from sparserow.proto.schema import RowPolicy, TableSchema
from sparserow.proto.schema_message import message_of_schema
from sparserow.ps_server.shard.checkpoints import ShardCheckpoints
from sparserow.ps_server.shard.engine import ShardEngine
from sparserow.ps_server.shard.loads import CheckpointLoads

SLOTS = 64
NAME = "save-000001"
TABLES = (
    TableSchema("ads", "large", 16, Adagrad(lr=0.1), id=_server.id_of_name("ads/large"), version=1),
    TableSchema("ads", "half", 3, SGD(lr=1.0), dtype="bfloat16", id=_server.id_of_name("ads/half"), version=1),
    TableSchema(
        "ads",
        "aged",
        2,
        Adagrad(lr=0.1),
        id=_server.id_of_name("ads/aged"),
        version=1,
        policy=RowPolicy(evict_after_steps=9, evict_after_seconds=9),
    ),
)
ROWS = {"large": 30_000, "half": 500, "aged": 400}


@pytest.fixture
def engine() -> Iterator[ShardEngine]:
    with lone_engine(slot_count=SLOTS) as engine:
        engine.note_owned(pb.Route(epoch=1, slot_count=SLOTS, runs=[pb.SlotRun(start=0, shard=0)]))
        yield engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint of one shard, with several files of one table and one file of two tables."""
    url, random = tmp_path_factory.mktemp("ckpt"), np.random.default_rng(1)
    with lone_engine(slot_count=SLOTS) as engine:
        engine.note_owned(pb.Route(epoch=1, slot_count=SLOTS, runs=[pb.SlotRun(start=0, shard=0)]))
        engine.create_tables(TABLES)
        for table in TABLES:
            keys = random.choice(1 << 40, ROWS[table.name], replace=False).astype(np.uint64)
            engine.store.apply(
                table.id, keys, random.standard_normal((len(keys), table.dim)).astype(np.float32), lr=0.1
            )
        checkpoints = ShardCheckpoints(engine)
        checkpoints.cut(pb.CutRequest(save="one", deadline_ms=5000, side_budget_bytes=64 << 20))
        (url / NAME).mkdir()
        request = pb.DumpRequest(save="one", url=str(url / NAME), part_bytes=1 << 20)
        replies = list(checkpoints.dump(request))
    parts: dict[int, list[files.PartEntry]] = {table.id: [] for table in TABLES}
    slots = []
    for reply in replies:
        written = reply.rows.file if reply.HasField("rows") else reply.slots
        for part in reply.rows.parts:
            entry = files.PartEntry(
                written.file, written.bytes, written.xxh3, 0, part.first_slot, part.end_slot, part.rows
            )
            parts[part.table_id].append(entry)
        if reply.HasField("slots"):
            slots.append(files.SlotsEntry(written.file, written.bytes, written.xxh3, 0, SLOTS))
    assert len(parts[TABLES[0].id]) > 2
    manifest = files.Manifest(
        name=NAME,
        created=files.now_text(),
        cluster_id=1,
        slot_count=SLOTS,
        shards=1,
        lineage=1,
        tables=tuple(files.TableEntry(table, tuple(parts[table.id])) for table in TABLES),
        slots=tuple(slots),
    )
    Folder(str(url / NAME)).put(files.FILE, manifest.to_bytes())
    return url


def request_of(url: Path, **fields) -> pb.LoadRequest:
    tables = [pb.LoadTable(schema=message_of_schema(table), saved_table_id=table.id) for table in TABLES]
    return pb.LoadRequest(url=str(url), name=NAME, lineage=2, tables=tables, turns=1, **fields)


def rows_of(engine: ShardEngine) -> dict[str, dict[int, tuple]]:
    """Every row of a store, in the form of ``rows_of_checkpoint``."""
    snapshot, found = engine.store.snapshot(), {}
    for table in TABLES:
        rows, end = found.setdefault(table.full_name, {}), 0
        while end < SLOTS:
            keys, versions, counts, weights, state, *_, end = snapshot.next(table.id, max_bytes=1 << 20)
            for i, key in enumerate(keys.tolist()):
                rows[key] = (int(versions[i]), int(counts[i]), weights[i].tobytes(), state[i].tobytes())
    snapshot.end()
    return found


def load_often(engine: ShardEngine, url: Path) -> None:
    for _ in range(100):
        list(CheckpointLoads(engine).load(request_of(url)))


def damage_at(data: bytes, where: str) -> int:
    """The position of a byte in a region of a file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if where == "length":
        return 0
    if where == "header":
        return 8 + data[8:].index(b"sparserow.cluster")
    if where == "last byte":
        return len(data) - 1
    begin, end = next(entry["data_offsets"] for name, entry in header.items() if name.endswith(where))
    return 8 + length + (begin + end) // 2


@pytest.mark.parametrize("is_cached", [True, False])
def test_rows_are_what_was_saved(engine: ShardEngine, checkpoint: Path, is_cached: bool) -> None:
    """``rows_of_checkpoint`` maps the files, so that both ways to read them are compared."""
    if not is_cached:
        drop_pages(checkpoint / NAME)
    *_, last = CheckpointLoads(engine).load(request_of(checkpoint))
    assert last.rows == sum(ROWS.values())
    assert rows_of(engine) == rows_of_checkpoint(checkpoint)


@pytest.mark.parametrize("where", ["length", "header", "key", "version", "weight", "state", "last byte"])
@pytest.mark.parametrize("of", ["large", "half"])
def test_a_flipped_byte_is_named_and_its_file_is_not_installed(
    engine: ShardEngine, checkpoint: Path, tmp_path: Path, where: str, of: str
) -> None:
    url = Path(shutil.copytree(checkpoint, tmp_path / "ckpt"))
    manifest = files.read_manifest(Folder(str(url)))
    part = next(table for table in manifest.tables if table.schema.name == of).parts[0]
    path = url / NAME / part.file
    data = bytearray(path.read_bytes())
    data[damage_at(data, where)] ^= 4
    path.write_bytes(data)
    lost = sum(each.rows for table in manifest.tables for each in table.parts if each.file == part.file)
    loads = CheckpointLoads(engine)
    with pytest.raises(DataLoss, match=f"^{path}: is damaged: its checksum does not match$"):
        list(loads.verify(request_of(url)))
    with pytest.raises(DataLoss, match=f"^{path}: is damaged: its checksum does not match$"):
        list(loads.load(request_of(url)))
    found, saved = rows_of(engine), rows_of_checkpoint(checkpoint)
    assert sum(len(rows) for rows in found.values()) <= sum(ROWS.values()) - lost
    for name, rows in found.items():
        assert rows.items() <= saved[name].items()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("cut", "the file has {less} bytes; its manifest says {size}"),
        ("grown", "the file has {more} bytes; its manifest says {size}"),
        ("gone", "the file is missing; the checkpoint is damaged"),
        ("a folder", "Is a directory"),
    ],
)
def test_a_file_of_another_size_is_named(
    engine: ShardEngine, checkpoint: Path, tmp_path: Path, change: str, says: str
) -> None:
    url = Path(shutil.copytree(checkpoint, tmp_path / "ckpt"))
    part = files.read_manifest(Folder(str(url))).tables[0].parts[1]
    path = url / NAME / part.file
    data = path.read_bytes()
    path.unlink()
    if change == "a folder":
        path.mkdir()
    elif change != "gone":
        path.write_bytes(data[:-1] if change == "cut" else data + b"\0")
    says = says.format(less=part.bytes - 1, more=part.bytes + 1, size=part.bytes)
    with pytest.raises((DataLoss, FailedPrecondition), match=f"^{path}: {says}$"):
        list(CheckpointLoads(engine).load(request_of(url)))


def test_a_file_that_is_cut_short_while_it_is_read_ends_the_load_and_no_process(
    engine: ShardEngine, checkpoint: Path, tmp_path: Path
) -> None:
    """A mapped file that loses its pages ends the process that reads them."""
    for round_number in range(8):
        url = Path(shutil.copytree(checkpoint, tmp_path / f"ckpt{round_number}"))
        paths = sorted((url / NAME).glob("rows.*"))

        def cut_all(paths: list[Path] = paths) -> None:
            for path in reversed(paths):
                with open(path, "r+b") as file:
                    file.truncate(4096)

        cutter = threading.Thread(target=cut_all)
        cutter.start()
        with pytest.raises(DataLoss, match=r"bytes; its manifest says|is damaged"):
            load_often(engine, url)
        cutter.join()


def test_a_load_whose_caller_goes_away_ends_and_the_next_one_is_whole(engine: ShardEngine, checkpoint: Path) -> None:
    loads = CheckpointLoads(engine)
    going = loads.load(request_of(checkpoint))
    assert next(going).bytes > 0
    going.close()
    *_, last = loads.load(request_of(checkpoint))
    assert last.rows == sum(ROWS.values())
    assert rows_of(engine) == rows_of_checkpoint(checkpoint)


def test_both_ways_to_read_a_file_agree(tmp_path: Path) -> None:
    """Random bytes around the sizes of pages and blocks, whole and with one byte flipped, cut or added."""
    random, folder, reader = np.random.default_rng(2), Folder(str(tmp_path)), _server.FileReader()
    for size in (0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (4 << 20) + 1, *random.integers(1, 9 << 20, 6)):
        data = random.bytes(int(size))
        folder.write("file", [data])
        facts = files.FileFacts("file", len(data), xxhash.xxh3_64_hexdigest(data))
        for kind in ("whole", "flipped", "cut", "grown"):
            changed = bytearray(data)
            if kind == "flipped" and data:
                changed[random.integers(len(data))] ^= 1 << int(random.integers(8))
            changed = changed[:-1] if kind == "cut" else changed + b"x" * (kind == "grown")
            (tmp_path / "file").write_bytes(changed)
            if random.integers(2):
                drop_pages(tmp_path)
            said = []
            for each in (None, reader):
                try:
                    said.append(bytes(read_checked(folder, facts, "differs", each)))
                except DataLoss as error:
                    said.append(str(error))
            assert said[0] == said[1]
            assert (said[0] == data) == (bytes(changed) == data)


def drop_pages(folder: Path) -> None:
    """Writes the files of a folder to the disk, and has the system forget them."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
