"""What ``sparserow inspect`` reads, by Python and RocksDB's own binding, is what the store wrote."""

import json
import struct

import numpy as np
import pytest

from sparserow.cpp_ext import _server
from sparserow.deploy.cli import main
from sparserow.deploy.observe import ssd_inspection
from sparserow.proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, error_of

DIM = 6
TABLE = _server.id_of_name("n/users")


@pytest.fixture
def stopped(tmp_path, ssd_engine):
    """The folder of a store that is gone, and what it held: keys, versions, counts, rows, state."""
    _server.set_error_factory(error_of)
    store = _server.Store(
        memory_budget_bytes=512 << 10,
        ssd_path=str(tmp_path),
        ssd_engine=ssd_engine,
        cluster_id=5,
        shard=2,
        slot_count=4,
    )
    for number, dtype in ((TABLE, "bfloat16"), (77, "float16")):
        store.create_table(
            _server.TableSchema(
                id=number,
                name="n/users",
                dim=DIM,
                dtype=dtype,
                init=_server.InitSpec(kind="normal", a=0.0, b=1.0),
                optimizer=_server.OptimizerSpec(kind="adagrad"),
            )
        )
    rng = np.random.default_rng(2)
    keys = rng.integers(2**64, size=6_000, dtype=np.uint64)
    for part in np.array_split(keys, 12):
        store.apply(TABLE, part, rng.standard_normal((len(part), DIM), np.float32), lr=0.1)
    store.apply(77, keys[:10], np.ones((10, DIM), np.float32), lr=0.1)
    store.write_back()
    *columns, cursor = store.scan(TABLE, max_rows=10_000, with_state=True)
    assert cursor == 0
    with pytest.raises(FailedPrecondition, match="in use"):
        ssd_inspection.inspect_folder(tmp_path)
    del store
    (tmp_path / "TABLES").write_text(f"{TABLE} n/users\n")
    return tmp_path, columns


def test_every_row_is_there_as_the_store_gave_it(stopped):
    path, (keys, versions, counts, rows, state) = stopped
    seen = {row.key: row for row in ssd_inspection.inspect_folder(path, table="n/users").rows}
    assert sorted(seen) == sorted(keys.tolist())
    for i, key in enumerate(keys.tolist()):
        row = seen[key]
        assert (row.version, row.update_count, row.dtype) == (versions[i], counts[i], "bfloat16")
        assert row.slot == _server.slot_of(_server.row_hash(TABLE, key), 4)
        np.testing.assert_array_equal(np.array(row.weights, np.float32), rows[i])
        np.testing.assert_array_equal(np.array(row.state, np.float32), state[i])


def test_the_command_shows_tables_and_one_row(stopped, capsys):
    path, (keys, _, counts, rows, _) = stopped
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path), "--table", "n/users", "--key", str(keys[3])])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "shard 2 of cluster 0000000000000005" in shown
    assert "n/users" in shown
    assert "6,000" in shown
    assert f"{counts[3]} updates" in shown
    assert json.dumps(rows[3].tolist()) in shown
    contents = ssd_inspection.inspect_folder(path)
    assert {each.table_id: each.rows for each in contents.tables} == {TABLE: 6_000, 77: 10}


def test_bad_input_is_named(stopped, tmp_path):
    path, _ = stopped
    with pytest.raises(NotFound, match="key 1 of table n/users"):
        ssd_inspection.inspect_folder(path, table="n/users", key=1)
    with pytest.raises(NotFound, match="there are: n/users"):
        ssd_inspection.inspect_folder(path, table="n/items", key=1)
    with pytest.raises(InvalidArgument, match="did you mean"):
        ssd_inspection.inspect_folder(path.parent)
    (path / "SPARSEROW").write_text("format 9\nhash 1\ncluster 5\nshard 2\n")
    with pytest.raises(InvalidArgument, match="format 9"):
        ssd_inspection.inspect_folder(path)


def test_rows_that_were_deleted_or_written_again_count_once(stopped, tmp_path_factory, ssd_engine):
    """Also in pages that collection has moved, and without the index of a clean end for what was not deleted."""
    folder = tmp_path_factory.mktemp("rewritten")
    store = _server.Store(
        memory_budget_bytes=2 << 20, ssd_path=str(folder), ssd_engine=ssd_engine, cluster_id=5, slot_count=16
    )
    store.create_table(
        _server.TableSchema(
            id=TABLE,
            name="n/users",
            dim=64,
            init=_server.InitSpec(kind="normal", a=0.0, b=1.0),
            optimizer=_server.OptimizerSpec(kind="adagrad"),
        )
    )
    rng = np.random.default_rng(4)
    keys = rng.integers(2**64, size=12_000, dtype=np.uint64)
    grads = np.ones((1_000, 64), np.float32)
    for _ in range(4):
        for part in np.array_split(rng.permutation(keys), 12):
            store.apply(TABLE, part, grads[: len(part)], lr=0.1)
    store.write_back()
    assert store.erase(TABLE, keys[:5_000]) == 5_000
    del store
    rows = ssd_inspection.inspect_folder(folder, table=str(TABLE)).rows
    assert sorted(row.key for row in rows) == sorted(keys[5_000:].tolist())
    assert {row.update_count for row in rows} == {4}
    if ssd_engine == "pages":
        (folder / "rows" / "index").unlink()  # as after a kill
        counts = {row.key: row.update_count for row in ssd_inspection.inspect_folder(folder, table=str(TABLE)).rows}
        assert {counts[key] for key in keys[5_000:].tolist()} == {4}
        with (folder / "rows" / "pages").open("r+b") as file:
            file.seek((1 << 20) + 100)
            file.write(b"\xa5")
        with pytest.raises(DataLoss, match="the page at byte 1048576 fails its checksum"):
            ssd_inspection.inspect_folder(folder)


def test_a_changed_byte_fails_the_checksum():
    # The golden row of tests/cpp/row_codec_test.cc.
    key = struct.pack(">HIQ", 7, 0x01020304, 0x1122334455667788)
    value = bytes.fromhex("e695880a0101030002000000070000000700000000000100803f0000000000000000003f000000c0")
    row = ssd_inspection.decode_row(key, value)
    assert (row.weights, row.state, row.update_count) == ([1.0, 0.0, 0.0], [0.5, -2.0], 7)
    assert row.version == 1 << 48 | 7
    for at in range(len(value)):
        bad = bytearray(value)
        bad[at] ^= 1
        with pytest.raises(DataLoss):
            ssd_inspection.decode_row(key, bytes(bad))
    with pytest.raises(DataLoss):
        ssd_inspection.decode_row(key[:6] + struct.pack(">Q", 1), value)
