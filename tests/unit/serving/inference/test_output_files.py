"""Outputs of a published model as a Parquet file: columns, row groups, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import sparserow as sr
from sparserow.proto.features.cells import RefusedRow
from sparserow.serving.inference import output_files
from sparserow.serving.inference.column_files import naming_rows
from sparserow.serving.inference.output_files import columns_of, write_parquet
from sparserow.serving.inference.prediction import format_output


def batches(sizes: list[int]) -> Iterator[pa.Table]:
    begin = 0
    for size in sizes:
        yield pa.table({"id": range(begin, begin + size), "x": [float(at) for at in range(begin, begin + size)]})
        begin += size


def model(columns: pa.Table) -> dict[str, torch.Tensor]:
    x = torch.tensor(columns["x"].to_pylist())
    return {"score": x * 2, "vector": torch.stack([x, -x, x + 1], dim=1)}


def test_each_output_is_a_column_beside_those_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "_ROWS_PER_GROUP", 8)
    path = tmp_path / "out.parquet"
    path.write_text("an older file")
    assert write_parquet(path, batches([3, 3, 3, 3, 3]), model, keep=["id"]) == 15
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)] == [9, 6]
    table = file.read()
    assert table.column_names == ["id", "score", "vector"]
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 3)
    assert table["id"].to_pylist() == list(range(15))
    assert table["vector"][7].as_py() == [7.0, -7.0, 8.0]
    assert write_parquet(path, batches([2]), model, outputs=["score"]) == 2
    assert pq.read_table(path).column_names == ["score"]
    assert [each.name for each in tmp_path.iterdir()] == ["out.parquet"]


def test_outputs_without_a_name() -> None:
    assert list(columns_of(torch.zeros(2), (), 2)) == ["output"]
    assert list(columns_of((torch.zeros(2), torch.zeros(2, 2)), (), 2)) == ["output_0", "output_1"]
    assert columns_of(torch.zeros(2, dtype=torch.bfloat16), (), 2)["output"].type == pa.float32()


def test_lines_of_several_outputs_by_name() -> None:
    assert list(format_output({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0, 4.0], [5.0, 6.0]])})) == [
        "1,3,4",
        "2,5,6",
    ]


def wrong(_: pa.Table) -> Any:
    return {"score": torch.zeros(1)}


@pytest.mark.parametrize(
    ("sizes", "predict", "options", "message"),
    [
        ([2], model, {"outputs": ["scor"]}, r"--only scor: the model has no such output; it has: score, vector"),
        ([2, 2], wrong, {}, r"output 'score' is \(1\,\) for 2 rows; allowed: \(2\) or \(2, d\)"),
        ([], model, {}, r"--input: the file has no rows"),
        ([2], lambda columns: {"id": model(columns)["score"]}, {"keep": ["id"]}, r"--keep id: the model has an output"),
    ],
)
def test_what_is_refused_leaves_the_former_file(
    tmp_path: Path, sizes: list[int], predict: Any, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "out.parquet"
    path.write_text("an older file")
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        write_parquet(path, batches(sizes), predict, **options)
    assert path.read_text() == "an older file"
    assert [each.name for each in tmp_path.iterdir()] == ["out.parquet"]


def test_a_refused_row_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    def refuses(columns: pa.Table) -> dict[str, torch.Tensor]:
        rows = columns["id"].to_numpy() == 7
        if rows.any():
            raise RefusedRow("a feature refuses it", "x", rows, "it is 7")
        return model(columns)

    path = tmp_path / "out.parquet"
    with pytest.raises(sr.errors.InvalidArgument, match=r"in\.csv, row 8, column x: it is 7"):
        write_parquet(path, batches([3, 3, 3]), naming_rows(Path("in.csv"), refuses), keep=["id"])
    assert not list(tmp_path.iterdir())
