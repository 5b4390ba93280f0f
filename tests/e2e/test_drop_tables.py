"""Tables and namespaces that are dropped: by the commands, and by a session."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import numpy as np
import pytest
from torch import nn

import sparserow as sr
from sparserow.proto.control import ControlClient
from sparserow_process import DEADLINE_SEC, Launcher

DIM = 4
KEYS = np.arange(30, dtype=np.uint64)


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


@pytest.fixture
def control(cluster: sr.LocalCluster) -> Iterator[ControlClient]:
    with ControlClient(cluster.address) as control:
        yield control


def fill(cluster: sr.LocalCluster, namespace: str, *names: str) -> None:
    with sr.connect(cluster.address, namespace, job="writer", staleness=None) as session:
        for name in names:
            table = session.create_table(name, dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
            table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))


def names(control: ControlClient, namespace: str) -> list[str]:
    return [schema.name for schema in control.list_tables(namespace)]


def run(launcher: Launcher, *command: str) -> tuple[int | None, str, str]:
    process = launcher.start(*command)
    process.popen.wait(DEADLINE_SEC)
    return process.popen.returncode, process.out.strip(), process.err.strip()


def test_a_table_is_dropped_by_name(launcher: Launcher, cluster: sr.LocalCluster, control: ControlClient) -> None:
    fill(cluster, "ads", "user", "item", "old")
    to = ("--coordinator", cluster.address)
    code, out, _ = run(launcher, "table", "drop", "ads/old", "--dry-run", *to)
    assert (code, out.splitlines()[-1]) == (0, "would remove 1 table")
    assert out.startswith("ads/old: 30 rows, ")
    code, out, err = run(launcher, "table", "drop", "ads/old", *to)
    assert (code, err) == (
        1,
        "sparserow: InvalidArgument: drop: there is no terminal for the confirmation; allowed: --yes, or --dry-run",
    )
    code, _, err = run(launcher, "table", "drop", "ads/old", "ads/odl", "--yes", *to)
    assert (code, err) == (1, "sparserow: NotFound: there is no table ads/odl; did you mean ads/old?")
    code, _, err = run(launcher, "table", "drop", "ads/old", "shop/old", "--yes", *to)
    assert (code, "allowed: tables of one namespace" in err) == (1, True)
    assert names(control, "ads") == ["item", "old", "user"]
    code, out, err = run(launcher, "table", "drop", "ads/old", "ads/item", "--yes", *to)
    assert (code, out.splitlines()[-1]) == (0, "removed 2 tables"), err
    assert names(control, "ads") == ["user"]
    fill(cluster, "ads", "old")
    with sr.connect(cluster.address, "ads", job="reader", staleness=None) as session:
        assert session.table("old").pull(KEYS).tolist() == [[-1.0] * DIM] * len(KEYS), "no row of the former is left"


@pytest.mark.parametrize(("answer", "is_dropped"), [(b"n\n", False), (b"\n", False), (b"y\n", True)])
def test_a_terminal_is_asked(
    cluster: sr.LocalCluster, control: ControlClient, launcher: Launcher, answer: bytes, is_dropped: bool
) -> None:
    fill(cluster, "asked", "user")
    keyboard, terminal = pty.openpty()
    try:
        process = launcher.start("table", "drop", "asked/user", "--coordinator", cluster.address, stdin=terminal)
        process.wait_for("remove 1 table, for ever")
        os.write(keyboard, answer)
        assert process.end() == (0 if is_dropped else 1)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert names(control, "asked") == ([] if is_dropped else ["user"])


def test_a_namespace_with_a_job_is_kept_unless_it_is_forced(
    launcher: Launcher, cluster: sr.LocalCluster, control: ControlClient
) -> None:
    fill(cluster, "shop", "cart", "user")
    to = ("--coordinator", cluster.address)
    code, out, _ = run(launcher, "namespace", "list", *to)
    assert (code, "shop: cart, user" in out.splitlines()) == (0, True)
    with sr.connect(cluster.address, "shop", job="train", staleness=None) as session:
        table = session.table("user")
        for command in (("table", "drop", "shop/user"), ("namespace", "drop", "shop")):
            code, _, err = run(launcher, *command, "--yes", *to)
            assert (code, "shop/train may use its tables; end the job first" in err) == (1, True)
        assert len(table.pull(KEYS)) == len(KEYS)
        code, out, err = run(launcher, "namespace", "drop", "shop", "--dry-run", *to)
        assert (code, out.splitlines()[-1]) == (0, "would remove namespace shop with 2 tables")
        assert "job shop/train has workers" in err
        code, out, err = run(launcher, "namespace", "drop", "shop", "--yes", "--force", *to)
        assert (code, out.splitlines()[-1]) == (0, "removed namespace shop with 2 tables"), err
        with pytest.raises(sr.errors.NotFound):
            table.pull(KEYS)
    assert names(control, "shop") == []
    code, _, err = run(launcher, "namespace", "drop", "shop", "--yes", *to)
    assert (code, "there is no namespace 'shop'; namespaces: " in err) == (1, True)


def test_a_session_drops_what_no_model_of_it_uses(cluster: sr.LocalCluster, control: ControlClient) -> None:
    class Model(nn.Module):
        """One table."""

        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding(200, DIM)

    with sr.connect(cluster.address, "own", staleness=None) as session:
        session.distribute(Model(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
        session.create_table("old", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        with pytest.raises(sr.errors.FailedPrecondition, match="'item' is in use by a model of this session"):
            session.drop_table("item")
        with pytest.raises(sr.errors.NotFound, match="no table own/odl; did you mean own/old"):
            session.drop_table("odl")
        session.drop_table("old")
        assert names(control, "own") == ["item"]
        with pytest.raises(sr.errors.NotFound, match="table 'old' is not in namespace 'own'; tables there: item"):
            session.table("old")
        assert session.create_table("old", dim=2 * DIM, optimizer=sr.optim.SGD(lr=1.0)).schema.dim == 2 * DIM
