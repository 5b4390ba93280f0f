"""Benchmarks run in their quick form as a user starts them, write their rows, and leave no process."""

import json

import pytest

from long_form import FULL
from sparserow_process import wait_until


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("wire", ["pull", "push", "raw TCP", "of torch RPC"]),
        ("lookup", ["p50", "p99", "raw TCP"]),
        (
            "optimizers",
            ["sgd: 0 B of state", "adam, amsgrad: 768 B", "rowwise_adagrad: 4 B", "ftrl, L1, group lasso: 512 B"],
        ),
        ("tls", ["tls pull", "tls push", "raw OpenSSL", "of plain TCP", "strangers", "at another process"]),
        (
            "scale",
            [
                "pull 2000 x 8, 2 shards",
                "push 2000 x 8",
                "an empty commit, synchronous, 125 workers",
                "4 shards, 3 stub workers",
                "heartbeats alone",
            ],
        ),
        ("sweeps", ["p99 without sweeps", "p99 with sweeps", "p99 with eviction", "rows evicted meanwhile"]),
        *([("observe", ["nothing observed", "metrics", "metrics and traces", "traces: CPU"])] if FULL else []),
        ("train", ["torch", "one shard", "in-process", "worker CPU", "server CPU", "Python and dispatch of 26 tables"]),
    ],
)
def test_quick_run_writes_the_agreed_rows(launcher, tmp_path, name, measured):
    path = tmp_path / "figures.json"
    bench = launcher.start("bench", name, "--quick", "--json", str(path))
    assert bench.popen.wait(600) == 0, bench.err
    rows = json.loads(path.read_text())
    assert all(set(row) == {"metric", "value", "unit", "limit", "ratio", "higher_is_better"} for row in rows)
    assert all(row["limit"] is None for row in rows)  # the quick form judges nothing
    differences = {"since", "beyond"}  # memory may have shrunk; a quick step may be shorter than its dense part
    assert all(row["value"] >= 0 for row in rows if not differences & set(row["metric"].split()))
    metrics = " ".join(row["metric"] for row in rows)
    assert [words for words in measured if words not in metrics] == []
    wait_until(lambda: not launcher.living(), "no process is left")
