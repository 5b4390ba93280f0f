"""Rows that a device keeps: what is right without them is the same with them, and fewer bytes cross."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.cpp_ext import _client
from sparserow.deploy.bench.counting_device import COUNTS, crossings, device
from sparserow.deploy.preflight.planning import Load, PlannedCache, PlannedTable, plan

ROWS, DIM, BATCH = 400, 16, 64


def seed() -> int:
    given = os.environ.get("SPARSEROW_TEST_SEED")
    chosen = random.randrange(2**32) if given is None else int(given)
    print(f"SPARSEROW_TEST_SEED={chosen}")
    return chosen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, 2 * DIM, mode="sum")
        self.head = nn.Linear(4 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(ids[:, 0]), self.two(ids[:, 1]), self.bag(ids)], 1)).squeeze(1)


def batches(n: int, start: int, *, zipf: float = 1.3) -> list[Tensor]:
    draw = np.random.default_rng(start)
    return [torch.from_numpy(draw.zipf(zipf, (BATCH, 3)) % ROWS) for _ in range(n)]


def model_on(session: sr.Session, where: torch.device, *, carry: bool = True) -> Net:
    torch.manual_seed(1)
    model = Net().to(where)
    return session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.02), min_rows=1, carry_weights=carry)


def train(session: sr.Session, model: Net, given: list[Tensor], where: torch.device, prefetch: int) -> list[float]:
    dense = torch.optim.SGD(model.parameters(), lr=0.005)
    source = session.prefetch(given, depth=prefetch, device=where) if prefetch else given
    losses = []
    for ids in source:
        loss = model(ids).square().mean()
        loss.backward()
        session.step(dense)
        losses.append(loss.detach())
    return [float(loss.cpu()) for loss in losses]


@pytest.mark.parametrize("kept", [1 << 12, 1 << 20], ids=["some rows", "all rows"])
def test_a_device_that_keeps_rows_changes_no_bit(kept: int) -> None:
    """At staleness 0, where each use of a cached row is validated."""
    given = batches(25, seed())
    results = []
    for storage in ("host", "auto"):
        cache = sr.RowCache(kept, storage=storage)
        with sr.InProcessCluster(shards=2).connect("kept", cache=cache) as session:
            model = model_on(session, device())
            results.append((train(session, model, given, device(), 0), session.stats()))
    (host, host_stats), (there, stats) = results
    assert there == host
    assert (host_stats.device_hits, host_stats.device_misses) == (0, 0)
    assert stats.device_misses > 0


def test_prefetched_batches_find_rows_that_the_device_has() -> None:
    """Rows are pulled ahead within the staleness, and packs reach the device in the order of their plans."""
    given = batches(60, 4)
    with sr.InProcessCluster(shards=2).connect(
        "ahead", staleness=3, cache=sr.RowCache(1 << 14, storage="auto")
    ) as session:
        model = model_on(session, device())
        losses = train(session, model, given, device(), 2)
        session.flush()
        stats = session.stats()
        model.eval()
        with torch.no_grad():
            out = model(given[0]).cpu()
            there = model.one(given[0][:, 0]).cpu().numpy()
        assert (there == session.table("one").pull(given[0][:, 0].numpy().astype(np.uint64))).all()
    assert np.isfinite(losses).all()
    assert torch.isfinite(out).all()
    assert min(stats.device_hits, stats.device_misses) > 100


def test_bytes_over_the_bus_fall_by_what_the_device_has() -> None:
    """Rows that do not change: an evaluation over a Zipf trace crosses with the misses alone."""
    given = batches(40, 5)
    crossed, stats = {}, {}
    for storage in ("host", "device"):
        cache = sr.RowCache(1 << 20, storage=storage)
        with sr.InProcessCluster(shards=2).connect("evaluated", cache=cache) as session:
            model = model_on(session, device())
            train(session, model, batches(2, 9), device(), 0)
            model.eval()
            before, counted = crossings().bytes_to_device, COUNTS.bytes_to_device
            with torch.no_grad():
                outs = [model(ids).cpu() for ids in given]
            crossed[storage] = crossings().bytes_to_device - before, outs
            stats[storage] = session.stats()
            assert COUNTS.bytes_to_device - counted >= crossed[storage][0]
    (host, expected), (there, got) = crossed["host"], crossed["device"]
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    saved, hits = stats["device"].device_bytes_saved, stats["device"].device_hits
    rate = hits / (hits + stats["device"].device_misses)
    assert rate > 0.5
    # What does not cross is what the device has; numbers of rows and alignment cost a few bytes.
    assert host - there == pytest.approx(saved, rel=0.35)
    assert there < host * (1 - 0.5 * rate)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_cross_in_half_of_the_bytes(dtype: Any) -> None:
    """Rows are rounded as they cross, so that one that was just sent and one that was kept have the same bits."""
    given = batches(1, 3)[0]
    sent, exact, seen = {}, {}, {}
    for kept in ("float32", dtype):
        cache = sr.RowCache(1 << 20, storage="auto", staleness=3, own_commits="bounded", dtype=kept)
        with sr.InProcessCluster(shards=2).connect("halved", staleness=3, cache=cache) as session:
            model = model_on(session, device())
            model.eval()
            before = crossings().bytes_to_device
            with torch.no_grad():
                outs = [model.one(given[:, 0]).cpu() for _ in range(3)]
            sent[kept] = crossings().bytes_to_device - before
            assert session.stats().device_hits == 2 * len(given[:, 0].unique())
            seen[kept] = outs
            exact[kept] = torch.from_numpy(session.table("one").pull(given[:, 0].numpy().astype(np.uint64)))
    assert torch.equal(exact["float32"], exact[dtype])
    assert all(torch.equal(out, exact["float32"]) for out in seen["float32"])
    rounded = exact[dtype].to(getattr(torch, dtype)).float()
    assert not torch.equal(rounded, exact[dtype])
    assert all(torch.equal(out, rounded) for out in seen[dtype])
    rows = len(given[:, 0].unique())
    assert sent["float32"] - sent[dtype] == pytest.approx(rows * DIM * 2, abs=64)


def test_16_bits_hold_twice_the_rows() -> None:
    places = {}
    for kept in ("float32", "bfloat16"):
        cache = sr.RowCache(1 << 14, storage="auto", staleness=1, dtype=kept)
        with sr.InProcessCluster().connect("places", staleness=1, cache=cache) as session:
            model_on(session, device())(batches(1, 0)[0])
            places[kept] = sum(count for _, count in session.core.native.device_stores)
            assert session.core.on_device.stores.bytes <= 1 << 14
    assert places["bfloat16"] == pytest.approx(2 * places["float32"], rel=0.1)


def test_rows_of_bounded_staleness_do_not_cross_while_they_serve() -> None:
    """own_commits="bounded": a row serves four steps, so that it crosses once in them."""
    given = [batches(1, 3)[0]] * 12
    cache = sr.RowCache(1 << 20, storage="auto", staleness=4, own_commits="bounded")
    with sr.InProcessCluster(shards=1).connect("bounded", staleness=4, cache=cache) as session:
        train(session, model_on(session, device()), given, device(), 0)
        stats = session.stats()
    unique = stats.device_hits + stats.device_misses
    assert stats.device_hits == pytest.approx(unique * 0.75, rel=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_over_the_bus_are_those_of_the_plan(dtype: Any) -> None:
    rows, dim, lookups, staleness = 4_000, 32, 500, 6
    cache = sr.RowCache(1 << 18, storage="auto", staleness=staleness, own_commits="bounded", dtype=dtype)
    expected = plan(
        PlannedTable(rows, dim), Load(lookups), budget_bytes=1 << 30, has_ssd=False,
        cache=PlannedCache(cache.bytes, staleness, dtype),
    ).cache  # fmt: skip
    assert expected is not None
    shares = np.arange(1, rows + 1, dtype=np.float64) ** -1.05
    draw, keys = np.random.default_rng(6), np.random.default_rng(7).permutation(rows)
    with sr.InProcessCluster().connect("planned", staleness=staleness, cache=cache) as session:
        model = session.distribute(nn.ModuleDict({"user": nn.Embedding(rows, dim)}).to(device()),
                              optimizer=sr.optim.SGD(lr=0.1), min_rows=1, carry_weights=False)  # fmt: skip

        def train(steps: int) -> int:
            for _ in range(steps):
                ids = torch.from_numpy(keys[draw.choice(rows, lookups, p=shares / shares.sum())])
                model["user"](ids).sum().backward()
                session.step()
            return crossings().bytes_to_device

        before = train(25)
        assert (train(25) - before) / 25 == pytest.approx(expected.bus_bytes, rel=0.1)


def test_a_cache_on_the_device_needs_a_model_there() -> None:
    cache = sr.RowCache(1 << 20, storage="device")
    with (
        sr.InProcessCluster().connect("nowhere", cache=cache) as session,
        pytest.raises(
            sr.errors.InvalidArgument, match=r"cache\.storage: 'device' is not allowed; allowed: auto, host .*cpu"
        ),
    ):
        model_on(session, torch.device("cpu"))


def test_more_rows_than_the_device_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparserow.deploy.bench.counting_device import CountingLink

    monkeypatch.setattr(CountingLink, "free_bytes", lambda _: 1000)
    with sr.InProcessCluster().connect("large", cache=sr.RowCache(1 << 20, storage="auto")) as session:
        model = model_on(session, device(), carry=False)
        with pytest.raises(sr.errors.InvalidArgument, match=r"cache\.bytes: 1048576 is not .* 1 to 1000, .*host"):
            model(batches(1, 0)[0])
    cache = sr.RowCache(1 << 20, storage="auto")
    with sr.InProcessCluster().connect("larger", staleness=2, cache=cache) as session:
        model_on(session, device(), carry=False)
        with pytest.raises(ValueError, match=r"^(InvalidArgument: )?cache\.bytes: 1048576 is not .* 1 to 1000"):
            session.prefetch(batches(1, 0), 2, device=device())  # the cache is wrong, not the device


def test_random_plans_agree_with_a_dict() -> None:
    """What the stores hold after each plan is what was planned: rows come together as they are on the host."""
    draw = random.Random(seed())
    cache = sr.RowCache(40 * 4 * DIM * 4, storage="auto")  # some 40 rows of each table
    with sr.InProcessCluster(shards=1).connect("plans", cache=cache) as session:
        model = model_on(session, device(), carry=False)
        model(batches(1, 0)[0])
        session.discard()
        step, handle = session.core.on_device, session.table("one")
        expected: dict[int, np.ndarray] = {}
        for _ in range(150):
            if draw.random() < 0.5:
                keys = np.array(draw.sample(range(80), 5), dtype=np.uint64)
                rows = np.random.default_rng(draw.randrange(2**32)).random((5, DIM), dtype=np.float32)
                handle.assign(keys, rows)
                expected.update({int(key): row for key, row in zip(keys, rows, strict=True)})
            ids = torch.tensor(draw.choices(range(80), k=draw.choice([1, 7, 60])))
            (found,) = step.find(["plans/one"], [ids], device(), train=False, with_gradient=False)
            rows = found.pack.rows(found.pack.run_of(found.part)).cpu()
            got = rows[found.pack.positions([found.part]).cpu().long()].numpy()
            for key, row in zip(ids.tolist(), got, strict=True):
                if key in expected:
                    assert (row == expected[key]).all()
        stats = session.stats()
        assert min(stats.device_hits, stats.device_misses) > 100
        assert isinstance(found.pack.native, _client.LookupPack)
