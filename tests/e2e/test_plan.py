"""``sparserow plan``: its formulas against a real cluster, within a tenth, and against whole sums; its mistakes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

import sparserow as sr
from sparserow.cpp_ext import _client
from sparserow.deploy.cli import main
from sparserow.deploy.preflight.planning import (
    PLANNED_OPTIMIZERS,
    CachePlan,
    Load,
    Plan,
    PlannedCache,
    PlannedTable,
    plan,
    plan_on_devices,
)
from sparserow.deploy.preflight.popularity import Popularity
from sparserow.proto import control_pb2 as pb
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.optim import SGD, Adam
from sparserow.worker.layers.table_handle import TableHandle

NEAR = 0.1
SEED = 20


def zipf_draws(rows: int, skew: float) -> Callable[[int], NDArray[np.int64]]:
    """Draws keys by the law; which key has which rank is shuffled."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    sums = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -skew)
    keys = random.permutation(rows)
    return lambda count: keys[np.searchsorted(sums / sums[-1], random.random(count))]


def fill(table: TableHandle, rows: int, dim: int, first: int = 0) -> None:
    for begin in range(first, rows, 20_000):
        keys = np.arange(begin, min(rows, begin + 20_000))
        table.assign(keys, np.ones((len(keys), dim), np.float32))


def network(status: pb.GetStatusReply) -> int:
    return sum(shard.load.bytes_received + shard.load.bytes_sent for shard in status.shards)


def test_bytes_of_rows_and_of_the_network_are_those_of_a_cluster() -> None:
    rows, dim, lookups = 300_000, 32, 20_000
    expected = plan(PlannedTable(rows, dim), Load(lookups), budget_bytes=1 << 30, has_ssd=False, shards=2)
    draw = zipf_draws(rows, 1.05)
    with (
        sr.local_cluster(shards=2) as cluster,
        sr.connect(cluster.address, "ads", staleness=0) as session,
        ControlClient(cluster.address) as control,
    ):
        table = session.create_table("user", dim=dim, optimizer=sr.optim.Adagrad(lr=0.1))
        processes = [psutil.Process(pid) for pid in cluster.shard_pids]

        def resident() -> int:  # without the pages that are touched ahead of rows, once no more are
            readings: list[int] = []
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                ahead = sum(shard.reserved_bytes for shard in control.status().shards)
                readings.append(ahead)
                if len(readings) > 1 and ahead == readings[-2]:
                    break
                time.sleep(0.2)
            return sum(process.memory_info().rss for process in processes) - readings[-1]

        fill(table, 60_000, dim)  # buffers have their size by then
        before = resident()
        fill(table, rows, dim, first=60_000)
        grown = resident() - before
        used = sum(shard.used_bytes for shard in control.status().shards)
        assert used / rows == pytest.approx(expected.memory_row_bytes, rel=NEAR)
        assert grown / (rows - 60_000) == pytest.approx(expected.memory_row_bytes, rel=NEAR)
        keys = draw(lookups)
        unique = np.unique(keys)
        assert len(unique) == pytest.approx(expected.unique_keys, rel=NEAR)
        began = network(control.status())
        table.pull(keys)
        pulled = network(control.status())
        table.push(unique, np.zeros((len(unique), dim), np.float32))
        pushed = network(control.status())
    assert pulled - began == pytest.approx(expected.pull_bytes, rel=NEAR)
    assert pushed - pulled == pytest.approx(expected.push_bytes, rel=NEAR)


def test_hit_rate_and_tiers_are_those_of_a_cluster(tmp_path: Path) -> None:
    rows, dim, draws = 150_000, 16, 5_000
    expected = plan(PlannedTable(rows, dim), Load(draws), budget_bytes=16 << 20, has_ssd=True, shards=1)
    assert expected.memory_rows < 0.75 * rows
    draw = zipf_draws(rows, 1.05)
    with (
        sr.local_cluster(shards=1, memory_budget="16MiB", ssd_path=tmp_path) as cluster,
        sr.connect(cluster.address, "ads", staleness=0) as session,
        ControlClient(cluster.address) as control,
    ):
        table = session.create_table("user", dim=dim, optimizer=sr.optim.Adagrad(lr=0.1))
        fill(table, rows, dim)
        for _ in range(120):
            table.pull(draw(draws))
        before = control.status().shards[0].tier
        for _ in range(60):
            table.pull(draw(draws))
        shard = control.status().shards[0]
    hits, misses = shard.tier.hits - before.hits, shard.tier.misses - before.misses
    assert hits / (hits + misses) == pytest.approx(expected.hit_rate, rel=NEAR)
    assert hits / (hits + misses) == pytest.approx(expected.lru_hit_rate, rel=NEAR)
    usage = shard.tables[0]
    assert usage.rows - usage.ssd_rows == pytest.approx(expected.memory_rows, rel=NEAR)
    assert shard.used_bytes == pytest.approx(16 << 20, rel=NEAR)
    assert usage.ssd_bytes == pytest.approx(expected.ssd_bytes, rel=NEAR)


@pytest.mark.parametrize(("room", "staleness"), [(2_000, 4), (20_000, 12)], ids=["small", "whole"])
def test_hits_of_a_row_cache_are_those_of_a_worker_that_trains(room: int, staleness: int) -> None:
    rows, dim, lookups = 20_000, 8, 1_000
    size = room * _client.NativeRowCache.bytes_per_row(dim)
    planned = PlannedCache(size, staleness)
    expected = plan(PlannedTable(rows, dim), Load(lookups), budget_bytes=1 << 30, has_ssd=False, cache=planned).cache
    assert expected is not None
    assert expected.rows == room
    draw, cache = zipf_draws(rows, 1.05), sr.RowCache(size, staleness=staleness, own_commits="bounded")
    with sr.InProcessCluster().connect("planned", staleness=staleness, cache=cache) as session:
        model = session.distribute(torch.nn.ModuleDict({"user": torch.nn.Embedding(rows, dim)}),
                              optimizer=sr.optim.SGD(lr=0.1), min_rows=1, carry_weights=False)  # fmt: skip

        def train(steps: int) -> sr.SessionStats:
            for _ in range(steps):
                model["user"](torch.from_numpy(draw(lookups))).sum().backward()
                session.step()
            return session.stats()

        before, after = train(60), train(60)
    hits, asked = (getattr(after, name) - getattr(before, name) for name in ("cache_hits", "cache_misses"))
    asked += hits + after.cache_revalidated - before.cache_revalidated
    assert hits / asked == pytest.approx(expected.hit_rate, rel=NEAR)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.3])
def test_groups_of_ranks_stand_for_each_rank(skew: float) -> None:
    rows, draws = 300_000, 40_000  # beyond the ranks that stand alone
    shares = np.arange(1, rows + 1, dtype=np.float64) ** -skew
    shares /= shares.sum()
    seen = -np.expm1(draws * np.log1p(-shares))
    law = Popularity.zipf(rows, skew)
    assert law.counts.sum() == pytest.approx(rows)
    assert law.unique(draws) == pytest.approx(seen.sum(), rel=1e-3)
    for room in (1_000, 100_000):
        assert law.hits_of_most_asked(draws, room) == pytest.approx(seen[:room].sum() / seen.sum(), rel=1e-3)
    assert law.hits_of_most_asked(draws, rows) == pytest.approx(1)
    assert law.hits_of_last_asked(draws, rows) == 1
    assert law.hits_of_last_asked(draws, 1_000) <= law.hits_of_most_asked(draws, 1_000) + 1e-9


def test_the_last_asked_of_a_law_of_one_draw_are_an_lru_cache() -> None:
    rows, room, random = 2_000, 200, np.random.default_rng(SEED)
    shares = np.arange(1, rows + 1, dtype=np.float64) ** -0.9
    cached: dict[int, None] = {}
    hits = 0
    for number, key in enumerate(random.choice(rows, 60_000, p=shares / shares.sum())):
        hits += number >= 10_000 and key in cached
        cached.pop(key, None)
        cached[key] = None
        if len(cached) > room:
            del cached[next(iter(cached))]
    law = Popularity.zipf(rows, 0.9)
    assert law.hits_of_last_asked(1, room) == pytest.approx(hits / 50_000, rel=0.03)


def test_state_and_dtypes_count() -> None:
    assert {name: PlannedTable(1, 10, each).row_bytes for name, each in PLANNED_OPTIMIZERS.items()} == {
        "sgd": 40,
        "momentum": 80,
        "adagrad": 80,
        "rowwise_adagrad": 44,
        "adam": 120,
        "rmsprop": 80,
        "adadelta": 120,
        "lion": 80,
        "lamb": 120,
        "ftrl": 120,
        "amsgrad": 160,
    }
    assert PlannedTable(1, 7, SGD(), "bfloat16").row_bytes == 16  # 14, padded


def test_shards_hold_the_rows() -> None:
    shape = PlannedTable(10**9, 64)
    made = plan(shape, Load(1000), budget_bytes=64 << 30, has_ssd=False)
    assert made.shards == 8  # 543 bytes a row
    assert made.memory_rows == 10**9
    assert (made.hit_rate, made.ssd_bytes) == (pytest.approx(1), 0)
    with pytest.raises(
        InvalidArgument, match="--shards: 7 do not hold 543000000000 bytes; allowed: at least 8, or --ssd"
    ):
        plan(shape, Load(1000), budget_bytes=64 << 30, has_ssd=False, shards=7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--rows": "many"}, "--rows: 'many'"),
        ({"--rows": "0"}, "--rows: 0 is not allowed"),
        ({"--skew": "9"}, "--skew: 9.0 is not allowed; allowed: [0.0, 4.0]"),
        ({"--optimizer": "adamax"}, "--optimizer: 'adamax' is not allowed; allowed: sgd, momentum"),
        ({"--dtype": "int8"}, "--dtype: 'int8'"),
        ({"--memory-budget": "1MiB"}, "--memory-budget: 1048576 is not allowed"),
        ({"--workers": "0"}, "--workers: 0 is not allowed"),
        ({"--cache": "1MiB", "--cache-staleness": "0"}, "--cache-staleness: 0 is not allowed"),
        ({"--cache": "1MiB", "--cache-dtype": "int8"}, "--cache-dtype: 'int8' is not allowed"),
        ({"--cache-staleness": "3"}, "--cache: None is not allowed"),
    ],
)
def test_mistakes(change: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--rows": "1e6", "--dim": "8", **change}
    with pytest.raises(SystemExit) as ended:
        main(["plan", *(f"{name}={value}" for name, value in options.items())])
    assert ended.value.code == 1
    assert words in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    options = [
        "--rows=2e9",
        "--dim=64",
        "--ssd",
        "--memory-budget=64GiB",
        "--shards=4",
        "--workers=16",
        "--cache=1GiB",
        "--cache-staleness=4",
        f"--json={path}",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    assert ended.value.code == 0
    assert "found in memory" in capsys.readouterr().out
    cache = PlannedCache(1 << 30, 4)
    made = plan(PlannedTable(2 * 10**9, 64), Load(2048, 16), budget_bytes=64 << 30, has_ssd=True, shards=4, cache=cache)
    told = json.loads(path.read_text())
    assert Plan(**{**told, "cache": CachePlan(**told["cache"])}) == made


def test_placement_auto_depends_on_bytes_and_traffic() -> None:
    table = PlannedTable(1_000_000, 16, Adam(), skew=1.0)
    load = Load(10_000, workers=4)
    made = plan_on_devices(table, load, device_bytes=1 << 30)
    assert made.rank_bytes == 250_000 * 4 * (16 + 32 + 1)
    assert made.room_bytes == 1 << 28
    assert made.placement == "device"
    assert made.exchange_bytes < 0.76 * made.server_bytes
    for other, why in (
        (plan_on_devices(table, load, device_bytes=made.rank_bytes * 4 - 1), r"share is 49000000 bytes, and 48999999"),
        (plan_on_devices(table, load, device_bytes=1 << 30, used_bytes=1 << 28), "and 0 are for such tables"),
        (plan_on_devices(table, Load(10_000, 4, "bfloat16"), device_bytes=1 << 30), "a step would move .* bytes"),
        (plan_on_devices(PlannedTable(9, 16, dtype="float16"), load, device_bytes=1 << 30), "these are float16"),
    ):
        assert other.placement == "servers"
        assert re.search(why, other.reason)
    alone = plan_on_devices(table, Load(10_000), device_bytes=1 << 30)
    assert (alone.exchange_bytes, alone.placement) == (0.0, "device")


def test_the_command_says_where_auto_puts_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--rows=1e6", "--dim=16", "--workers=4", "--device-memory=80GiB", f"--json={file}"])
    assert ended.value.code in (0, None)
    assert "placement auto" in (shown := capsys.readouterr().out)
    assert "device: it fits, and a step moves" in shown
    figures = json.loads(file.read_text())["on_devices"]
    assert (figures["placement"], figures["rank_bytes"]) == ("device", 250_000 * 4 * 33)


def test_the_blocks_of_the_page_are_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    blocks = [block.strip() for block in page.split("```")[1::2]]
    first = next(block for block in blocks if block.startswith("$ sparserow plan"))
    command, _, shown = first.removeprefix("$ sparserow ").replace("\\\n", " ").partition("\n")
    more = re.search(r"With `(--cache [^`]+)` two lines follow", page)
    assert more is not None
    cached = next(block for block in blocks if block.startswith("rows in a row cache"))
    for options, expected in (("", shown), (more[1], f"{shown}\n{cached}")):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), *options.split()])
        assert ended.value.code == 0
        said = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert said == expected.splitlines()
