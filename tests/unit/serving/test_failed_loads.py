"""A serving process does not read a version that cannot be loaded at every look at the aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from published_files import DIM, SLOT_COUNT, write_version
from sparserow.cpp_ext import _server
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving import versions
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.versions import ModelsOptions, ServedModels

DAMAGE = "the file does not match its checksum"


class Scene:
    """Version 1 is served, and version 2 is damaged; the scene has the clock of the pauses."""

    def __init__(self, root: Path, models: ServedModels) -> None:
        self.registry, self.models = ModelRegistry(str(root)), models
        self.part = next((root / "ctr" / "v000002").glob("rows.0.0.1.*"))
        self.now, self.reads = 0.0, 0

    def damage(self) -> None:
        data = bytearray(self.part.read_bytes())
        data[-5] ^= 1
        self.part.write_bytes(data)

    def reads_of(self, polls: int, pause: float = 0.0) -> int:
        before = self.reads
        for _ in range(polls):
            self.now += pause
            self.models.refresh()
        return self.reads - before


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for _ in range(2):
        write_version(str(tmp_path), "ctr", np.ones((20, DIM), np.float32))
    server = _server.Server(_server.Store(slot_count=SLOT_COUNT))
    options = ModelsOptions((("ctr", "live"),), ShardAssignment())
    made = Scene(tmp_path, ServedModels(ModelRegistry(str(tmp_path)), server, options))
    load: Callable[..., Any] = versions.load_version

    def counted(*arguments: Any, **options: Any) -> Any:
        made.reads += 1
        return load(*arguments, **options)

    monkeypatch.setattr(versions, "load_version", counted)
    monkeypatch.setattr("sparserow.serving.failed_loads._now", lambda: made.now)
    made.registry.point("ctr", "live", 1)
    assert made.reads_of(2) == 1
    made.damage()
    made.registry.point("ctr", "live", 2)
    yield made
    server.stop()


def test_a_version_that_cannot_be_loaded_is_read_again_at_growing_pauses(scene: Scene) -> None:
    assert scene.reads_of(10) == 1
    assert DAMAGE in scene.models.problems()["ctr@live"]
    assert scene.models.find("ctr", "live")[0].version == 1
    assert scene.reads_of(119, 0.5) == 5, "after 1, 3, 7, 15 and 31 s"
    assert scene.reads_of(1200, 0.5) == 10, "once a minute"
    assert DAMAGE in scene.models.problems()["ctr@live"]


def test_it_is_read_at_once_when_its_files_or_the_alias_change(scene: Scene) -> None:
    assert scene.reads_of(2) == 1
    scene.registry.point("ctr", "live", 1)
    assert scene.reads_of(2) == 0
    assert scene.models.problems() == {}
    scene.registry.point("ctr", "live", 2)
    assert scene.reads_of(2) == 1
    scene.damage()
    assert scene.reads_of(2) == 1
    assert scene.models.problems() == {}
    assert scene.models.find("ctr", "live")[0].version == 2
