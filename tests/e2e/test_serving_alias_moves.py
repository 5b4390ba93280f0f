"""An alias that moves between two versions that follow training: no row that was seen goes back."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sparserow as sr
from sparserow.cpp_ext import _server
from sparserow.proto.published.registry import Alias, ModelRegistry
from sparserow.serving import versions as served_models
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.versions import ModelsOptions, Served, ServedModels
from sparserow_process import wait_until

KEYS = np.arange(64, dtype=np.uint64)
MOVES = 8


def test_rows_never_go_back(tmp_path: Path) -> None:
    root = str(tmp_path)
    with (
        sr.local_cluster(shards=2, slot_count=64) as cluster,
        sr.connect(cluster.address, "ads", staleness=None) as session,
    ):
        table = session.create_table("user", dim=2, optimizer=sr.optim.SGD())
        table.assign(KEYS, np.zeros((len(KEYS), 2), np.float32))
        for _ in range(2):
            session.publish("ctr", root=root)
        registry, stop = ModelRegistry(root), threading.Event()
        written = 0

        def write() -> None:
            nonlocal written
            while not stop.is_set():
                written += 1
                table.assign(KEYS, np.full((len(KEYS), 2), written, np.float32))

        follow: dict[str, Any] = {"follow": cluster.address, "sync_interval": "50ms", "poll": "20ms"}
        with (
            sr.local_serving("ctr", root=root, **follow) as serving,
            sr.ServingClient(serving.addresses, refresh_sec=0.02) as client,
        ):
            writer = threading.Thread(target=write, daemon=True)
            writer.start()
            seen = np.zeros(len(KEYS), np.float32)

            def look() -> None:
                nonlocal seen
                rows = client.lookup("user", KEYS, deadline_ms=20_000).rows[:, 0]
                assert (rows >= seen).all(), f"rows went back: {seen.max()} to {rows.min()}"
                seen = rows

            def is_at(version: int) -> bool:
                look()
                return client.version == version

            for move in range(MOVES):
                version = 1 + move % 2
                registry.point("ctr", "live", version)
                wait_until(lambda version=version: is_at(version), "the move")
                before = written
                wait_until(lambda before=before: look() is None and written > before + 3, "some more writes")
            stop.set()
            writer.join(60)
            wait_until(lambda: look() is None and bool((seen == written).all()), "the last rows, also where it paused")


class Follower:
    def __init__(self) -> None:
        self.is_still = self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = self.is_still = False


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> ServedModels:
    """Versions 1 and 2 are loaded, and 1 is live; both follow."""
    server: Any = SimpleNamespace(set_model=lambda *_, **__: None)
    made = ServedModels(None, server, ModelsOptions((("ctr", "live"),), ShardAssignment()))
    monkeypatch.setattr(made, "_registry", SimpleNamespace(resolve=lambda *_: made.named, folder=lambda *_: None))
    monkeypatch.setattr(served_models, "newest_number", lambda _: 0)
    for version in (1, 2):
        facts: dict[str, Any] = {"model": "ctr", "version": version, "cluster_id": 7, "slot_count": 4}
        store, slots = _server.Store(slot_count=4), np.full(4, 10, np.uint64)
        loaded = SimpleNamespace(**facts, store=store, slots=slots)
        served = Served(loaded, Follower())  # type: ignore[arg-type]
        made._change(lambda book, key=("ctr", version), served=served: book.versions.update({key: served}))
    made.named = Alias(1)  # type: ignore[attr-defined]
    made._refresh("ctr", "live")
    return made


def test_the_former_version_stands_still_until_the_new_one_has_what_it_showed(models: Any) -> None:
    one, two = (models.book().versions["ctr", version] for version in (1, 2))
    alias = models.book().aliases.__getitem__
    one.loaded.slots[2] = 12
    models.named = Alias(2)
    models._refresh("ctr", "live")
    assert one.follower.is_paused
    assert alias(("ctr", "live")) == Alias(1)
    two.loaded.slots[:] = 12
    models._refresh("ctr", "live")
    assert models.book().aliases["ctr", "live"] == Alias(1), "a page of the former one may be under way"
    one.follower.is_still = True
    models._refresh("ctr", "live")
    assert models.book().aliases["ctr", "live"] == Alias(2)
    assert one.follower.is_paused, "clients that have not seen the move read what they had, and nothing newer"
    models.named = Alias(1)
    models._refresh("ctr", "live")
    assert two.follower.is_paused
    assert not one.follower.is_paused, "it is to be live again"


def test_a_move_that_is_taken_back_or_takes_too_long_ends(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = models.book().versions["ctr", 1]
    one.loaded.slots[2] = 12
    models.named = Alias(2)
    models._refresh("ctr", "live")
    assert one.follower.is_paused
    models.named = Alias(1)
    models._refresh("ctr", "live")
    assert not one.follower.is_paused
    monkeypatch.setattr(served_models, "_CATCH_UP_SEC", 0.0)  # training is away
    models.named = Alias(2)
    models._refresh("ctr", "live")
    assert models.book().aliases["ctr", "live"] == Alias(2)
