"""The servers of deploy/compose.yaml, as processes: they train, publish, serve and are scraped as in containers."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import sparserow as sr
from compose_services import COMPOSE_FILE, LocalServices, server_services
from sparserow_process import Launcher, Process


class Clicks(nn.Module):
    """One table, and one weight for each of its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.ad = nn.EmbeddingBag(1_000, 4, mode="sum")
        self.tower = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of bags of ids."""
        return self.tower(self.ad(ids))[:, 0]


@pytest.mark.full("tests/contract/test_compose.py checks the same command lines, ports and files")
def test_its_servers_train_publish_and_serve(launcher: Launcher, tmp_path: Path) -> None:
    local = LocalServices(tmp_path)

    def start(name: str) -> Process:
        launcher.environment.update(local.environment(name))
        return launcher.start(*local.arguments(name))

    # Docker starts a shard again whose coordinator does not listen yet; here the shards wait for it.
    started = {"coordinator": start("coordinator")}
    started["coordinator"].wait_for(r"coordinator at \S+, waiting for 2 shards")
    started |= {name: start(name) for name in server_services() if name.startswith("ps-")}
    assert "NotFound" in start("serving").error_line(), "nothing is published, so that Docker starts it again"
    keys = [1, 2, 3]
    with sr.connect(local.address("coordinator:7000"), "ads") as session:
        model = session.distribute(Clicks(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        ids = torch.randint(0, 1_000, (256, 3), generator=torch.Generator().manual_seed(0))
        ids[:, 0] = torch.arange(256)
        for _ in range(5):
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids), (ids[:, 0] % 2).float())
            loss.backward()
            session.step(dense)
        session.publish("ads", root=str(tmp_path / "models"), model=model, example=(ids,))
        trained = session.table("ad").pull(torch.tensor(keys))
    started["serving"] = start("serving")
    started["serving"].wait_for(r"serving ads@live ready at")
    body = json.dumps({"model": "ads", "tables": {"ad": keys}}).encode()
    with urllib.request.urlopen(f"http://{local.address('serving:7102')}/v1/lookup", body, timeout=60) as reply:
        (served,) = json.load(reply)["tables"].values()
    np.testing.assert_allclose(served["rows"], trained, rtol=1e-6)
    scraped = yaml.safe_load((COMPOSE_FILE.parent / "monitoring" / "prometheus.yaml").read_text())
    (static,) = scraped["scrape_configs"][0]["static_configs"]
    pages = {}
    for target in static["targets"]:
        with urllib.request.urlopen(f"http://{local.address(target)}/metrics", timeout=60) as page:
            pages[target.partition(":")[0]] = page.read().decode()
    metrics = {"coordinator": "cluster_ready", "ps-0": "ps_", "ps-1": "ps_", "serving": "serving_"}
    assert {name for name, metric in metrics.items() if f"\nsparserow_{metric}" in pages[name]} == set(pages)
    for process in reversed(started.values()):
        process.signal(signal.SIGTERM)
        assert process.end() == 0, process.err
