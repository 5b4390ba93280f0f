"""Rows to files and back, and weights of models trained elsewhere, over every format; bad files change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

import sparserow as sr

DIM, ROWS = 5, 300


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=3).connect("files", staleness=None) as session:
        for name in ("user", "item"):
            schema = sr.TableSchema(namespace="files", name=name, dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1))
            session.core.catalog.create_table(schema)
        yield session


def filled(session: sr.Session, table: str = "user") -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    keys = np.concatenate([np.array([0, 2**64 - 1], np.uint64), random.integers(1, 2**63, ROWS - 2, dtype=np.uint64)])
    rows = random.normal(size=(ROWS, DIM)).astype(np.float32)
    session.table(table).assign(keys, rows)
    return keys, rows


@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
@pytest.mark.parametrize("where", ["path", "memory"])
def test_what_is_exported_comes_back(session: sr.Session, tmp_path: Path, ending: str, where: str) -> None:
    keys, rows = filled(session)
    url = f"{tmp_path}/rows.{ending}" if where == "path" else f"memory://folder/{tmp_path.name}.{ending}"
    told: list[int] = []
    assert session.table("user").export(url, batch_rows=64, progress=told.append) == ROWS
    assert told[-1] == ROWS
    assert len(told) > 1
    told.clear()
    assert session.table("item").load(url, batch_rows=77, progress=told.append) == ROWS
    assert told == sorted(told)
    assert told[-1] == ROWS
    np.testing.assert_array_equal(session.table("item").pull(keys), rows)
    assert sum(len(found) for found, _ in session.table("item").scan()) == ROWS
    if where == "path":
        assert [path.name for path in tmp_path.iterdir()] == [f"rows.{ending}"]
    else:
        assert not [path for path in fsspec.filesystem("memory").ls("/folder") if path["name"].endswith(".partial")]


def test_anyone_can_open_the_files(session: sr.Session, tmp_path: Path) -> None:
    keys, rows = filled(session)
    wanted = {int(key): row for key, row in zip(keys, rows, strict=True)}
    session.table("user").export(f"{tmp_path}/rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert {name: str(kind) for name, kind in zip(table.schema.names, table.schema.types, strict=True)} == {
        "key": "uint64",
        "vector": f"fixed_size_list<element: float>[{DIM}]",
    }
    for key, row in zip(table["key"].to_pylist(), table["vector"].to_pylist(), strict=True):
        np.testing.assert_array_equal(np.float32(row), wanted[key])
    assert table.schema.metadata[b"sparserow.table"] == b"user"
    session.table("user").export(f"{tmp_path}/rows.safetensors", batch_rows=50)
    loaded = safetensors.numpy.load_file(tmp_path / "rows.safetensors")
    assert loaded["key"].dtype == np.uint64
    for key, row in zip(loaded["key"], loaded["vector"], strict=True):
        np.testing.assert_array_equal(row, wanted[int(key)])
    with safetensors.safe_open(tmp_path / "rows.safetensors", framework="np") as file:
        assert file.metadata()["sparserow.dim"] == str(DIM)


@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
def test_an_empty_table_is_a_file_without_rows(session: sr.Session, tmp_path: Path, ending: str) -> None:
    url = f"{tmp_path}/none.{ending}"
    assert session.table("user").export(url) == 0
    assert session.table("item").load(url) == 0


def test_an_export_that_fails_leaves_the_old_file(session: sr.Session, tmp_path: Path) -> None:
    filled(session)
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"old")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.table("user").export(str(file), batch_rows=32, progress=stop)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("column", "made"),
    [
        ("strings", lambda keys: (pa.array([f"user-{key}" for key in keys]), [sr.hash_key(f"user-{k}") for k in keys])),
        ("int64", lambda keys: (pa.array(keys, pa.int64()), keys)),
        (
            "dictionary",
            lambda keys: (pa.array(list(map(str, keys))).dictionary_encode(), [*map(sr.hash_key, map(str, keys))]),
        ),
    ],
)
def test_keys_of_other_types(
    session: sr.Session, tmp_path: Path, column: str, made: Callable[[list[int]], tuple[pa.Array, Any]]
) -> None:
    ids = list(range(40))
    rows = np.random.default_rng(1).normal(size=(40, DIM))
    keys, wanted = made(ids)
    pq.write_table(pa.table({"id": keys, "emb": pa.array(list(rows))}), tmp_path / "other.parquet")
    count = session.table("user").load(
        str(tmp_path / "other.parquet"), key_column="id", vector_column="emb", batch_rows=16
    )
    assert count == 40
    found = session.table("user").pull(np.array(list(wanted), np.uint64))
    np.testing.assert_array_equal(found, rows.astype(np.float32))


def parquet(path: Path, keys: Any, vectors: Any, vector_type: pa.DataType | None = None) -> str:
    pq.write_table(pa.table({"key": pa.array(keys), "vector": pa.array(vectors, vector_type)}), path)
    return str(path)


GOOD = [[1.0] * DIM]
BAD_FILES: dict[str, tuple[Callable[[Path], str], type[sr.errors.SparserowError], str]] = {
    "late nan": (
        lambda p: parquet(p / "f.parquet", list(range(9)), GOOD * 8 + [[float("nan")] * DIM]),
        sr.errors.InvalidArgument,
        "row 8 (key 8) is not finite",
    ),
    "dim": (
        lambda p: parquet(p / "f.parquet", [1], [[1.0] * 4]),
        sr.errors.InvalidArgument,
        "has 4 values, the table has",
    ),
    "fixed dim": (
        lambda p: parquet(p / "f.parquet", [1], [[1.0] * 4], pa.list_(pa.float32(), 4)),
        sr.errors.InvalidArgument,
        "vectors have 4 values",
    ),
    "ragged": (
        lambda p: parquet(p / "f.parquet", [1, 2], [*GOOD, [1.0]]),
        sr.errors.InvalidArgument,
        "the vector of row 1",
    ),
    "null key": (lambda p: parquet(p / "f.parquet", [1, None], GOOD * 2), sr.errors.InvalidArgument, "1 keys are null"),
    "null value": (
        lambda p: parquet(p / "f.parquet", [1], [[None] * DIM], pa.list_(pa.float32())),
        sr.errors.InvalidArgument,
        "null",
    ),
    "negative": (lambda p: parquet(p / "f.parquet", [-7], GOOD), sr.errors.InvalidArgument, "-7 is not allowed"),
    "float keys": (
        lambda p: parquet(p / "f.parquet", [0.5], GOOD),
        sr.errors.InvalidArgument,
        "type: 'double' is not allowed",
    ),
    "text vectors": (
        lambda p: parquet(p / "f.parquet", [1], ["x"]),
        sr.errors.InvalidArgument,
        "type: 'string' is not allowed",
    ),
    "no column": (
        lambda p: pq.write_table(pa.table({"id": [1]}), p / "f.parquet") or str(p / "f.parquet"),
        sr.errors.InvalidArgument,
        "there is no column 'key'; its columns: id",
    ),
    "garbage": (lambda p: str(write(p / "f.parquet", b"PAR1 no")), sr.errors.DataLoss, "no whole Parquet file"),
    "index": (lambda p: str(indices(p / "f.parquet")), sr.errors.DataLoss, "Value at position 0 out of bounds: 31"),
    "cut": (lambda p: str(cut(p / "f.safetensors")), sr.errors.DataLoss, "no whole safetensors file"),
    "shape": (
        lambda p: str(
            tensors(p / "f.safetensors", key=np.arange(3, dtype=np.uint64), vector=np.ones((2, DIM), np.float32))
        ),
        sr.errors.InvalidArgument,
        "'key' has shape [3]",
    ),
    "missing": (lambda p: str(p / "none.parquet"), sr.errors.NotFound, "no such file"),
    "ending": (lambda p: str(p / "rows.csv"), sr.errors.InvalidArgument, "allowed: .parquet, .safetensors"),
    "scheme": (lambda _: "nowhere://x.parquet", sr.errors.InvalidArgument, "nowhere"),
}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def indices(path: Path) -> Path:
    """Keys in a dictionary of 20, whose places there are 31."""
    keys = pa.array([f"word {at % 20}" for at in range(24)]).dictionary_encode()
    columns = {"key": keys, "vector": pa.array(GOOD * 24)}
    schema = pa.schema([pa.field("key", keys.type, nullable=False), pa.field("vector", columns["vector"].type)])
    pq.write_table(pa.table(columns, schema), path, compression="none")
    data = path.read_bytes()
    before, run, after = data.partition(b"\x05\x07")  # 24 places of 5 bits each
    return write(path, before + run + b"\xff" * 15 + after[15:])


def tensors(path: Path, **arrays: np.ndarray[Any, Any]) -> Path:
    safetensors.numpy.save_file(arrays, path)
    return path


def cut(path: Path) -> Path:
    tensors(path, key=np.arange(8, dtype=np.uint64), vector=np.ones((8, DIM), np.float32))
    return write(path, path.read_bytes()[:-20])


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_and_changes_nothing(session: sr.Session, tmp_path: Path, case: str) -> None:
    make, error, text = BAD_FILES[case]
    url = make(tmp_path)
    with pytest.raises(error) as caught:
        session.table("user").load(url, batch_rows=4)
    assert text in str(caught.value)
    assert url.split("/")[-1] in str(caught.value)
    assert not list(session.table("user").scan())


def test_a_file_that_cannot_be_written(session: sr.Session, tmp_path: Path) -> None:
    with pytest.raises(sr.errors.NotFound, match="no such file or folder"):
        session.table("user").export(f"{tmp_path}/nowhere/rows.parquet")
    with pytest.raises(sr.errors.NotFound, match="tables there: item, user"):
        session.table("users").export(f"{tmp_path}/rows.parquet")
    filled(session)
    full = Path("/dev/full")
    if full.exists():  # writes to it fail as on a full disk
        (tmp_path / "rows.parquet.partial").symlink_to(full)
        with pytest.raises(sr.errors.ResourceExhausted, match=r"rows\.parquet: No space left"):
            session.table("user").export(f"{tmp_path}/rows.parquet")
        assert not (tmp_path / "rows.parquet").exists()


def state(prefix: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        f"{prefix}user.weight": torch.randn(20, DIM),
        f"{prefix}item.weight": torch.randn(30, DIM, dtype=torch.float64),
        "tower.0.weight": torch.randn(DIM, 3),
    }


def saved(kind: str, path: Path, entries: dict[str, torch.Tensor]) -> Any:
    if kind == "mapping":
        return entries
    file = path / f"weights.{kind}"
    if kind == "pt":
        torch.save(entries, file)
    elif kind == "npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in entries.items()})
    else:
        safetensors.torch.save_file(entries, file)
    return str(file)


@pytest.mark.parametrize("kind", ["mapping", "pt", "npz", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "sparse.embedding_bag_collection.embedding_bags.", "ec.embeddings."])
def test_weights_of_a_model(session: sr.Session, tmp_path: Path, kind: str, prefix: str) -> None:
    entries = state(prefix)
    told: list[int] = []
    source = saved(kind, tmp_path, entries)
    assert session.import_weights(source, batch_rows=8, progress=told.append) == {"user": 20, "item": 30}
    assert told[-1] == 50
    for table, count in (("user", 20), ("item", 30)):
        wanted = entries[f"{prefix}{table}.weight"].float().numpy()
        np.testing.assert_array_equal(session.table(table).pull(np.arange(count)), wanted)


def test_entries_may_be_paired_by_hand(session: sr.Session) -> None:
    entries = {"old.name": torch.ones(4, DIM), **state()}
    assert session.import_weights(entries, tables={"old.name": "user"}) == {"user": 4}
    np.testing.assert_array_equal(session.table("user").pull(np.arange(4)), np.ones((4, DIM), np.float32))
    assert not list(session.table("item").scan())


BAD_SOURCES: dict[str, tuple[dict[str, Any], dict[str, str] | None, type[sr.errors.SparserowError], str]] = {
    "nothing fits": ({"tower.weight": torch.ones(2, DIM)}, None, sr.errors.InvalidArgument, "tables: item, user"),
    "two fit": (
        {"user.weight": torch.ones(2, DIM), "module.user.weight": torch.ones(2, DIM)},
        None,
        sr.errors.InvalidArgument,
        "'user.weight' and 'module.user.weight'",
    ),
    "dim": (
        {**state(), "item.weight": torch.ones(2, DIM + 1)},
        None,
        sr.errors.InvalidArgument,
        "'item.weight' has shape",
    ),
    "ints": ({"user.weight": torch.ones(2, DIM, dtype=torch.int64)}, None, sr.errors.InvalidArgument, "torch.int64"),
    "late inf": (
        {**state(), "item.weight": torch.cat([torch.ones(9, DIM), torch.full((1, DIM), float("inf"))])},
        None,
        sr.errors.InvalidArgument,
        "row 9 of 'item.weight' is not finite",
    ),
    "entry": (state(), {"usr.weight": "user"}, sr.errors.NotFound, "no entry 'usr.weight'"),
    "table": (state(), {"user.weight": "usr"}, sr.errors.NotFound, "no table 'usr'; there are: item, user"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_weights_change_nothing(session: sr.Session, case: str) -> None:
    entries, tables, error, text = BAD_SOURCES[case]
    with pytest.raises(error) as caught:
        session.import_weights(entries, tables=tables, batch_rows=4)
    assert text in str(caught.value)
    assert not list(session.table("user").scan())
    assert not list(session.table("item").scan())


def test_a_file_that_holds_no_state_dict(session: sr.Session, tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(sr.errors.InvalidArgument, match="holds a list"):
        session.import_weights(str(tmp_path / "list.pt"))
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(sr.errors.DataLoss, match="no whole torch file"):
        session.import_weights(str(tmp_path / "cut.pt"))


def test_a_trained_local_model_goes_on_distributed() -> None:
    """The names of a model's state dict are those of the tables that distribute makes of it."""
    torch.manual_seed(2)
    local = nn.ModuleDict({"user": nn.Embedding(50, DIM), "item": nn.EmbeddingBag(60, DIM, mode="sum")})
    trained = {name: tensor.clone() for name, tensor in local.state_dict().items()}
    with sr.InProcessCluster().connect("files") as session:
        nn.init.zeros_(local["user"].weight)
        model = session.distribute(local, optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        assert session.import_weights(trained) == {"user": 50, "item": 60}
        ids = torch.tensor([3, 49, 0])
        assert torch.equal(model["user"](ids), trained["user.weight"][ids])


def test_the_header_is_as_the_format_says(session: sr.Session, tmp_path: Path) -> None:
    filled(session)
    session.table("user").export(f"{tmp_path}/rows.safetensors")
    content = (tmp_path / "rows.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["key"]["data_offsets"][1] == len(content) - 8 - length == ROWS * (8 + 4 * DIM)
