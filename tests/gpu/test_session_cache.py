"""A session whose row cache is on the model's device: the Triton storage is used, and changes nothing but the place.

Without a CUDA device it is chosen by name, and its kernels run under Triton's interpreter.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
import sparserow as sr
from sparserow.cpp_ext.device import device_rows, device_storage

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
ROWS, DIM, STEPS, BYTES = 40, 3, 5, 1 << 16


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the storage on a device was asked."""
    calls = {"probe": 0, "put": 0, "drop": 0}

    def counted(name: str) -> Any:
        original = getattr(device_storage.DeviceStorage, name)

        def call(self: Any, *arguments: Any) -> None:
            calls[name] += 1
            original(self, *arguments)

        return call

    for name in calls:
        monkeypatch.setattr(device_storage.DeviceStorage, name, counted(name))
    return calls


def seed() -> int:
    given = os.environ.get("SPARSEROW_TEST_SEED")
    chosen = random.randrange(2**32) if given is None else int(given)
    print(f"SPARSEROW_TEST_SEED={chosen}")
    return chosen


def model_on(session: sr.Session, device: torch.device) -> nn.ModuleDict:
    torch.manual_seed(1)
    layers = {"one": nn.Embedding(ROWS, DIM), "bag": nn.EmbeddingBag(ROWS, 2 * DIM, mode="sum")}
    model = nn.ModuleDict({**layers, "dense": nn.Linear(3 * DIM, 1)}).to(device)
    return sr.distribute(model, session, optimizer=sr.Adagrad(lr=0.3), min_rows=1)


def batches(start: int) -> Iterator[Tensor]:
    for step in range(STEPS):
        yield torch.randint(0, ROWS, (6, 2), generator=torch.Generator().manual_seed(start + step))


def train(session: sr.Session, device: torch.device, start: int, ahead: int = 0) -> tuple[list[Tensor], Any]:
    model, seen = model_on(session, device), []
    for ids in sr.prefetch(list(batches(start)), session, depth=ahead) if ahead else batches(start):
        there = ids.to(device)
        out = torch.cat([model["one"](there[:, 0]), model["bag"](there)], dim=1)
        seen.append(out.detach().cpu())
        model["dense"](out).square().sum().backward()
        session.step()
    session.flush()
    return seen, session.stats()


@pytest.mark.parametrize(("size", "own"), [(BYTES, "bounded"), (1600, "bounded"), (BYTES, "exact")])
def test_rows_and_counts_are_those_of_the_host_storage(
    size: int, own: Any, device: torch.device, asked: dict[str, int]
) -> None:
    start, runs = seed(), []
    for storage in ("host", "device"):
        cache = sr.RowCache(size, staleness=2, own_commits=own, storage=storage)
        with sr.InProcessCluster(shards=2).connect("cached", staleness=3, cache=cache) as session:
            runs.append(train(session, device, start))
        assert (asked["probe"] > 0) == (storage == "device")
    (host, host_stats), (there, stats) = runs
    assert all(torch.equal(one, other) for one, other in zip(host, there, strict=True))
    assert stats == host_stats
    assert stats.cache_misses > 0
    assert stats.cache_hits > 0 or own == "exact"
    assert (asked["drop"] > 0) == (own == "exact")


def test_over_real_shards_and_through_a_prefetch(device: torch.device, asked: dict[str, int]) -> None:
    cache = sr.RowCache(BYTES, staleness=2, own_commits="bounded", storage="device")
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads", staleness=4, cache=cache) as session:
        _, stats = train(session, device, seed(), ahead=2)
    assert asked["probe"] > 0
    assert stats.cache_hits > 0
    assert stats.steps_committed == STEPS


def test_the_place_is_the_models(device: torch.device, asked: dict[str, int]) -> None:
    with sr.InProcessCluster().connect("cached", cache=sr.RowCache(BYTES)) as session:
        train(session, device, 0)
    assert (asked["probe"] > 0) == (device.type == "cuda")


def test_a_cache_beyond_the_device_names_its_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "memory_of", {device: 1000, torch.device("cuda", 0): 1000}.__getitem__)
    with (
        sr.InProcessCluster().connect("cached", cache=sr.RowCache(BYTES, storage="device")) as session,
        pytest.raises(
            sr.InvalidArgument,
            match=rf"cache.bytes: {BYTES} is not allowed; allowed: 1 to 1000 for a model on {device}.*, the device",
        ),
    ):
        model_on(session, device)


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_storage, "runs_on", lambda device: device.type == "cuda")
    with (
        sr.InProcessCluster().connect("cached", cache=sr.RowCache(BYTES, storage="device")) as session,
        pytest.raises(
            sr.InvalidArgument,
            match=r"cache\.storage: 'device' is not allowed; allowed: auto, host for a model on cpu, as",
        ),
    ):
        model_on(session, torch.device("cpu"))


def test_a_storage_that_fails_is_not_asked_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *arguments: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(device_storage.DeviceStorage, "put", fail)
    with sr.InProcessCluster().connect("cached", cache=sr.RowCache(BYTES, storage="device")) as session:
        model = model_on(session, device)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="row cache: RuntimeError: the device is gone"):
                model["one"](torch.tensor([1, 2], device=device))
