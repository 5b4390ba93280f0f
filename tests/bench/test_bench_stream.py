"""The benchmark of a model that learns day after day runs in its quick form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparserow.deploy.bench import stream
from sparserow.deploy.cli import main


def test_the_quick_form_writes_the_agreed_rows(tmp_path: Path) -> None:
    path = tmp_path / "stream.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "stream", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    figures = {row["metric"].rpartition(": ")[2]: row["value"] for row in json.loads(path.read_text())}
    for number in range(stream.QUICK.days):
        ours, theirs = (figures[f"normalised entropy after {number}, {where}"] for where in ("on servers", "in torch"))
        assert 0 < theirs < 1.2
        assert abs(ours - theirs) <= stream.LIMIT_OF_ENTROPY
    assert figures["normalised entropy, difference of the means"] <= stream.LIMIT_OF_ENTROPY
    assert figures["trained on, batches of 64"] > 0
    assert 0 < figures["freshness, p50 at most"] <= figures["freshness, p99 at most"]


def test_preferences_drift_and_items_come_to_be() -> None:
    size = replace(stream.QUICK, days=7, steps=40, scale=100_000)
    requests = stream.Requests(size)
    before = requests.of_timestamp(-1)
    assert set(before["items"].combine_chunks().flatten().to_pylist()) == set()
    each = size.items // 128
    seen, clicks = [], []
    for number in range(size.days + 1):
        table = requests.of_timestamp(number)
        items, categories = table["item"].to_numpy(), table["category"].to_numpy()
        assert (items // each == categories).all()
        seen.append(int((items % each).max()))
        clicks.append(float(table["click"].to_numpy().mean()))
        history = table["items"].combine_chunks()
        assert np.diff(history.offsets.to_numpy()).max() <= size.history
        assert (history.flatten().to_numpy() // each == table["categories"].combine_chunks().flatten().to_numpy()).all()
        users = table["user"].to_numpy()
        assert all(len(set(categories[users == user])) <= 4 for user in np.unique(users))
    assert seen == sorted(seen)
    assert seen[0] < each // 2 <= seen[-1]
    assert max(clicks) - min(clicks) > 0.1, "the cosine moves what users like"
