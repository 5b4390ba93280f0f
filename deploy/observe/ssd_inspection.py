"""Reads a stopped shard's SSD folder, independently of the code that wrote it; the engine ``rocksdb`` with rocksdb-py.

Run as ``python -m sparserow.deploy.observe.ssd_inspection``, it prints one JSON object. It needs a process of its own,
because rocksdb-py brings a RocksDB beside that of the native core. ``ssd_tier.h`` and ``row_codec.h`` in
``cpp_ext/store`` describe the layout.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...proto.errors import (
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    SparserowError,
)
from ...proto.extras import install_command
from .page_log_inspection import page_log_rows

FORMAT = 1  # of a row image
FORMATS = {1: "rocksdb", 2: "pages"}  # of a folder
_KEY = struct.Struct(">HIQ")  # slot, table id, key; RocksDB has the key's hash in place of the key
_MASK = 2**64 - 1
_HEADER = struct.Struct("<IBBHHHIQ")  # checksum, format, dtype, dim, state floats, 0, update count, version
_DTYPES = ("float32", "bfloat16", "float16")
_ERRORS: tuple[type[SparserowError], ...] = (DataLoss, FailedPrecondition, Internal, InvalidArgument, NotFound)


@dataclass
class TableOnSsd:
    """The rows that a folder has of one table, and the bytes of their stored form."""

    table_id: int
    name: str
    rows: int = 0
    bytes: int = 0


@dataclass
class StoredRow:
    """One decoded row. Weights and state are float32 whatever the stored dtype is."""

    table_id: int
    key: int
    slot: int
    dtype: str
    version: int
    update_count: int
    weights: list[float]
    state: list[float]


@dataclass
class SsdContents:
    """The contents of a folder: its manifest (format, hash, cluster, shard), its tables, and the requested rows."""

    manifest: dict[str, int]
    tables: list[TableOnSsd] = field(default_factory=list)
    rows: list[StoredRow] = field(default_factory=list)


def inspect_folder(path: Path, *, table: str | None = None, key: int | None = None) -> SsdContents:
    """Reads a folder in a process of its own.

    Args:
        path: the folder of a shard, which has a file SPARSEROW.
        table: the table of the row to decode: an id, or the name ``namespace/name``.
        key: the key of the row; None with a table decodes all of its rows, in order of slot and key.

    Raises:
        InvalidArgument: the path is not such a folder, or has another format.
        FailedPrecondition: a shard uses the folder, or rocksdb-py is not installed.
        NotFound: the folder has no such row.
        DataLoss: a row or a block fails its checksum.
    """
    command = [sys.executable, "-m", __name__, str(path), table or "", "" if key is None else str(key)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    if not lines:
        raise Internal(f"{path}: the reader ended with {ended.returncode}: {ended.stderr.strip()[-500:]}")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise next(each for each in _ERRORS if each.code == answer["error"])(answer["message"])
    return SsdContents(
        answer["manifest"],
        [TableOnSsd(**each) for each in answer["tables"]],
        [StoredRow(**each) for each in answer["rows"]],
    )


def read_manifest(path: Path) -> dict[str, int]:
    """Returns the contents of the file SPARSEROW of a folder: format, hash, cluster and shard.

    Raises:
        InvalidArgument: the file is missing, or has a format that this build cannot read.
    """
    try:
        text = (path / "SPARSEROW").read_text()
    except OSError:
        shards = sorted(each.parent.name for each in path.glob("*/SPARSEROW")) if path.is_dir() else []
        hint = f"; did you mean {path / shards[0]}?" if shards else ""
        raise InvalidArgument(f"{path} is not the SSD folder of a shard: it has no file SPARSEROW{hint}") from None
    try:
        manifest = {name: int(value) for name, value in (line.split() for line in text.splitlines())}
    except ValueError:
        raise InvalidArgument(f"{path / 'SPARSEROW'} is not a manifest") from None
    if manifest.get("format") not in FORMATS:
        raise InvalidArgument(f"{path} has format {manifest.get('format')}; this build reads formats {[*FORMATS]}")
    return manifest


def decode_row(stored_key: bytes, value: bytes) -> StoredRow:
    """Returns the row of a key and value in the database.

    Raises:
        DataLoss: the bytes are not a whole row, or fail the checksum.
    """
    slot, table_id, key = _KEY.unpack(stored_key)
    if len(value) < _HEADER.size:
        raise DataLoss(f"table id {table_id}, key {key}: {len(value)} bytes are not a row")
    checksum, version_of_format, dtype, dim, state_floats, _, count, version = _HEADER.unpack_from(value)
    seed = xxhash.xxh3_64_intdigest(struct.pack("<Q", key), seed=table_id)
    if checksum != xxhash.xxh3_64_intdigest(value[4:], seed=seed) & 0xFFFFFFFF:
        raise DataLoss(f"table id {table_id}, key {key}: the stored row fails its checksum")
    if version_of_format != FORMAT:
        has = f"the row has format {version_of_format}; this program reads format {FORMAT}"
        raise DataLoss(f"table id {table_id}, key {key}: {has}")
    if dtype >= len(_DTYPES):
        raise DataLoss(f"table id {table_id}, key {key}: the row has dtype {dtype}; allowed: 0 to {len(_DTYPES) - 1}")
    weights_bytes = dim * (4 if dtype == 0 else 2)
    state_at = _HEADER.size + (weights_bytes + 3) // 4 * 4
    if len(value) != state_at + 4 * state_floats:
        raise DataLoss(f"table id {table_id}, key {key}: the row has {len(value)} bytes")
    raw = value[_HEADER.size : _HEADER.size + weights_bytes]
    weights = {
        0: lambda: np.frombuffer(raw, np.float32),
        1: lambda: (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32),
        2: lambda: np.frombuffer(raw, np.float16).astype(np.float32),
    }[dtype]()
    state = np.frombuffer(value, np.float32, state_floats, state_at)
    return StoredRow(table_id, key, slot, _DTYPES[dtype], version, count, weights.tolist(), state.tolist())


def _table_names(path: Path) -> dict[int, str]:
    try:
        lines = (path / "TABLES").read_text().splitlines()
    except OSError:
        return {}
    return {int(number): name for number, name in (line.split(" ", 1) for line in lines)}


@contextmanager
def _unused(path: Path) -> Iterator[None]:
    with (path / "LOCK").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise FailedPrecondition(f"{path} is in use by a shard; stop it first") from None
        yield


@contextmanager
def _rows(path: Path, format_of_folder: int) -> Iterator[Iterator[tuple[bytes, bytes]]]:
    """Opens the rows of a folder: stored keys and images, of the engine that wrote them."""
    if FORMATS[format_of_folder] == "pages":
        yield ((_KEY.pack(each.slot, each.table_id, each.key), each.image) for each in page_log_rows(path / "rows"))
        return
    with _rocksdb_rows(path) as rows:
        yield rows


def _with_key(stored_key: bytes) -> bytes:
    """Returns the stored key of RocksDB with the row's key in place of its hash.

    Of 8 bytes XXH3_64bits is a bijection (xxHash, doc/xxhash_spec.md, "XXH3, small inputs"), whose steps are undone
    here.
    """
    slot, table_id, found = _KEY.unpack(stored_key)
    seed = table_id ^ int.from_bytes(table_id.to_bytes(4, "little"), "big") << 32
    undo = pow(0x9FB21C651E98DF25, -1, 2**64)
    mixed = found ^ found >> 28 ^ found >> 56
    mixed = mixed * undo & _MASK
    mixed ^= (mixed >> 35) + 8
    mixed = mixed * undo & _MASK
    for _ in range(63):  # the 64th power of a sum of three rotations is the identity
        mixed ^= _rotated(mixed, 49) ^ _rotated(mixed, 24)
    mixed ^= ((0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE) - seed) & _MASK
    key = _rotated(mixed, 32)
    if xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), seed=table_id) != found:
        raise DataLoss(f"a stored key of table id {table_id} is that of no row")
    return _KEY.pack(slot, table_id, key)


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


@contextmanager
def _rocksdb_rows(path: Path) -> Iterator[Iterator[tuple[bytes, bytes]]]:
    try:
        import rocksdbpy
    except ImportError:
        raise FailedPrecondition(f"inspect needs rocksdb-py; install it: {install_command('inspect')}") from None
    try:
        database: Any = rocksdbpy.open_for_readonly(str(path / "rows"), rocksdbpy.Option(), False)
        rows = database.iterator()
        try:
            yield ((_with_key(bytes(stored_key)), value) for stored_key, value in rows)
        finally:
            rows.close()  # closed first, because it must not outlive its database
            database.close()
    except rocksdbpy.RocksDBException as error:
        raise DataLoss(f"{path}: {error}") from None


def _read(path: Path, table: str, key: str) -> SsdContents:
    contents = SsdContents(read_manifest(path))
    names = _table_names(path)
    wanted = {number for number, name in names.items() if name == table}
    if table.isdecimal():
        wanted.add(int(table))
    if table and not wanted:
        raise NotFound(f"table {table} is not in {path}; there are: {', '.join(names.values()) or 'none with a name'}")
    tables: dict[int, TableOnSsd] = {}
    with _unused(path), _rows(path, contents.manifest["format"]) as rows:
        for stored_key, value in rows:
            row = decode_row(bytes(stored_key), bytes(value))
            number = row.table_id
            totals = tables.setdefault(number, TableOnSsd(number, names.get(number, "")))
            totals.rows += 1
            totals.bytes += len(value)
            if number in wanted and (not key or row.key == int(key)):
                contents.rows.append(row)
    contents.rows.sort(key=lambda row: (row.table_id, row.slot, row.key))
    contents.tables = sorted(tables.values(), key=lambda each: each.table_id)
    if key and not contents.rows:
        raise NotFound(f"key {key} of table {table} is not in {path}; a row that is only in memory is not on the SSD")
    return contents


def _main(path: str, table: str, key: str) -> None:
    answer: dict[str, Any]
    try:
        answer = asdict(_read(Path(path), table, key))
    except SparserowError as error:
        answer = {"error": error.code, "message": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the normal end of the process fails in rocksdb-py


if __name__ == "__main__":
    _main(*sys.argv[1:])
