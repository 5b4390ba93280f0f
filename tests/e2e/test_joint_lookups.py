"""Lookups that ranks make together: the same number of collective calls a forward for any number of tables."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from forked_ranks import check_case, fork_cases
from sparserow.worker.device_tables.device_tables import whole_rows
from sparserow.worker.lookups.makers import joint
from sparserow_process import run_ranks

ROWS, DIM, STEPS, BATCH = 50, 4, 6, 8


class Columns(nn.Module):
    """A table a column: rows, hashed rows, weighted bags and jagged bags in turn."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        kinds = (nn.Embedding, nn.Embedding, functools.partial(nn.EmbeddingBag, mode="sum"), nn.EmbeddingBag)
        self.tables = nn.ModuleList(kinds[at % 4](ROWS, DIM) for at in range(tables))
        self.top = nn.Linear(tables * DIM, 1)
        self.register_buffer("rows", torch.tensor([ROWS]))

    def forward(self, ids: Tensor, weights: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
        rows = []
        for at, table in enumerate(self.tables):
            column = ids[:, at]
            if at % 4 == 0:
                rows.append(table(column))
            elif at % 4 == 1:
                rows.append(table(torch.remainder(column * 7 + 3, self.rows)))
            elif at % 4 == 2:
                rows.append(table(ids[:, at : at + 2], per_sample_weights=weights))
            else:
                rows.append(table(flat, offsets))
        return self.top(torch.cat(rows, 1)).flatten()


def batch(step: int, worker: int, tables: int, size: int = BATCH) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(100 * step + worker)
    ids = torch.randint(0, ROWS, (size, tables + 2), generator=draw)
    flat = torch.randint(0, ROWS, (11 + worker,), generator=draw)
    offsets = torch.sort(torch.randint(0, 11, (size,), generator=draw)).values
    offsets[0] = 0
    return ids, torch.rand(size, 2, generator=draw), flat, offsets, torch.rand(size, generator=draw)


def make(session: sr.Session, tables: int, placement: str = "servers") -> Columns:
    torch.manual_seed(3)
    options = {"*": sr.Table(placement=placement)}
    return session.distribute(Columns(tables), optimizer=sr.optim.Adagrad(lr=0.3), min_rows=1, tables=options)


@contextlib.contextmanager
def counted(*names: str) -> Iterator[Counter[str]]:
    """Counts calls of ``torch.distributed`` in the block."""
    counts: Counter[str] = Counter()
    before = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name in names:
            setattr(dist, name, before[name])


@contextlib.contextmanager
def connected(address: str, name: str, *, alone: bool = False, **options: object) -> Iterator[sr.Session]:
    """A session; with ``alone``, no lookup of its models is made ahead of its layer."""
    find = joint.JointLookups.find
    if alone:
        joint.JointLookups.find = lambda *_: 0
    try:
        with sr.connect(address, name, **options) as session:
            yield session
    finally:
        joint.JointLookups.find = find


def train(session: sr.Session, model: nn.Module, tables: int, steps: range = range(STEPS), **options: object) -> list:
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    given = [batch(step, session.rank, tables) for step in steps]
    source = session.prefetch(given, 2) if options.get("prefetch") else given
    for *inputs, labels in source:
        loss = nn.functional.mse_loss(model(*inputs), labels)
        loss.backward()
        assert session.step(dense)
        losses.append(loss.item())
    return losses


def rows_of(session: sr.Session, tables: int) -> list[np.ndarray]:
    """The rows of every table, where this rank can read them; every rank calls it."""
    group, there = session.core.tensor_group, session.core.device_tables
    if there is not None:
        whole = [whole_rows(there, f"tables.{at}") for at in range(tables)]
        return [rows.numpy() for rows in whole if rows is not None]
    leads = group is None or group.leads
    return [session.table(f"tables.{at}").pull(np.arange(ROWS)) for at in range(tables) if leads]


def broadcasts(rank: int, address: str, folder: Path) -> None:
    """Eager, prefetched and compiled forwards of a tensor group, with 2 and with 12 tables."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    for tables in (2, 12):
        seen = {}
        for way in ("alone", "eager", "prefetched", "compiled"):
            with connected(address, f"{way}{tables}", alone=way == "alone", mesh=mesh) as session:
                model = make(session, tables)
                called = sr.compile_model(model, backend="eager") if way == "compiled" else model
                options = {"prefetch": way == "prefetched"}
                losses = train(session, called, tables, range(4), **options)
                with counted("broadcast", "all_gather") as counts:
                    losses += train(session, called, tables, range(4, 6), **options)
                if way != "prefetched":  # each of its passes learns from the first forward
                    assert counts["broadcast"] == (2 * tables if way == "alone" else 2), (way, tables, counts)
                assert counts["all_gather"] == 4, counts  # of the batch and of the gradients
                rows = rows_of(session, tables)
                model.eval()
                with torch.no_grad(), counted("broadcast") as counts:
                    scores = model(*batch(9, 0, tables)[:-1]).tolist()
                assert counts["broadcast"] == (tables if way == "alone" else 1), (way, tables, counts)
                seen[way] = (losses, rows, scores)
                dist.barrier()
        for way in ("eager", "prefetched", "compiled"):
            assert seen[way][0] == seen["alone"][0], way
            assert all(map(np.array_equal, seen[way][1], seen["alone"][1])), way
            assert seen[way][2] == seen["alone"][2], way


def handed_failures(rank: int, address: str, folder: Path) -> None:
    """What ends a forward whose rows go in one broadcast."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, "handed", mesh=mesh) as session:
        model = make(session, 4)
        train(session, model, 4, range(3))
        before = rows_of(session, 4)
        ids, *rest, _ = batch(3, 0, 4)
        wrong = (
            "table 'handed/tables.0'.* is not allowed" if rank == 0 else "table 'handed/tables.0': the lookup failed"
        )
        with pytest.raises(sr.errors.InvalidArgument, match=wrong):
            model(ids + ROWS, *rest)
        with pytest.raises(sr.errors.FailedPrecondition, match="ranks of a tensor group have different batches"):
            model(ids + rank, *rest)
        session.discard()
        assert all(map(np.array_equal, before, rows_of(session, 4)))
        train(session, model, 4, range(3, 5))
        with counted("broadcast") as counts:  # a forward with other arguments goes on by itself
            half = model.tables[0](ids[:3, 0])
        assert counts["broadcast"] == 1
        assert half.shape == (3, DIM)
        session.discard()
        dist.barrier()


def a_rank_dies(rank: int, address: str, folder: Path, *, dies: int) -> None:
    """A rank of a tensor group is killed; the other one hears of it in its forward."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, f"dies{dies}", mesh=mesh) as session:
        model = make(session, 4)
        train(session, model, 4, range(3))
        dist.barrier()
        if rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(
            sr.errors.Unavailable, match=r"tensor group: a rank of this tensor group is gone .* last checkpoint"
        ):
            model(*batch(3, 0, 4)[:-1])
        session.discard()


def exchanges(rank: int, address: str, folder: Path) -> None:
    """A step of tables on devices, with 2 and with 8 tables; batches of the ranks differ in length."""
    for tables in (2, 8):
        seen = {}
        for way in ("servers", "alone", "eager", "prefetched", "compiled"):
            placement = "servers" if way == "servers" else "device"
            with connected(address, f"exchange-{way}{tables}", alone=way == "alone") as session:
                model = make(session, tables, placement)
                called = sr.compile_model(model, backend="eager") if way == "compiled" else model
                ddp = DistributedDataParallel(called)
                options = {"prefetch": way == "prefetched"}
                losses = train(session, ddp, tables, range(4), **options)
                with counted("all_to_all_single") as counts:
                    losses += train(session, ddp, tables, range(4, 6), **options)
                if way == "alone":
                    assert counts["all_to_all_single"] == 2 * (3 * tables + 3), counts
                elif way != "servers":
                    assert counts["all_to_all_single"] == 2 * (3 + 3), (way, tables, counts)
                dist.barrier()
                rows = rows_of(session, tables)
                model.eval()
                with torch.no_grad():
                    scores = model(*batch(9, rank, tables)[:-1]).tolist()
                seen[way] = (losses, rows, scores)
                dist.barrier()
        for way in ("alone", "eager", "prefetched", "compiled"):
            assert seen[way][0] == seen["servers"][0], way
            assert all(map(np.array_equal, seen[way][1], seen["servers"][1])), way
            assert seen[way][2] == seen["servers"][2], way


class Varying(nn.Module):
    """Lookups whose arguments have a size of the batch, and lookups that one forward of two makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Embedding(ROWS, DIM) for _ in range(3))

    def forward(self, ids: Tensor, flat: Tensor, is_odd: bool) -> Tensor:
        out = self.one(ids[:, 0]) + self.two(flat[: len(ids)])
        return (out + self.three(ids[:, 1]) if is_odd else out).sum(1)


def disagreements(rank: int, address: str, folder: Path) -> None:
    """Ranks whose plans differ, or do not fit a batch of theirs, go on with lookups by themselves."""
    ends = []
    for placement in ("servers", "device"):
        with sr.connect(address, f"varying-{placement}", deadline_sec=20.0) as session:
            torch.manual_seed(4)
            options = {"*": sr.Table(placement=placement)}
            model = session.distribute(Varying(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1, tables=options)
            losses = []
            with counted("all_to_all_single") as counts:
                for step in range(12):
                    size = 5 if (step, rank) in ((3, 1), (6, 0), (7, 0), (7, 1)) else BATCH
                    ids, _, flat, *_ = batch(step, rank, 2, size)
                    loss = model(ids, flat, step % 4 == 1).square().mean()
                    loss.backward()
                    session.step()
                    losses.append(loss.item())
            if placement == "device":
                by_itself = sum(3 * (3 if step % 4 == 1 else 2) + 3 for step in range(12))
                assert 3 * 12 < counts["all_to_all_single"] < by_itself, counts
            dist.barrier()
            model.eval()
            ids, _, flat, *_ = batch(20, rank, 2)
            ends.append((losses, model(ids, flat, True).tolist()))
            dist.barrier()
    assert ends[0] == ends[1]


def exchange_failures(rank: int, address: str, folder: Path) -> None:
    """Ids out of range, and a rank in another call, where lookups go together."""
    with sr.connect(address, "joint-failures", deadline_sec=20.0) as session:
        model = make(session, 4, "device")
        train(session, model, 4, range(3))
        before = rows_of(session, 4)
        ids, *rest, _ = batch(3, rank, 4)
        kind, text = (
            sr.errors.InvalidArgument,
            r"table 'joint-failures/tables.0': id \d+ is not allowed; allowed: .0, 50",
        )
        if rank == 0:
            kind, text = sr.errors.FailedPrecondition, "the lookups of a forward: rank 1 could not take part and shows"
        with pytest.raises(kind, match=text):
            model(ids + ROWS * rank, *rest)
        calls = ["session.step", "a lookup of table 'tables.0'"]
        wanted = f"rank {rank} is in {calls[rank]}, rank {1 - rank} is in {calls[1 - rank]}; every rank makes the same"
        with pytest.raises(sr.errors.FailedPrecondition, match=wanted):
            model(ids, *rest) if rank else session.step(allow_empty=True)
        session.discard()
        assert all(map(np.array_equal, before, rows_of(session, 4)))
        train(session, model, 4, range(3, 5))
        with counted("all_to_all_single") as counts:
            model(ids, *rest)
        assert counts["all_to_all_single"] == 3
        session.discard()
        dist.barrier()


CASES: dict[str, Callable[..., None]] = {
    "broadcasts": broadcasts,
    "handed failures": handed_failures,
    "the leader dies": functools.partial(a_rank_dies, dies=0),
    "a follower dies": functools.partial(a_rank_dies, dies=1),
    "exchanges": exchanges,
    "disagreements": disagreements,
    "exchange failures": exchange_failures,
}
KILLED = {"the leader dies": (0,), "a follower dies": (1,)}


def main(address: str, folder: str, only: str = "") -> None:
    """Every case in turn, on two ranks."""
    fork_cases({name: (2, case) for name, case in CASES.items()}, address, folder, only, killed=KILLED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases left."""
    made = tmp_path_factory.mktemp("cases")
    with sr.local_cluster(shards=2) as cluster:
        run_ranks(__file__, 1, cluster.address, made, deadline_sec=150, interprets=False)
    return made


@pytest.mark.parametrize("case", CASES)
def test_ranks_make_lookups_together(folder: Path, case: str) -> None:
    check_case(folder, case)


if __name__ == "__main__":
    main(*sys.argv[2:])
