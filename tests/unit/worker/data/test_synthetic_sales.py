"""The synthetic log of sales: the same for the same arguments, and with the signal that it says it has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import sparserow as sr
from sparserow.worker.data import write_sales_log
from sparserow.worker.data.synthetic_sales import FOLLOWS, KINDS
from sparserow.worker.metrics.binary import auc


def test_it_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    logs = [
        write_sales_log(tmp_path / str(at), rows=500, items=80, history=5, seed=seed) for at, seed in ((0, 1), (1, 1))
    ]
    tables = [pq.read_table(log.train) for log in logs]
    assert tables[0].equals(tables[1])
    other = write_sales_log(tmp_path / "2", rows=500, items=80, history=5, seed=2)
    assert not pq.read_table(other.train).equals(tables[0])
    assert pq.read_table(logs[0].test).num_rows == logs[0].test_rows == 50


def test_its_signal_is_as_it_says(tmp_path: Path) -> None:
    log = write_sales_log(tmp_path, rows=10, test_rows=30_000, items=400, history=12, candidates=10, seed=4)
    table = pq.read_table(log.test)
    assert pq.ParquetFile(log.test).metadata.num_row_groups == 2
    lengths = pc.list_value_length(table["history"]).to_numpy()
    assert lengths.mean() == pytest.approx(12, abs=0.2)
    assert set(pc.list_value_length(table["candidates"]).to_pylist()) == {10}
    items, position = table["item"].to_numpy(), table["position"].to_numpy()
    candidates = np.array(table["candidates"].to_pylist())
    histories = table["history"].to_pylist()
    last = np.array([history[-1] if history else -KINDS - 1 for history in histories])
    following = candidates[np.arange(len(table)), position] == (last + KINDS) % 400
    assert following.mean() == pytest.approx(log.hit_rate, abs=0.01)
    assert log.hit_rate == pytest.approx(FOLLOWS, abs=0.02)
    # A user's likes are the two commonest kinds of the histories; they and the price give the best score.
    user = table["user"].to_numpy()
    likes = np.stack([user % KINDS, (user // KINDS + user % KINDS + 1) % KINDS], axis=1)
    seen = [
        np.isin(np.array(history) % KINDS, liked).mean()
        for history, liked in zip(histories, likes, strict=True)
        if history
    ]
    assert np.mean(seen) == 1.0
    score = 2.6 * (items[:, None] % KINDS == likes).any(axis=1) - 0.5 * np.log(table["price"].to_numpy())
    assert auc(score, table["click"].to_numpy()) == pytest.approx(log.click_auc, abs=0.002)
    assert log.buy_auc > log.click_auc > 0.75
    assert pc.sum(table["buy"]).as_py() < pc.sum(table["click"]).as_py() < len(table)
    assert table.schema.field("at").type == pa.timestamp("ms")


def test_sizes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=r"write_sales_log\.items: 15 is not allowed; allowed: >= 16"):
        write_sales_log(tmp_path, rows=5, items=15)
    with pytest.raises(sr.errors.InvalidArgument, match=r"write_sales_log\.test_rows: 0 is not allowed"):
        write_sales_log(tmp_path, rows=5, test_rows=0)
