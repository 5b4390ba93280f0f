"""What ``bench gpu`` measures beside our step: the dense part in a job of one rank, and fbgemm's tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from sparserow.deploy.bench import gpu
from sparserow.deploy.bench.click_model import DIM, TABLES, PooledClickModel, ZipfBatches, mlp_of_click_model
from sparserow.deploy.bench.peers.fbgemm_tables import FbgemmTables, lack_of_fbgemm
from sparserow.deploy.bench.reduced_tower import backends_of

SIZE = replace(gpu.QUICK, rows=500, batch=32, repetitions=10)


def test_each_part_that_is_there_has_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    host = torch.device("cpu")
    size = replace(SIZE, batch=2)  # Triton's interpreter pools a sample of 26 bags in some 2 ms
    figures = {figure.metric.rpartition(": ")[2]: figure for figure in gpu.measure_steps(size, 2, host)}
    for backend in backends_of(host):
        assert figures[f"dense part in a job of one rank, {backend}"].ratio > 0
    lack = lack_of_fbgemm()
    assert ("rows on a shard, of TBE" in figures) == (lack == "")
    assert lack in capsys.readouterr().out


def test_backends_are_those_that_a_device_has() -> None:
    assert backends_of(torch.device("cpu")) == ("gloo",)
    assert backends_of(torch.device("meta")) == ()
    assert "gloo" in backends_of(torch.device("cuda"))


@pytest.mark.skipif(lack_of_fbgemm() != "", reason=lack_of_fbgemm())
def test_fbgemm_trains_the_same_model_as_torch() -> None:
    """Losses and rows after four steps; else the two would not be measured at the same work."""
    torch.manual_seed(4)
    tables, mlp, ours = (
        FbgemmTables(TABLES, SIZE.rows, DIM, lr=0.05, device=torch.device("cpu")),
        mlp_of_click_model(),
        PooledClickModel(SIZE.rows),
    )
    ours.mlp.load_state_dict(mlp.state_dict())
    for table, weights in zip(ours.tables, tables.weights(), strict=True):
        weights.copy_(table.weight.detach())
    rows = torch.optim.Adagrad(ours.tables.parameters(), lr=0.05)
    towers = [torch.optim.Adam(tower.parameters(), lr=1e-3) for tower in (mlp, ours.mlp)]
    source = ZipfBatches(SIZE, 3)
    for _ in range(4):
        ids, labels = source.make()
        losses = [
            nn.functional.binary_cross_entropy_with_logits(logits, labels)
            for logits in (mlp(tables(ids)).squeeze(1), ours(ids))
        ]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for loss, tower in zip(losses, towers, strict=True):
            tower.zero_grad()
            loss.backward()
            tower.step()
        rows.step()
        rows.zero_grad()
    for table, weights in zip(ours.tables, tables.weights(), strict=True):
        torch.testing.assert_close(weights, table.weight.detach(), rtol=1e-4, atol=1e-5)
