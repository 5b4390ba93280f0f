"""A served program on a device: the scores of the host, arguments and rows in a copy each."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from scored_program import batch, publish_scorer
from sparserow.deploy.bench.counting_device import COUNTS, CountingLink, device
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.inference.inference import ServedModel
from sparserow_process import wait_until


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Tensor]]:
    """A folder with the model, and the scores of its forward for some batches."""
    root = str(tmp_path_factory.mktemp("models"))
    return root, publish_scorer(root, 6)


def test_scores_are_those_of_the_host(published: tuple[str, list[Tensor]]) -> None:
    root, scores = published
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device()) as served,
    ):
        for seed, expected in enumerate(scores):
            out = served(*batch(seed))
            assert out.device == device()
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
        COUNTS.reset()
        again = served(*batch(0))
        # Arguments, computed ids and rows in one copy; no id comes back.
        assert (COUNTS.to_device, COUNTS.to_host, COUNTS.waits) == (1, 0, 0), COUNTS.log
        torch.testing.assert_close(again.cpu(), scores[0], rtol=1e-5, atol=1e-6)


def test_calls_from_several_threads_do_not_mix(published: tuple[str, list[Tensor]]) -> None:
    root, scores = published
    wrong: list[int] = []
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device()) as served,
    ):

        def work(seed: int) -> None:
            for _ in range(15):
                if not torch.allclose(served(*batch(seed)).cpu(), scores[seed], rtol=1e-5, atol=1e-6):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


def test_rows_of_the_cache_stay_on_the_device(published: tuple[str, list[Tensor]]) -> None:
    root, scores = published
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device(), cache=sr.LookupCache(1 << 20, ttl_ms=3_600_000)) as served,
    ):
        for _ in range(2):
            for seed, expected in enumerate(scores):
                torch.testing.assert_close(served(*batch(seed)).cpu(), expected, rtol=1e-5, atol=1e-6)
        before = served.stats()
        COUNTS.reset()
        again = served(*batch(0))
        # The arguments cross in one copy, and a byte an id comes back.
        assert (COUNTS.to_device, COUNTS.to_host) == (1, 1), COUNTS.log
        assert COUNTS.bytes_to_host == 16 * (3 + 3)
        torch.testing.assert_close(again.cpu(), scores[0], rtol=1e-5, atol=1e-6)
        after = served.stats()
        assert after.cache_hits - before.cache_hits == 16 * (3 + 3)
        assert (after.cache_misses, after.pulls) == (before.cache_misses, before.pulls)
        assert after.cache_hit_age_seconds > 0


def test_a_row_is_used_for_as_long_as_the_cache_says(published: tuple[str, list[Tensor]]) -> None:
    root, _ = published
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device(), cache=sr.LookupCache(1 << 20, ttl_ms=1)) as served,
    ):
        for _ in range(3):
            served(*batch(0))
            time.sleep(0.01)
        stats = served.stats()
        assert (stats.cache_hits, stats.cache_misses) == (0, 3 * 16 * 6)


@pytest.mark.parametrize("size", ["least", "some", "all"])
def test_calls_that_share_a_cache_of_a_device_do_not_mix(published: tuple[str, list[Tensor]], size: str) -> None:
    root, scores = published
    least = 8 * 4 * (4 * 4 + 16)
    capacity = {"least": least, "some": 6 * least, "all": 1 << 20}[size]
    wrong: list[int] = []
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device(), cache=sr.LookupCache(capacity, ttl_ms=20)) as served,
    ):

        def work(seed: int) -> None:
            for _ in range(15):
                if not torch.allclose(served(*batch(seed)).cpu(), scores[seed], rtol=1e-5, atol=1e-6):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        stats = served.stats()
    assert wrong == []
    assert stats.cache_misses > 0


def test_a_cache_that_is_too_small_or_too_large_is_refused(
    published: tuple[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = published
    monkeypatch.setattr(CountingLink, "free_bytes", lambda _: 5000)
    with sr.local_serving("ctr", root=root) as serving, sr.ServingClient(serving.addresses) as client:
        for capacity in (1023, 5001):
            told = rf"cache\.capacity_bytes: {capacity} is not allowed; allowed: 1024 to 5000, one set"
            with pytest.raises(sr.errors.InvalidArgument, match=told):
                ServedModel(client, root, device=device(), cache=sr.LookupCache(capacity))
        ServedModel(client, root, device=device(), cache=sr.LookupCache(1024)).close()


class Kinds(nn.Module):
    """Lookups of two widths and several kinds, two of them of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(300, 4)
        self.wide = nn.Embedding(300, 6)
        self.padded = nn.EmbeddingBag(300, 4, mode="mean", padding_idx=0)
        self.largest = nn.EmbeddingBag(300, 4, mode="max", padding_idx=3)
        self.summed = nn.EmbeddingBag(300, 6, mode="sum")
        self.head = nn.Linear(24, 1)

    def forward(self, ids: Tensor, tags: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        bags = self.summed(tags.reshape(-1), offsets, per_sample_weights=weights.reshape(-1))
        rows = [self.plain(ids[:, 0]), self.padded(ids), self.largest(ids), self.wide(ids[:, 1])]
        return self.head(torch.cat([*rows, bags], 1)).squeeze(1)


def kinds_of(seed: int, rows: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (rows, 4), generator=made) * (torch.rand(rows, 4, generator=made) < 0.7)
    tags = torch.randint(0, 300, (rows, 2), generator=made)
    offsets = torch.sort(torch.randint(0, rows * 2, (rows,), generator=made)).values
    offsets[0] = 0
    return ids, tags, offsets, torch.rand(rows, 2, generator=made)


def test_lookups_of_every_kind_read_the_cache_of_a_device(tmp_path: Path) -> None:
    root = str(tmp_path)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        torch.manual_seed(0)
        model = session.distribute(Kinds(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.publish("ctr", root=root, model=model, example=kinds_of(0))
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root) as on_host,
    ):
        expected = [on_host(*kinds_of(seed)) for seed in range(6)]
        on_host.close()
        with ServedModel(client, root, device=device(), cache=sr.LookupCache(1 << 20, ttl_ms=3_600_000)) as served:
            for _ in range(2):
                for seed, scores in enumerate(expected):
                    torch.testing.assert_close(served(*kinds_of(seed)).cpu(), scores, rtol=1e-5, atol=1e-6)
            assert served.stats().cache_hits > served.stats().cache_misses > 0


def test_rows_that_are_kept_are_served_while_no_process_answers(published: tuple[str, list[Tensor]]) -> None:
    root, scores = published
    with contextlib.ExitStack() as processes:
        serving = processes.enter_context(sr.local_serving("ctr", root=root, poll="50ms"))
        cache = sr.LookupCache(1 << 20, ttl_ms=3_600_000)
        client = sr.ServingClient(serving.addresses)
        with (
            client,
            ServedModel(client, root, device=device(), cache=cache, deadline_ms=500, refresh_sec=None) as served,
        ):
            served(*batch(0))
            processes.close()
            torch.testing.assert_close(served(*batch(0)).cpu(), scores[0], rtol=1e-5, atol=1e-6)
            for _ in range(2):  # a call that failed has kept nothing
                with pytest.raises((sr.errors.Unavailable, sr.errors.DeadlineExceeded)):
                    served(*batch(1))


def test_another_version_has_other_rows(tmp_path: Path) -> None:
    root = str(tmp_path)
    ids = torch.arange(20)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        model = session.distribute(nn.Sequential(nn.Embedding(50, 4)), optimizer=sr.optim.SGD(lr=1.0), min_rows=1)
        versions = []
        for _ in range(2):
            session.publish("ctr", root=root, model=model, example=(ids,))
            with torch.no_grad():
                versions.append(model.eval()(ids))
            model.train()(ids).sum().backward()
            session.step()
    registry = ModelRegistry(root)
    registry.point("ctr", "live", 1)
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(
            client, root, device=device(), cache=sr.LookupCache(1 << 20, ttl_ms=3_600_000), refresh_sec=None
        ) as served,
    ):
        for _ in range(2):
            assert torch.equal(served(ids).cpu(), versions[0])
        registry.point("ctr", "live", 2)
        wait_until(lambda: served.refresh() == 2, "the second version")
        assert served.stats().cache_hits == 0
        for _ in range(2):
            assert torch.equal(served(ids).cpu(), versions[1])
        assert served.stats().cache_hits == len(ids)


class Many(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(300, 4) for _ in range(tables))
        self.head = nn.Linear(4 * tables, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)).squeeze(1)


def operations_of_a_call(root: str, tables: int, cache: sr.LookupCache | None) -> dict[str, int]:
    ids = torch.arange(8 * tables).remainder(300).view(8, tables)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, f"of{tables}") as session:
        model = session.distribute(Many(tables), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.publish("ctr", root=root, model=model, example=(ids,))
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device(), cache=cache) as served,
    ):
        for _ in range(2):
            served(ids)
        COUNTS.reset()
        served(ids)
        assert COUNTS.waits == 0, COUNTS.log
        return dict(COUNTS.operations)


def test_a_call_whose_rows_are_kept_has_as_many_operations_for_26_tables_as_for_3(tmp_path: Path) -> None:
    cache = sr.LookupCache(1 << 22, ttl_ms=3_600_000)
    few, many = (operations_of_a_call(str(tmp_path / str(tables)), tables, cache) for tables in (3, 26))
    assert few == many
    print(many)
    assert sum(many.values()) <= 25


class Chained(nn.Module):
    """Ids that another lookup's rows give, ids by arithmetic of floats and of integers, and ids by bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Embedding(200, 4) for _ in range(4))
        self.register_buffer("bounds", torch.tensor([0.2, 0.4, 0.8]))
        self.head = nn.Linear(16, 1)

    def forward(self, ids: Tensor, age: Tensor) -> Tensor:
        first = self.first((ids * 31).remainder(200))
        rows = [
            first,
            self.second(first.argmax(1)),
            self.third((age * 100.0).long()),
            self.fourth(torch.bucketize(age, self.bounds)),
        ]
        return self.head(torch.cat(rows, 1)).squeeze(1)


@pytest.mark.parametrize("cached", [False, True], ids=["pulled", "cached"])
def test_ids_that_are_not_known_ahead_are_looked_up_when_they_are(tmp_path: Path, cached: bool) -> None:
    root = str(tmp_path)

    def given(seed: int) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(seed)
        return torch.randint(0, 10**6, (9,), generator=made), torch.rand(9, generator=made)

    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        torch.manual_seed(0)
        model = session.distribute(Chained(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.publish("ctr", root=root, model=model, example=given(0))
        model.eval()
        with torch.no_grad():
            expected = [model(*given(seed)) for seed in range(4)]
    cache = sr.LookupCache(1 << 20, ttl_ms=3_600_000) if cached else None
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device(), cache=cache) as served,
    ):
        for seed in (*range(4), 0):
            torch.testing.assert_close(served(*given(seed)).cpu(), expected[seed], rtol=1e-5, atol=1e-6)
        there = [each.to(device()) for each in given(1)]
        torch.testing.assert_close(served(*there).cpu(), expected[1], rtol=1e-5, atol=1e-6)
        with pytest.raises(sr.errors.InvalidArgument, match="the number of arguments is 1, and 2 is allowed"):
            served(given(0)[0])
        with pytest.raises(sr.errors.InvalidArgument, match="ids"):
            served(torch.rand(9), torch.rand(9))
