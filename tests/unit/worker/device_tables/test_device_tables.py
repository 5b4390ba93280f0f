"""``sr.Table(placement="device")`` in one process: what is refused, and what a table and its share are."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.cpp_ext.device import row_optimizers
from sparserow.cpp_ext.device.link import HostLink
from sparserow.proto.schema import TableSchema
from sparserow.worker.api.in_process import InProcessCluster
from sparserow.worker.device_tables.device_tables import whole_rows
from sparserow.worker.device_tables.share import Share

DEVICE = sr.Table(placement="device")


class Net(nn.Module):
    def __init__(self, *, rows: int = 20) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, 4, padding_idx=2)
        self.item = nn.EmbeddingBag(30, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.user(ids).sum(1) + self.item(ids)


@pytest.fixture
def cluster() -> InProcessCluster:
    return InProcessCluster(shards=2)


def on_devices(session: sr.Session, model: nn.Module | None = None, **options: object) -> nn.Module:
    arguments = {"optimizer": sr.optim.Adagrad(lr=0.1), "min_rows": 1, "tables": {"user": DEVICE}, **options}
    return session.distribute(model or Net(), **arguments)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_key_has_one_rank_and_one_row(world: int) -> None:
    share = Share(table_id=0xFFFFFFFB, num_rows=23, world=world)
    keys = torch.arange(23)
    owners, rows = share.owners(keys), share.rows(keys)
    for rank in range(world):
        mine = share.keys_of(rank)
        assert len(mine) == share.size(rank)
        assert torch.equal(mine, keys[owners == rank])
        assert torch.equal(rows[mine], torch.arange(len(mine)))
    assert sum(share.size(rank) for rank in range(world)) == 23
    assert max(map(share.size, range(world))) - min(map(share.size, range(world))) <= 1


def test_a_model_may_have_tables_on_both(cluster: InProcessCluster) -> None:
    session, local = cluster.connect(), cluster.connect("servers")
    torch.manual_seed(1)
    here = on_devices(session)
    torch.manual_seed(1)
    there = on_devices(local, tables={})
    ids = torch.tensor([[1, 1, 2], [3, 5, 1]])
    for model, its in ((here, session), (there, local)):
        for _ in range(3):
            model(ids).square().sum().backward()
            its.step()
    rows = local.table("user").pull(np.arange(20))
    assert np.array_equal(whole_rows(session.core.device_tables, "user").numpy(), rows)
    assert [table.name for table in cluster.list_tables("default")] == ["item"]
    assert session.stats().device_tables == 1
    assert session.stats().device_table_bytes == 20 * (4 + 4 + 1) * 4
    group = next(group for group in session.optimizer.param_groups if group["name"] == "user")
    group["lr"] = 0.0
    model = here
    model(ids).square().sum().backward()
    session.step()
    assert np.array_equal(whole_rows(session.core.device_tables, "user").numpy(), rows)
    session.close()
    with pytest.raises(sr.errors.FailedPrecondition, match="no open session of this process has it"):
        here.user(ids)


def test_initial_rows_are_those_of_the_servers(cluster: InProcessCluster) -> None:
    seen = []
    for placement in ("servers", "device"):
        session = cluster.connect("same")
        tables = {"user": sr.Table(init=sr.Normal(0.5, 2.0), seed=7, placement=placement)}
        with sr.deferred(min_rows=1):
            model = Net()
        on_devices(session, model, tables=tables, exclude=["item"])
        seen.append(model.eval().user(torch.arange(20)))
        session.close()
        if placement == "servers":
            cluster.drop_table("same", "user")
    assert torch.equal(*seen)
    assert not seen[0][2].any()  # the padding row
    assert seen[0][3].any()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "bfloat16"}, r"Table\.dtype: 'bfloat16' is not allowed; allowed: float32 with placement 'device'"),
        ({"admit_after": 3}, r"Table\.admit_after: 3 is not allowed; allowed: 1 with placement 'device'"),
        ({"max_rows": 5}, r"Table\.max_rows: 5 is not allowed; allowed: 0 with placement 'device'"),
        ({"placement": "gpu"}, r"Table\.placement: 'gpu' is not allowed; allowed: servers, device"),
    ],
)
def test_options_of_tables_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=text):
        sr.Table(**{"placement": "device", **options})


def refused(session: sr.Session, kind: type[Exception], text: str, **options: object) -> None:
    model = Net()
    with pytest.raises(kind, match=text):
        on_devices(session, model, **options)
    assert type(model.user) is nn.Embedding
    assert session.core.bound_tables() == ()


def test_what_cannot_be_is_refused_before_anything_changes(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.connect("late", staleness=1) as session:
        refused(
            session, sr.errors.InvalidArgument, "staleness: 1 is not allowed; allowed: 0 with tables.placement 'device'"
        )
    with cluster.connect() as session:
        session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=1.0))
        refused(
            session, sr.errors.FailedPrecondition, "has a table 'user' on the servers, whose rows would not be used"
        )
        session.drop_table("user")
        alone = session.core.placement
        session.core.placement = dataclasses.replace(alone, world_size=2)
        refused(
            session, sr.errors.FailedPrecondition, "the job has 2 workers, which exchange rows by torch.distributed"
        )
        session.core.placement = alone
        kernels = {name: kernel for name, kernel in row_optimizers.KERNELS.items() if name != "adagrad"}
        with monkeypatch.context() as patched:
            patched.setattr(row_optimizers, "KERNELS", MappingProxyType(kernels))
            refused(session, sr.errors.InvalidArgument, "'adagrad' is not allowed; allowed: on devices: sgd, rowwise")
        with monkeypatch.context() as patched:
            patched.setattr(HostLink, "free_bytes", lambda _: 700)
            text = r"rank 0 needs 720 bytes for its 20 of 20 rows and state, and 700 bytes are free on cpu; allowed: a"
            refused(session, sr.errors.InvalidArgument, text)
        monkeypatch.setattr(cluster, "create_table", fail)
        refused(session, sr.errors.ResourceExhausted, "no table on the servers")
        monkeypatch.undo()
        on_devices(session)


def fail(schema: TableSchema) -> TableSchema:
    raise sr.errors.ResourceExhausted("no table on the servers")


def test_dense_on_servers_and_device_tables_exclude_each_other(cluster: InProcessCluster) -> None:
    with cluster.connect() as session:
        model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
        session.distribute(model, optimizer=sr.optim.SGD(lr=1.0), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=1.0))
        with pytest.raises(sr.errors.FailedPrecondition, match=r"are on the servers \(dense: ps\)"):
            on_devices(session)


def test_a_graph_is_refused(cluster: InProcessCluster) -> None:
    with cluster.connect() as session:
        program = torch.export.export(nn.Sequential(nn.Embedding(20, 4)), (torch.arange(3),))
        with pytest.raises(
            sr.errors.InvalidArgument, match="placement: 'device' is not allowed, as a graph has no layer"
        ):
            session.lift_embeddings(program, optimizer=sr.optim.SGD(lr=1.0), min_rows=1, tables={"*": DEVICE})


def test_a_layer_that_was_moved_is_refused(cluster: InProcessCluster) -> None:
    with cluster.connect() as session:
        model = on_devices(session)
        model.to("meta")
        with pytest.raises(sr.errors.FailedPrecondition, match="is on cpu, and its layer was moved to meta"):
            model.user(torch.arange(3))


def test_a_step_that_the_servers_refuse_changes_no_row_on_devices() -> None:
    cluster = InProcessCluster(shards=2, memory_budget_bytes=16 << 20)
    with cluster.connect() as session:
        model = nn.Module()
        model.user, model.item = nn.Embedding(20, 4), nn.Embedding(100_000, 2048, device="meta")
        on_devices(session, model, optimizer=sr.optim.SGD(lr=1.0, momentum=0.5), carry_weights=False)

        def step(ids: torch.Tensor) -> None:
            (model.user(ids % 20).sum() + model.item(ids).sum()).backward()
            session.step()

        step(torch.arange(3))
        before = whole_rows(session.core.device_tables, "user").clone()
        with pytest.raises(sr.errors.ResourceExhausted):
            step(torch.arange(2000))
        assert torch.equal(whole_rows(session.core.device_tables, "user"), before)
        assert session.current_step == 1
        step(torch.arange(3))
        assert not torch.equal(whole_rows(session.core.device_tables, "user"), before)
