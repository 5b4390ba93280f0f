"""``sparserow table`` against a running cluster: rows to a file and back, by the commands alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import sparserow as sr
from sparserow.deploy import cli
from sparserow.proto.control import ControlClient
from sparserow_process import DEADLINE_SEC, Launcher

DIM, ROWS = 4, 3000


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


@pytest.fixture
def session(cluster: sr.LocalCluster) -> Iterator[sr.Session]:
    with sr.connect(cluster.address, "ads", job="writer", staleness=None) as session:
        for name in ("user", "copy"):
            schema = sr.TableSchema(namespace="ads", name=name, dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1))
            session.core.catalog.create_table(schema)
        yield session


def run(launcher: Launcher, *command: str) -> tuple[int | None, str, str]:
    process = launcher.start(*command)
    process.popen.wait(DEADLINE_SEC)
    return process.popen.returncode, process.out, process.err


def test_rows_go_out_and_come_back(
    launcher: Launcher, cluster: sr.LocalCluster, session: sr.Session, tmp_path: Path
) -> None:
    keys = np.random.default_rng(1).integers(0, 2**63, ROWS, dtype=np.uint64)
    rows = np.random.default_rng(2).normal(size=(ROWS, DIM)).astype(np.float32)
    session.table("user").assign(keys, rows)
    file, to = str(tmp_path / "user.parquet"), ("--coordinator", cluster.address)
    code, out, err = run(launcher, "table", "export", "ads/user", file, *to)
    assert (code, out.strip()) == (0, f"wrote 3,000 rows of ads/user to {file}"), err
    assert pq.read_metadata(file).num_rows == ROWS
    code, out, err = run(launcher, "table", "import", "ads/copy", file, "--batch-rows", "1000", *to)
    assert (code, out.strip()) == (0, f"assigned 3,000 rows of {file} to ads/copy"), err
    np.testing.assert_array_equal(session.table("copy").pull(keys), rows)


def test_weights_come_from_a_state_dict(
    launcher: Launcher, cluster: sr.LocalCluster, session: sr.Session, tmp_path: Path
) -> None:
    file, to = tmp_path / "old.pt", ("--coordinator", cluster.address)
    weights = {"embedding_bags.user.weight": torch.randn(30, DIM), "old": torch.randn(20, DIM)}
    torch.save(weights, file)
    pairs = ("--entry", "embedding_bags.user.weight=user", "--entry", "old=copy")
    code, out, err = run(launcher, "table", "import-weights", "ads", str(file), *pairs, *to)
    assert (code, out.split("\n")[:2]) == (0, ["assigned 30 rows to ads/user", "assigned 20 rows to ads/copy"]), err
    np.testing.assert_array_equal(session.table("copy").pull(np.arange(20)), weights["old"].numpy())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "user", "rows.parquet"), "InvalidArgument: table: 'user' is not allowed; allowed: NAMESPACE/NAME"),
        (("export", "ads/usr", "rows.parquet"), "NotFound: table 'usr' is not in namespace 'ads'"),
        (("import", "ads/user", "none.parquet"), "NotFound: none.parquet: no such file"),
        (("import-weights", "ads", "none.pt", "--entry", "x"), "InvalidArgument: --entry: 'x' is not allowed"),
    ],
)
def test_errors_are_one_line(
    launcher: Launcher, cluster: sr.LocalCluster, session: sr.Session, arguments: tuple[str, ...], text: str
) -> None:
    code, _, err = run(launcher, "table", *arguments, "--coordinator", cluster.address)
    assert code == 1
    assert len(err.strip().split("\n")) == 1
    assert text in err


def test_a_command_that_fails_is_no_fault_of_a_worker(
    cluster: sr.LocalCluster, session: sr.Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, nobody = f"--coordinator={cluster.address}", "--serving=127.0.0.1:1"
    with ControlClient(cluster.address) as control:
        for command, words in (
            (("probe", "ads/user", nobody), "serving process 127.0.0.1:1 cannot be reached"),
            (("table", "export", "ads/absent", str(tmp_path / "rows.parquet")), "absent"),
        ):
            with pytest.raises(SystemExit) as ended:
                cli.main([*command, to])
            assert ended.value.code == 1
            assert words in capsys.readouterr().err
            assert [fault.message for fault in control.list_faults()] == []
            assert [job.name for job in control.status().jobs if job.members] == ["writer"], "its job is left"
