"""``sr.RowCache``: what it saves, what a step may see, and which settings are refused."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config

ROWS, DIM, STEPS = 60, 3, 12
MIB = 1 << 20


def connect(cache: sr.RowCache | None, staleness: int | None = 0) -> sr.Session:
    return sr.InProcessCluster(shards=2).connect("cached", staleness=staleness, cache=cache)


def model_of(session: sr.Session) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.ModuleDict({"one": nn.Embedding(ROWS, DIM), "bag": nn.EmbeddingBag(ROWS, 2 * DIM, mode="sum")})
    return session.distribute(layers, optimizer=sr.optim.Adagrad(lr=0.3), min_rows=1)


def batch(seed: int) -> Tensor:
    return torch.randint(0, ROWS, (9, 2), generator=torch.Generator().manual_seed(seed))


def train(session: sr.Session, model: Any, batches: Any) -> list[Tensor]:
    seen = []
    for ids in batches:
        out = torch.cat([model["one"](ids[:, 0]), model["bag"](ids)], dim=1)
        seen.append(out.detach().clone())
        (out**2).sum().backward()
        session.step()
    session.flush()
    return seen


def rows_of(session: sr.Session) -> list[np.ndarray[Any, Any]]:
    return [session.table(name).pull(np.arange(ROWS)) for name in ("one", "bag")]


@pytest.mark.parametrize("staleness", [0, 3, None])
@pytest.mark.parametrize("size", [MIB, 2000])
@pytest.mark.parametrize("own", ["exact", "bounded"])
def test_a_cache_that_validates_every_use_is_bit_equal_to_none(staleness: int | None, size: int, own: Any) -> None:
    runs = []
    for cache in (None, sr.RowCache(size, own_commits=own)):
        with connect(cache, staleness) as session:
            forwards = train(session, model_of(session), map(batch, range(STEPS)))
            runs.append((forwards, rows_of(session), session.stats()))
    for one, other in zip(*(run[0] for run in runs), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*(run[1] for run in runs), strict=True):
        np.testing.assert_array_equal(one, other)
    plain, cached = (run[2] for run in runs)
    assert (plain.cache_hits, plain.cache_misses, plain.cache_revalidated) == (0, 0, 0)
    assert cached.cache_hits == 0
    assert (cached.cache_revalidated > 0) == (own == "bounded")  # each row met again has changed, and was dropped
    assert cached.rows_pulled == cached.cache_misses + cached.cache_refreshed


def test_own_steps_are_seen_to_the_bit_when_they_are_exact() -> None:
    """One worker: what it sees are its own steps, so a cache of any staleness changes nothing."""
    runs = []
    for cache in (None, sr.RowCache(MIB, staleness=8)):
        with connect(cache, staleness=8) as session:
            model = model_of(session)
            runs.append(train(session, model, map(batch, range(STEPS))))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_bounded_own_steps_save_rows() -> None:
    with connect(sr.RowCache(MIB, staleness=4, own_commits="bounded"), staleness=4) as session:
        model = model_of(session)
        train(session, model, [batch(0)] * 10)
        unique = len(batch(0)[:, 0].unique()) + len(batch(0).unique())
        stats = session.stats()
        assert stats.cache_hits == 8 * unique  # steps 0 and 5 ask
        assert stats.rows_pulled == 2 * unique
        assert stats.cache_bytes_saved == 8 * 4 * (
            DIM * len(batch(0)[:, 0].unique()) + 2 * DIM * len(batch(0).unique())
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_are_rounded_in_the_cache_alone(dtype: Any) -> None:
    ids = torch.arange(40)
    with connect(sr.RowCache(MIB, staleness=3, own_commits="bounded", dtype=dtype), staleness=3) as session:
        model, seen = model_of(session), []
        for _ in range(3):
            seen.append(model["one"](ids).detach())
            session.step(allow_empty=True)
        stats, exact = session.stats(), torch.from_numpy(session.table("one").pull(ids.numpy()))
    assert stats.cache_hits == 2 * len(ids)
    rounded = exact.to(getattr(torch, dtype)).float()
    assert not torch.equal(rounded, exact)
    assert [torch.equal(out, exact) for out in seen] == [True, False, False]
    assert all(torch.equal(out, rounded) for out in seen[1:])


def test_a_row_beyond_float16_is_not_kept_in_it() -> None:
    ids = torch.arange(4)
    with connect(sr.RowCache(MIB, staleness=3, own_commits="bounded", dtype="float16"), staleness=3) as session:
        model, seen = model_of(session), []
        rows = session.table("one").pull(ids.numpy())
        rows[1:3, 0] = (65_519, -65_520)  # the first of them rounds to the largest float16, the second to infinity
        session.table("one").assign(ids.numpy(), rows)
        for _ in range(3):
            seen.append(model["one"](ids).detach())
            session.step(allow_empty=True)
        assert session.stats().cache_hits == 2 * 3
    assert [float(out[2, 0]) for out in seen] == [-65_520] * 3
    assert [float(out[1, 0]) for out in seen] == [65_519, 65_504, 65_504]


def test_the_figures_are_metrics() -> None:
    registry = CollectorRegistry()
    with connect(sr.RowCache(MIB, staleness=4, own_commits="bounded"), staleness=4) as session:
        registry.register(sr.SessionMetrics(session))
        train(session, model_of(session), [batch(0)] * 3)
        stats, labels = session.stats(), {"namespace": "cached", "rank": "0"}
        assert stats.cache()["hits"] == stats.cache_hits > 0
        for name, value in stats.cache().items():
            assert registry.get_sample_value(f"sparserow_session_cache_{name}_total", labels) == value
        assert registry.get_sample_value("sparserow_session_rows_pulled_total", labels) == stats.rows_pulled


def test_evaluation_sees_the_newest_rows() -> None:
    with connect(sr.RowCache(MIB, staleness=50, own_commits="bounded"), staleness=None) as session:
        model = model_of(session)
        train(session, model, [batch(0)] * 3)
        model.eval()
        ids = batch(0)[:, 0]
        np.testing.assert_array_equal(model["one"](ids).numpy(), session.table("one").pull(ids.numpy()))


def test_a_prefetch_goes_through_the_cache() -> None:
    with connect(sr.RowCache(MIB, staleness=3, own_commits="bounded"), staleness=5) as session:
        model = model_of(session)
        train(session, model, session.prefetch([batch(0) for _ in range(9)], depth=2))
        stats = session.stats()
        assert stats.cache_hits > 0
        assert stats.lookups_missed == 0
        assert stats.rows_pulled == stats.cache_misses + stats.cache_refreshed


GOOD = sr.RowCache(MIB)


@pytest.mark.parametrize(
    ("cache", "staleness", "message"),
    [
        (replace(GOOD, bytes=0), 0, "connect.cache.bytes: 0 is not allowed; allowed: 1 to "),
        (replace(GOOD, bytes=1 << 60), 0, f"connect.cache.bytes: {1 << 60} is not allowed; allowed: 1 to "),
        (replace(GOOD, staleness=-1), 0, r"connect.cache.staleness: -1 is not allowed; allowed: \[0, 2"),
        (replace(GOOD, staleness=3), 2, "connect.cache.staleness: 3 is not allowed; allowed: 0 to 2, the session"),
        (replace(GOOD, staleness=1, dtype="int8"), 1, "connect.cache.dtype: 'int8' is not allowed; allowed: float32, "),
        (replace(GOOD, dtype="bfloat16"), 0, "connect.cache.dtype: 'bfloat16' is not allowed; allowed: float32 with s"),
        (replace(GOOD, own_commits="no"), 0, "connect.cache.own_commits: 'no' is not allowed; allowed: exact, bounded"),
    ],
)
def test_settings_out_of_range_are_named(cache: sr.RowCache, staleness: int | None, message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        connect(cache, staleness)


def test_a_cache_beyond_the_machine_names_its_memory() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(sr.errors.InvalidArgument, match=f"allowed: 1 to {memory}, the memory of this machine"):
        connect(sr.RowCache(memory + 1))


def test_too_few_bytes_for_a_table_are_refused_by_distribute() -> None:
    with (
        connect(sr.RowCache(300)) as session,
        pytest.raises(
            sr.errors.InvalidArgument, match=r"cache.bytes: 300 is not allowed; allowed: >= \d+ with table 'cached/"
        ),
    ):
        model_of(session)


def test_prefetch_must_leave_room_for_the_cache() -> None:
    with connect(sr.RowCache(MIB, staleness=3), staleness=4) as session:
        model_of(session)
        with pytest.raises(
            sr.errors.InvalidArgument,
            match=r"prefetch.depth: 2 is not allowed; allowed: a sum with cache.staleness 3 of at most 4",
        ):
            session.prefetch([batch(0)], depth=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "train.cache.bytes"),
        (["train.cache.bytes=4096", "train.cache.staleness=1"], "train.cache.staleness: 1 is not allowed .* 0 to 0"),
        (["train.cache.bytes=4096", "train.cache.own_commits=late"], "train.cache.own_commits"),
        (["train.cache.bytes=4096", "train.cache.dtype=float16"], "train.cache.dtype: 'float16' is not allowed"),
        (["train.cache.bytes=1 MiB", "model.backend=local"], "train.cache: needs model.backend ps"),
        (
            ["train.cache.bytes=1 MiB", "train.prefetch=2"],
            "train.prefetch: 2 is not allowed with train.cache and train.staleness 0",
        ),
        (
            ["train.cache.bytes=1 MiB", "train.cache.staleness=3", "train.prefetch=2", "train.staleness=4"],
            "train.cache.staleness: 3 is not allowed with train.staleness 4 and train.prefetch 2; allowed: 0 to 2",
        ),
    ],
)
def test_wrong_jobs_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        load_config(
            JobConfig,
            None,
            [
                "data.train=a.tsv",
                "data.test=b.tsv",
                "model={class: DLRM, args: {rows: {'*': 1000000}}}",
                *(settings or ["train.cache={}"]),
            ],
        )
