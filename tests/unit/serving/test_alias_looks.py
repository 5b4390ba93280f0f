"""What a look at an alias costs in requests, which serving processes make all the time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import NotFound
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.serve_config import ServeConfig

VERSIONS = 168


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    for version in range(1, VERSIONS + 1):
        folder = tmp_path / "ctr" / f"v{version:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (tmp_path / "ctr" / "aliases.json").write_text(json.dumps({"live": {"version": VERSIONS}}))
    return ModelRegistry(str(tmp_path))


def test_a_look_asks_for_the_alias_alone(registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def counts(name: str) -> None:
        original = getattr(Folder, name)

        def counted(self: Folder, *given: Any) -> Any:
            asked[name] += 1
            return original(self, *given)

        monkeypatch.setattr(Folder, name, counted)

    for name in ("exists", "names", "read_small"):
        counts(name)
    assert registry.resolve("ctr", "live").version == VERSIONS
    assert asked.total() <= 2, asked
    asked.clear()
    assert registry.resolve("ctr", "7").version == 7
    assert asked.total() <= 1, asked


def test_what_is_not_there_is_said_with_what_is(registry: ModelRegistry) -> None:
    for model, which, words in (
        ("ctr", "canary", "has no alias 'canary'; it has: live"),
        ("ctr", "999", r"has no version 999; it has: 1, 2, 3"),
        ("other", "live", "there is none at .*; there are: ctr"),
        ("other", "1", "there is none at .*; there are: ctr"),
    ):
        with pytest.raises(NotFound, match=words):
            registry.resolve(model, which)


def test_a_url_is_looked_at_less_often() -> None:
    for root, poll, expected in (("/models", None, 0.5), ("s3://b/models", None, 5.0), ("s3://b/models", "1s", 1.0)):
        assert ServeConfig(model=("ctr",), root=root, poll=poll).poll_sec == expected
